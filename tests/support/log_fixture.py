"""A log in memory with small segments, and a clock that the test moves.

Import :func:`small` where segments have to be short: the import makes it a fixture of the module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer import Consumer, ConsumerConfig
from opendata_buffer.config import GarbageCollectorConfig, QueueConfig
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue import log_index
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.logs import open_view

URL = "memory://log"
KEY = "ingest/manifest"
DAY_S = 86_400
WEEK_MS = 7 * DAY_S * 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "most_entries", 16)
    monkeypatch.setattr(Log, "left_entries", 4)
    monkeypatch.setattr(log_index, "FAN", 3)


class Counting(MemoryStore):
    """Counts requests by kind and key."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        super().__init__("log", now_ms=now_ms)
        self.requests: Counter[tuple[str, str]] = Counter()

    def get(self, key: str, **options: Any) -> Any:
        self.requests["get", key] += 1
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: Any) -> Any:
        self.requests["put_if", key] += 1
        return super().put_if(key, data, condition)


class LogFixture:
    """A log in memory, with a clock that the test moves."""

    def __init__(
        self, *, retention_ms: int | None = None, retention_bytes: int | None = None
    ) -> None:
        self.runtime = ManualRuntime()
        self.store = Counting(self.runtime.now_ms)
        self.config = QueueConfig(store=URL)
        self.claim = claim_for_writing(self.store, self.config, runtime=self.runtime)
        kept = {"retention_ms": retention_ms, "retention_bytes": retention_bytes}
        enable_readers(self.store, self.config, self.claim, self.runtime, **kept)
        self.queue = self.writer()
        self.locations: list[str] = []

    def kept_bytes(self) -> int:
        """Return the total size of the batches from the floor on."""
        kept = {*self.locations[self.index().floor :]}
        return sum(each.size for each in self.store.list("ingest/").objects if each.key in kept)

    def writer(self) -> Queue:
        claim = claim_for_writing(self.store, self.config, runtime=self.runtime)
        return Queue(self.store, self.config, runtime=self.runtime, role="test", claim=claim)

    def entry(self) -> NewEntry:
        location = f"ingest/{self.runtime.ulid()}.batch"
        self.store.put(location, encode_batch([b"%d" % len(self.locations)]))
        self.locations.append(location)
        return NewEntry(location)

    def append(self, count: int) -> None:
        for _ in range(count):
            self.runtime.advance(0.01)
            self.queue.append([self.entry()])

    def reader(self, name: str, position: int | None = None, **settings: Any) -> Consumer:
        gc = GarbageCollectorConfig(enabled=False)
        config = ConsumerConfig(store=URL, reader=name, gc=gc)
        parts: dict[str, Any] = {"store": self.store, "runtime": self.runtime}
        return Consumer(config, position, **parts, **settings)

    def collector(self) -> GarbageCollector:
        return GarbageCollector(self.store, ConsumerConfig(store=URL), runtime=self.runtime)

    def collect(self) -> int:
        self.runtime.advance(3_600)  # longer than the grace period
        report = self.collector().run_once()
        assert report.plan.held is None
        return report.deleted

    def view(self) -> LogView:
        return open_view(self.store, self.config, self.runtime, self.manifest())

    def index(self) -> LogIndex:
        return Log(self.store, self.config, self.runtime).need()

    def manifest(self) -> Manifest:
        found = self.writer().read()
        assert found is not None
        return found


def read(consumer: Consumer, most: int = 10_000) -> list[int]:
    """Read and acknowledge, and return the sequences."""
    found: list[int] = []
    while len(found) < most and (batch := consumer.next_batch()) is not None:
        found.append(batch.sequence)
        batch.ack()
    consumer.flush()
    return found
