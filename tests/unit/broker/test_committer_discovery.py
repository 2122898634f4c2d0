"""How a process finds the broker of a queue."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from opendata_buffer.broker.client import ChannelClosed, Connection, DiscoveryRecord, Lease
from opendata_buffer.broker.committer import Discovery
from opendata_buffer.runtime import SystemRuntime, Task
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import CONFIG, RUNTIME, FakeConnection, announce, eventually


class DiscoveryFixture:
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


def test_one_thread_searches_and_all_threads_get_the_connection() -> None:
    fixture = DiscoveryFixture()
    fixture.slow.clear()
    found: list[Connection | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(fixture.discovery.find())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    fixture.slow.set()
    for thread in threads:
        thread.join(30)
    assert len(fixture.made) == 1
    assert found == fixture.made * 4
    assert fixture.discovery.connection is found[0]


def test_a_forgotten_connection_is_closed_and_replaced() -> None:
    fixture = DiscoveryFixture()
    first = fixture.discovery.find()
    assert first is not None
    fixture.discovery.forget(first)
    second = fixture.discovery.find()
    assert second is not None
    assert first.is_over
    # A thread that still has the first connection does not remove the second one.
    fixture.discovery.forget(first)
    assert fixture.discovery.find() is second


def test_no_caller_waits_again_for_a_broker_that_could_not_be_reached() -> None:
    fixture = DiscoveryFixture(waits_s=60.0)
    discovery = fixture.discovery
    fixture.refuses = True
    assert discovery.find() is None
    fixture.slow.clear()
    began = RUNTIME.monotonic()
    assert discovery.find() is None
    assert RUNTIME.monotonic() - began < 30
    fixture.refuses = False
    fixture.slow.set()
    eventually(lambda: discovery.connection)
    assert discovery.find() is fixture.made[0]


def test_the_caller_searches_itself_if_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    fixture = DiscoveryFixture(waits_s=0.05)
    discovery = fixture.discovery
    monkeypatch.setattr(SystemRuntime, "spawn", none_left)
    assert discovery.find() is fixture.made[0]


def test_close_ends_the_search_and_closes_a_connection_that_is_made_meanwhile() -> None:
    fixture = DiscoveryFixture()
    fixture.slow.clear()
    thread = threading.Thread(target=fixture.discovery.find)
    thread.start()
    while not fixture.discovery._searching:
        pass
    assert fixture.discovery.close() is None
    fixture.slow.set()
    thread.join(30)
    # The caller is gone, and the searching thread may get its connection only now.
    eventually(lambda: fixture.made and fixture.made[0].is_over)
    assert fixture.discovery.find() is None


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_caller_does_not_stop_others_from_searching(begun: bool) -> None:
    fixture = DiscoveryFixture()

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
        return fixture.connect(broker_record)

    discovery = Discovery(fixture.store, CONFIG, Interrupted(), connect)
    if begun:
        fixture.slow.clear()
    with pytest.raises(KeyboardInterrupt):
        discovery.find()
    found: list[Connection | None] = []
    other = threading.Thread(target=lambda: found.append(discovery.find()), daemon=True)
    other.start()
    fixture.slow.set()
    other.join(10)
    assert not other.is_alive()
    assert found == [discovery.connection]
    assert discovery.connection is not None
    # Two concurrent searches keep one connection.
    eventually(lambda: sum(not each.is_over for each in fixture.made) == 1)
