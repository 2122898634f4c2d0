"""A queue with a minimal producer, for tests of consumers."""

from __future__ import annotations

from typing import Any

from opendata_buffer import Consumer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.position import Position
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.stores.base import Blob, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime


class CountingStore(MemoryStore):
    """Counts manifest writes, and fails the reads that a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.fail_next: list[Exception] = []

    def get(self, key: str, **options: Any) -> Any:
        if self.fail_next:
            raise self.fail_next.pop(0)
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self.writes += key == "ingest/manifest"
        return super().put_if(key, data, condition)


class LocalQueue:
    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.store = CountingStore()
        self._open: list[Consumer] = []

    def consumer(self, last_acked: Position | int | str | None = None, **settings: Any) -> Consumer:
        names = ("allow_data_loss", "start", "after")
        arguments = {name: settings.pop(name) for name in names if name in settings}
        settings.setdefault("gc", GarbageCollectorConfig(enabled=False))
        settings.setdefault("create_if_missing", True)
        config = ConsumerConfig(store="memory://consumer", **settings).with_timeout(1)
        made = Consumer(config, last_acked, store=self.store, runtime=self.runtime, **arguments)
        self._open.append(made)
        return made

    def produce(self, *records: bytes) -> list[str]:
        """Queue one batch per record."""
        locations = [batch_key("ingest", self.runtime.ulid()) for _ in records]
        for location, record in zip(locations, records, strict=True):
            self.store.put(location, encode_batch([record]))
        self.enqueue(*locations)
        return locations

    def enqueue(self, *locations: str) -> None:
        meta = (Metadata(0, self.runtime.now_ms(), b"m"),)
        self.write(self.manifest().append([NewEntry(each, meta) for each in locations]))

    def manifest(self) -> Manifest:
        if not any(info.key == "ingest/manifest" for info in self.store.list("").objects):
            return Manifest.empty()
        got = MemoryStore.get(self.store, "ingest/manifest")
        assert isinstance(got, Blob)
        return Manifest.parse(got.data)

    def write(self, manifest: Manifest) -> None:
        self.store.put("ingest/manifest", manifest.raw)

    def queued(self) -> list[int]:
        return [entry.sequence for entry in self.manifest().entries()]

    def close(self) -> None:
        for consumer in self._open:
            if consumer._entries._gc is not None:
                consumer._entries._gc.stop()
