"""How the broker of a queue is found."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from opendata_buffer.broker.client import ChannelClosed, Connection, DiscoveryRecord, Lease
from opendata_buffer.broker.committer import Discovery
from opendata_buffer.runtime import SystemRuntime, Task
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import CONFIG, RUNTIME, FakeConnection, announce, eventually


class World:
    def __init__(self, *, announced: bool = True, waits_s: float | None = None) -> None:
        self.store = MemoryStore()
        self.lease = Lease(self.store, CONFIG, RUNTIME)
        self.made: list[FakeConnection] = []
        self.refuses = False
        self.slow = threading.Event()
        self.slow.set()
        self.discovery = Discovery(self.store, CONFIG, RUNTIME, self.connect, waits_s=waits_s)
        if announced:
            announce(self.store)

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        assert self.slow.wait(30)
        if self.refuses:
            raise ChannelClosed("no network")
        self.made.append(FakeConnection(record=broker_record))
        return self.made[-1]  # type: ignore[return-value]


def test_one_thread_searches_and_all_get_what_it_found() -> None:
    world = World()
    world.slow.clear()
    found: list[Connection | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(world.discovery.find())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    world.slow.set()
    for thread in threads:
        thread.join(30)
    assert len(world.made) == 1
    assert found == world.made * 4
    assert world.discovery.connection is found[0]


def test_a_forgotten_connection_is_closed_and_another_one_made() -> None:
    world = World()
    first = world.discovery.find()
    assert first is not None
    world.discovery.forget(first)
    second = world.discovery.find()
    assert second is not None
    assert first.is_over
    # A thread that still has the first one does not take the second one from the others.
    world.discovery.forget(first)
    assert world.discovery.find() is second


def test_for_a_broker_that_was_not_reached_no_caller_waits_a_second_time() -> None:
    world = World(waits_s=60.0)
    discovery = world.discovery
    world.refuses = True
    assert discovery.find() is None
    world.slow.clear()
    began = RUNTIME.monotonic()
    assert discovery.find() is None
    assert RUNTIME.monotonic() - began < 30
    world.refuses = False
    world.slow.set()
    eventually(lambda: discovery.connection)
    assert discovery.find() is world.made[0]


def test_without_a_thread_to_spare_the_caller_searches_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    world = World(waits_s=0.05)
    discovery = world.discovery
    monkeypatch.setattr(SystemRuntime, "spawn", none_left)
    assert discovery.find() is world.made[0]


def test_a_closed_finder_finds_nothing_and_closes_what_is_found_meanwhile() -> None:
    world = World()
    world.slow.clear()
    thread = threading.Thread(target=world.discovery.find)
    thread.start()
    while not world.discovery._searching:
        pass
    assert world.discovery.close() is None
    world.slow.set()
    thread.join(30)
    # The caller has gone; the thread that looks may only now get its connection.
    eventually(lambda: world.made and world.made[0].is_over)
    assert world.discovery.find() is None


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_caller_keeps_no_other_from_looking(begun: bool) -> None:
    world = World()

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

    discovery = Discovery(world.store, CONFIG, Interrupted(), connect)
    if begun:
        world.slow.clear()
    with pytest.raises(KeyboardInterrupt):
        discovery.find()
    found: list[Connection | None] = []
    other = threading.Thread(target=lambda: found.append(discovery.find()), daemon=True)
    other.start()
    world.slow.set()
    other.join(10)
    assert not other.is_alive()
    assert found == [discovery.connection]
    assert discovery.connection is not None
    # Of two looks at once one connection is kept.
    eventually(lambda: sum(not each.is_over for each in world.made) == 1)
