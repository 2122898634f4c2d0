"""A queue that has a broker pause: when it asks, and what it does without."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import pytest

from opendata_buffer.broker.client import ChannelClosed, Connection, DiscoveryRecord, Lost, Refused
from opendata_buffer.broker.committer import IDLE_SEARCH_S, SEARCH_S, BrokerPause
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import CONFIG, FakeConnection, announce, entries

DISCOVERY_RECORD = "ingest/_broker.json"


class Counting(MemoryStore):
    """Remembers what was read, and lets another writer be faster."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.faster = 0

    def get(self, key: str, **arguments: Any) -> Blob | None:
        self.read.append(key)
        found = super().get(key, **arguments)
        if key == CONFIG.manifest_path and self.faster:
            self.faster -= 1
            self.rival()
        return found

    def rival(self) -> None:
        """Another writer appends."""
        inner = MemoryStore.get(self, CONFIG.manifest_path)
        assert isinstance(inner, Blob)
        after = Manifest.parse(inner.data).append(entries(f"rival{len(self.read)}"))
        self.put(CONFIG.manifest_path, after.raw)


def writes_asked(broker: FakeConnection) -> list[int]:
    """For how many writes each pause was asked for."""
    assert {each["op"] for each in broker.asked} <= {"pause"}
    return [each["writes"] for each in broker.asked]


class World:
    """A queue with one entry, a queue of it, and the brokers it connects to."""

    def __init__(self, *, asks: bool = True, announced: bool = True) -> None:
        self.runtime = ManualRuntime()
        self.store = Counting()
        self.brokers: list[FakeConnection] = []
        self.reached = True
        Queue(self.store, CONFIG, runtime=self.runtime, role="test").append(entries("first"))
        self.queue = Queue(
            self.store,
            CONFIG,
            runtime=self.runtime,
            role="producer",
            open_pause=partial(BrokerPause, network=self) if asks else None,
        )
        if announced:
            announce(self.store)
        self.store.read.clear()

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        if not self.reached:
            raise ChannelClosed("no network")
        self.brokers.append(FakeConnection(*[{"op": "given"}] * 9, record=broker_record))
        return self.brokers[-1]  # type: ignore[return-value]

    def append(self, name: str, *, faster: int = 0) -> None:
        self.store.faster = faster
        self.queue.append(entries(name), read_first=bool(faster))

    def looks(self) -> int:
        return self.store.read.count(DISCOVERY_RECORD)

    def queued(self, name: str) -> int:
        manifest = Queue(self.store, CONFIG, runtime=self.runtime, role="test").read()
        assert manifest is not None
        return [each.location for each in manifest.entries()].count(f"ingest/{name}.batch")


def connected() -> tuple[World, FakeConnection]:
    """After an append that lost a race."""
    world = World()
    world.append("a", faster=1)
    (broker,) = world.brokers
    return world, broker


def test_without_a_lost_race_nothing_is_read_for_a_broker() -> None:
    plain, asking = World(asks=False), World()
    for world in (plain, asking):
        for number in range(3):
            world.append(str(number))
    assert asking.store.read == plain.store.read
    assert asking.brokers == []


def test_after_a_lost_race_a_broker_is_searched_for_once() -> None:
    world = World(announced=False)
    world.append("a", faster=3)
    assert world.looks() == 1
    world.append("b", faster=1)
    assert world.looks() == 1
    world.runtime.advance(IDLE_SEARCH_S)
    world.append("c", faster=1)
    assert world.looks() == 2
    assert [world.queued(name) for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize(
    "how", [Lost(0, 0.0), Refused("moved"), None], ids=["lost", "moved", "ended"]
)
def test_a_broker_that_is_gone_is_forgotten_and_its_successor_found_within_a_second(
    how: Lost | Refused | None,
) -> None:
    world, broker = connected()
    if how is None:
        broker.close()
    else:
        broker.answers = [how]
    world.append("b", faster=1)
    assert world.queued("b") == 1
    assert broker.is_over
    announce(world.store)
    world.runtime.advance(SEARCH_S)
    world.append("c", faster=1)
    assert [writes_asked(each) for each in world.brokers[1:]] == [[1]]


def test_a_broker_that_lives_and_gives_no_pause_keeps_its_connection() -> None:
    world, broker = connected()
    broker.lives, broker.answers = True, [Lost(0, 0.0)]
    world.append("b")
    assert writes_asked(broker) == [1, 1]
    assert not broker.is_over
    assert world.queued("b") == 1


def test_a_queue_that_is_dropped_without_close_ends_its_connection() -> None:
    world, broker = connected()
    assert not broker.is_over
    del world.queue
    gc.collect()
    assert broker.is_over


def test_a_forked_child_leaves_its_parents_connection_alone_and_makes_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, parents = connected()
    asked = list(parents.asked)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    world.append("alone")
    assert len(world.brokers) == 1
    world.append("child", faster=1)
    _, own = world.brokers
    assert writes_asked(own) == [1]
    world.queue.close()
    assert own.is_over
    # The thread that reads it, and may have had its locks when the process was forked, is not here.
    assert parents.asked == asked
    assert not parents.is_over
