"""Feeding next to a producer: in a thread, without delaying its appends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from opendata_buffer import Producer
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue import v1_feeding
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.queue.v1_admin import add_v1_reader
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from tests.support.v1_consumer import V1Consumer
from tests.unit.broker.local import eventually

QUEUE = "other/manifest"
CONFIG = QueueConfig(store="memory://log")


class Watched(MemoryStore):
    """Notes the keys that are read and written, and can hold writes of the v1 queue."""

    def __init__(self) -> None:
        super().__init__("log")
        self.reads: list[str] = []
        self.free = threading.Event()
        self.free.set()
        self.held = threading.Event()

    def get(self, key: str, **options: Any) -> Any:
        self.reads.append(key)
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if key == QUEUE and not self.free.is_set():
            self.held.set()
            assert self.free.wait(30)
        return super().put_if(key, data, condition)


class Fixture:
    def __init__(self) -> None:
        self.store, self.runtime = Watched(), SystemRuntime()
        claim = claim_for_writing(self.store, CONFIG, runtime=self.runtime)
        enable_readers(self.store, CONFIG, claim, self.runtime)

    def view(self) -> LogView:
        log = Log(self.store, CONFIG, self.runtime)
        return LogView.of(log, log.need(), self.manifest())

    def add(self) -> None:
        add_v1_reader(self.store, self.view, "other", "other", lambda view: view.first_sequence)

    def manifest(self) -> Manifest:
        return read_manifest(self.store, CONFIG, self.runtime) or Manifest.empty()

    def queue(self) -> Queue:
        claim = claim_for_writing(self.store, CONFIG, runtime=self.runtime)
        return Queue(self.store, CONFIG, runtime=self.runtime, role="test", claim=claim, feeds=True)

    def fed(self) -> int:
        return Manifest.parse(super(Watched, self.store).get(QUEUE).data).next_sequence


def test_what_a_producer_appends_reaches_the_queue_and_close_waits_for_the_last() -> None:
    fixture = Fixture()
    fixture.add()
    config = ProducerConfig(store="memory://log", broker="off")
    with Producer(config, store=fixture.store) as producer:
        producer.produce([b"a"]).result(30)
        eventually(lambda: fixture.fed() == 1)
        for _ in range(5):
            producer.produce([b"b"]).result(30)
    assert fixture.fed() == fixture.manifest().next_sequence == 6


def test_an_append_does_not_wait_for_a_queue_that_hangs() -> None:
    fixture = Fixture()
    fixture.add()
    queue = fixture.queue()
    fixture.store.free.clear()
    queue.append([NewEntry("ingest/0.batch")])
    assert fixture.store.held.wait(30)
    for number in range(1, 5):
        queue.append([NewEntry(f"ingest/{number}.batch")])
    assert fixture.fed() == 0
    fixture.store.free.set()
    eventually(lambda: fixture.fed() == 5)
    queue.close()


def test_a_full_queue_is_filled_when_the_consumer_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendata_buffer.queue.v1_feed.MOST_ENTRIES", 3)
    monkeypatch.setattr(v1_feeding, "_BEHIND_S", 0.01)
    fixture = Fixture()
    fixture.add()
    queue = fixture.queue()
    queue.append([NewEntry(f"ingest/{number}.batch") for number in range(8)])
    consumer = V1Consumer(fixture.store, "other")
    found: list[int] = []
    eventually(lambda: fixture.fed() == 3)
    assert consumer.claim()

    def has_all() -> bool:
        new = [entry.sequence for entry in consumer.next_entries()]
        if new:
            assert consumer.dequeue(new[-1]) or consumer.dequeue(new[-1])
            found.extend(new)
        return len(found) == 8

    eventually(has_all)
    assert found == [*range(8)]
    queue.close()


def test_a_log_without_v1_consumers_is_looked_at_once_a_minute() -> None:
    fixture = Fixture()
    queue = fixture.queue()
    fixture.store.reads.clear()
    for number in range(5):
        queue.append([NewEntry(f"ingest/{number}.batch")])
    eventually(lambda: "ingest/_log.json" in fixture.store.reads)
    queue.close()
    assert fixture.store.reads.count("ingest/_log.json") == 1


def test_a_queue_that_is_not_a_log_is_not_looked_at() -> None:
    store, runtime = Watched(), SystemRuntime()
    claim = claim_for_writing(store, CONFIG, runtime=runtime)
    queue = Queue(store, CONFIG, runtime=runtime, role="test", claim=claim, feeds=True)
    before = threading.active_count()
    queue.append([NewEntry("ingest/0.batch")])
    assert threading.active_count() == before
    queue.close()
    assert "ingest/_log.json" not in store.reads
