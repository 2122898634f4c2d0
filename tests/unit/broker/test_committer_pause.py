"""A queue that asks the broker to pause after lost races."""

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
    """Records the reads, and lets another writer win races."""

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
        """Append as another writer."""
        inner = MemoryStore.get(self, CONFIG.manifest_path)
        assert isinstance(inner, Blob)
        after = Manifest.parse(inner.data).append(entries(f"rival{len(self.read)}"))
        self.put(CONFIG.manifest_path, after.raw)


def writes_asked(broker: FakeConnection) -> list[int]:
    """Return the number of writes of each requested pause."""
    assert {each["op"] for each in broker.asked} <= {"pause"}
    return [each["writes"] for each in broker.asked]


class PauseFixture:
    """A queue with one entry, a writer that asks for pauses, and the brokers it connects to."""

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


def connected() -> tuple[PauseFixture, FakeConnection]:
    """Return a fixture whose writer lost one race, and the broker it connected to."""
    fixture = PauseFixture()
    fixture.append("a", faster=1)
    (broker,) = fixture.brokers
    return fixture, broker


def test_no_discovery_record_is_read_without_a_lost_race() -> None:
    plain, asking = PauseFixture(asks=False), PauseFixture()
    for fixture in (plain, asking):
        for number in range(3):
            fixture.append(str(number))
    assert asking.store.read == plain.store.read
    assert asking.brokers == []


def test_after_a_lost_race_a_broker_is_searched_for_once() -> None:
    fixture = PauseFixture(announced=False)
    fixture.append("a", faster=3)
    assert fixture.looks() == 1
    fixture.append("b", faster=1)
    assert fixture.looks() == 1
    fixture.runtime.advance(IDLE_SEARCH_S)
    fixture.append("c", faster=1)
    assert fixture.looks() == 2
    assert [fixture.queued(name) for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize(
    "how", [Lost(0, 0.0), Refused("moved"), None], ids=["lost", "moved", "ended"]
)
def test_the_successor_of_a_lost_broker_is_found_within_a_second(
    how: Lost | Refused | None,
) -> None:
    fixture, broker = connected()
    if how is None:
        broker.close()
    else:
        broker.answers = [how]
    fixture.append("b", faster=1)
    assert fixture.queued("b") == 1
    assert broker.is_over
    announce(fixture.store)
    fixture.runtime.advance(SEARCH_S)
    fixture.append("c", faster=1)
    assert [writes_asked(each) for each in fixture.brokers[1:]] == [[1]]


def test_a_broker_that_answers_but_does_not_pause_keeps_its_connection() -> None:
    fixture, broker = connected()
    broker.lives, broker.answers = True, [Lost(0, 0.0)]
    fixture.append("b")
    assert writes_asked(broker) == [1, 1]
    assert not broker.is_over
    assert fixture.queued("b") == 1


def test_a_queue_that_is_garbage_collected_without_close_ends_its_connection() -> None:
    fixture, broker = connected()
    assert not broker.is_over
    del fixture.queue
    gc.collect()
    assert broker.is_over


def test_a_forked_child_opens_its_own_connection_and_keeps_its_parents_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture, parents = connected()
    asked = list(parents.asked)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    fixture.append("alone")
    assert len(fixture.brokers) == 1
    fixture.append("child", faster=1)
    _, own = fixture.brokers
    assert writes_asked(own) == [1]
    fixture.queue.close()
    assert own.is_over
    # The reading thread, which may have held its locks during the fork, does not exist here.
    assert parents.asked == asked
    assert not parents.is_over
