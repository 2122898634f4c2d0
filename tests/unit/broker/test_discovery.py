"""How the broker of a queue is found."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from opendata_buffer.broker.client import ChannelClosed, Connection
from opendata_buffer.broker.discovery import Discovery
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.runtime import SystemRuntime, Task
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import CONFIG, RUNTIME, eventually


class Made:
    """A connection that only knows whose it is."""

    def __init__(self, broker_record: DiscoveryRecord) -> None:
        self.broker_record = broker_record
        self.is_over = False

    def close(self) -> None:
        self.is_over = True


class World:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.lease = Lease(self.store, CONFIG, RUNTIME)
        self.made: list[Made] = []
        self.refuses = False
        self.slow = threading.Event()
        self.slow.set()
        self.finder = Discovery(self.store, CONFIG, RUNTIME, self.connect)

    def announce(self) -> DiscoveryRecord:
        broker = DiscoveryRecord(0, RUNTIME.ulid(), "x:1", b"s" * 32)
        taken = self.lease.take(broker, self.lease.read())
        assert taken is not None
        return taken

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        assert self.slow.wait(30)
        if self.refuses:
            raise ChannelClosed("no network")
        self.made.append(Made(broker_record))
        return self.made[-1]  # type: ignore[return-value]


def test_without_a_broker_nothing_is_found_and_it_says_why() -> None:
    world = World()
    assert world.finder.find() is None
    assert not world.finder.announced
    assert "none is announced" in world.finder.reason
    world.announce()
    world.refuses = True
    assert world.finder.find() is None
    assert world.finder.announced
    assert world.finder.reason == "no network"


def test_one_thread_looks_and_all_get_what_it_found() -> None:
    world = World()
    world.announce()
    world.slow.clear()
    found: list[Connection | None] = []
    threads = [threading.Thread(target=lambda: found.append(world.finder.find())) for _ in range(4)]
    for thread in threads:
        thread.start()
    world.slow.set()
    for thread in threads:
        thread.join(30)
    assert len(world.made) == 1
    assert found == world.made * 4
    assert world.finder.connection is found[0]


def test_who_may_not_look_gets_what_is_there() -> None:
    world = World()
    world.announce()
    assert world.finder.find(lambda: False) is None
    connection = world.finder.find()
    assert connection is not None
    assert world.finder.find(lambda: False) is connection
    world.made[0].is_over = True
    assert world.finder.find(lambda: False) is None


def test_a_forgotten_connection_is_closed_and_another_one_made() -> None:
    world = World()
    world.announce()
    first = world.finder.find()
    assert first is not None
    world.finder.forget(first)
    second = world.finder.find()
    assert second is not None
    assert first.is_over
    # Somebody who has still the first one does not take the second one from the others.
    world.finder.forget(first)
    assert world.finder.find() is second


def test_a_silent_brokers_successor_is_asked_at_once_and_itself_after_a_sign_of_life() -> None:
    world = World()
    announced = world.announce()
    connection = world.finder.find()
    assert connection is not None
    world.finder.forget(connection, fell_silent=True)
    assert [world.finder.find() for _ in range(2)] == [None, None]
    assert "not renewed" in world.finder.reason
    assert world.lease.beat(announced) is not None
    again = world.finder.find()
    assert again is not None
    world.finder.forget(again, fell_silent=True)
    world.announce()
    assert world.finder.find() is world.made[2]


def test_who_may_wait_no_longer_goes_on_without_and_finds_the_connection_later() -> None:
    world = World()
    world.announce()
    finder = Discovery(world.store, CONFIG, RUNTIME, world.connect, waits_s=0.05)
    world.slow.clear()
    assert finder.find() is None
    # Nobody looks a second time meanwhile, and nobody waits again.
    assert finder.find(lambda: pytest.fail("looks twice")) is None
    world.slow.set()
    eventually(lambda: finder.connection)
    assert finder.find() is world.made[0]
    assert len(world.made) == 1


def test_for_a_broker_that_was_not_reached_nobody_waits_a_second_time() -> None:
    world = World()
    world.announce()
    finder = Discovery(world.store, CONFIG, RUNTIME, world.connect, waits_s=60.0)
    world.refuses = True
    assert finder.find() is None
    world.slow.clear()
    began = RUNTIME.monotonic()
    assert finder.find() is None
    assert RUNTIME.monotonic() - began < 30
    world.refuses = False
    world.slow.set()
    eventually(lambda: finder.connection)
    assert finder.find() is world.made[0]


def test_without_a_thread_to_spare_who_asks_looks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    world = World()
    world.announce()
    finder = Discovery(world.store, CONFIG, RUNTIME, world.connect, waits_s=0.05)
    monkeypatch.setattr(SystemRuntime, "spawn", none_left)
    assert finder.find() is world.made[0]


def test_a_closed_finder_finds_nothing_and_closes_what_is_found_meanwhile() -> None:
    world = World()
    world.announce()
    world.slow.clear()
    thread = threading.Thread(target=world.finder.find)
    thread.start()
    while not world.finder._looking:
        pass
    assert world.finder.close() is None
    world.slow.set()
    thread.join(30)
    # Who asked has gone; the thread that looks may only now get its connection.
    eventually(lambda: world.made and world.made[0].is_over)
    assert world.finder.find() is None


@pytest.mark.parametrize("begun", [False, True])
def test_who_is_interrupted_as_he_begins_to_look_keeps_nobody_from_looking(begun: bool) -> None:
    world = World()
    world.announce()

    class Interrupted(SystemRuntime):
        interrupts = True

        def spawn(self, target: Callable[[], None], name: str) -> Task:
            if not self.interrupts:
                return super().spawn(target, name)
            self.interrupts = False
            if begun:
                super().spawn(target, name)
                eventually(lambda: looking.is_set())
            raise KeyboardInterrupt

    looking = threading.Event()

    def connect(broker_record: DiscoveryRecord) -> Connection:
        looking.set()
        return world.connect(broker_record)

    finder = Discovery(world.store, CONFIG, Interrupted(), connect)
    if begun:
        world.slow.clear()
    with pytest.raises(KeyboardInterrupt):
        finder.find()
    found: list[Connection | None] = []
    other = threading.Thread(target=lambda: found.append(finder.find()), daemon=True)
    other.start()
    world.slow.set()
    other.join(10)
    assert not other.is_alive()
    assert found == [finder.connection]
    assert finder.connection is not None
    # Of two looks at once one connection is kept.
    eventually(lambda: sum(not each.is_over for each in world.made) == 1)
