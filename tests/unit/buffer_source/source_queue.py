"""A queue in memory, read by several runs of one query, for tests of the driver's side."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from buffer_source.planner import PartitionBatch
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import StorageError, TransientStorageError
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import Blob, Listing, PutOutcome, read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic, partition_config


class WatchedStore(MemoryStore):
    """Records its requests, and fails those that a test chooses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gets: list[tuple[str, Blob | None]] = []
        self.lists: list[str] = []
        self.listed = 0
        self.puts = 0
        self._faults: dict[str, tuple[str, list[StorageError]]] = {}

    def fail(
        self, method: str, count: int, error: StorageError | None = None, prefix: str = ""
    ) -> None:
        """Make the next calls of a method below a prefix fail."""
        self._faults[method] = (prefix, [error or TransientStorageError("503 SlowDown")] * count)

    def _begin(self, method: str, key: str) -> None:
        prefix, errors = self._faults.get(method, ("", []))
        if errors and key.startswith(prefix):
            raise errors.pop()

    def get(self, key: str, **how: Any) -> Blob | None:
        self._begin("get", key)
        self.gets.append((key, super().get(key, **how)))
        return self.gets[-1][1]

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        self.puts += 1
        return super().put_if(key, data, version)

    def list(self, prefix: str, **how: Any) -> Listing:
        self._begin("list", prefix)
        self.lists.append(prefix)
        listing = super().list(prefix, **how)
        self.listed += len(listing.objects)
        return listing


class SourceQueue:
    """A queue, and any number of runs of one query."""

    def __init__(self, runtime: ManualRuntime) -> None:
        self.runtime = runtime
        self.store = WatchedStore(now_ms=runtime.now_ms)
        self._queue = self._new_queue()

    def _new_queue(self) -> Queue:
        config = QueueConfig(store="/queue")
        return Queue(self.store, config, runtime=self.runtime, role="producer")

    def produce(
        self, count: int = 1, *, records: Sequence[bytes] = (b"x",), txn: Transaction | None = None
    ) -> None:
        """Append ``count`` batches in one write, optionally as one transaction."""
        entries = []
        for _ in range(count):
            location = batch_key("ingest", self.runtime.ulid(), txn)
            self.store.put(location, encode_batch(list(records)))
            entries.append(NewEntry(location, (Metadata(0, self.runtime.now_ms(), b"m"),)))
        self._queue.append(entries)

    def replace_queue(self) -> None:
        """Delete the manifest, so that the queue starts again at sequence 0."""
        self.store.delete_many(["ingest/manifest"])
        self._queue = self._new_queue()

    def recreate(self) -> None:
        """Delete the manifest, and recreate the queue as an operator does with a command."""
        self.replace_queue()
        config = QueueConfig(store="/queue")
        claim_for_writing(self.store, config, runtime=self.runtime, recreate=True)

    def restore(self, manifest: bytes) -> None:
        """Put an old copy of the manifest back."""
        self.store.put("ingest/manifest", manifest)
        self._queue = self._new_queue()

    def delete_everything(self) -> None:
        """Delete all objects of the queue, and not only the manifest."""
        self.store.delete_many([each.key for each in self.store.list("").objects])
        self._queue = self._new_queue()

    def manifest(self) -> Manifest:
        return Manifest.parse(read_bytes(self.store, "ingest/manifest"))

    @property
    def queued(self) -> list[int]:
        return [entry.sequence for entry in self.manifest().entries()]

    def run(self, **options: str) -> MicroBatchStream:
        """Start a new run of the query, as after a restart."""
        given = {"path": "/queue", "gcEnabled": "false", **options}
        return MicroBatchStream(SourceOptions.from_spark(given), self.store, self.runtime)


class SourceTopic(SourceQueue):
    """A topic in memory, its producers, and several runs of one query."""

    def __init__(self, runtime: ManualRuntime, partitions: int) -> None:
        super().__init__(runtime)
        config = QueueConfig(store="/queue")
        self.topic = Topic.create(config, partitions, store=self.store, runtime=runtime)

    def queue(self, partition: str) -> Queue:
        config = partition_config(partition, QueueConfig(store="/queue"))
        return Queue(self.store, config, runtime=self.runtime, role="producer")

    def append(
        self,
        partition: str,
        *values: bytes,
        message: uuid.UUID | None = None,
        txn: Transaction | None = None,
    ) -> None:
        """Append one batch per value in one write, with the value as its record and metadata.

        A message without values is an acknowledgement, which is one empty batch.
        """
        entries = []
        for records in [[value] for value in values] or [[]]:
            location = batch_key(partition, self.runtime.ulid(), txn, message)
            self.store.put(location, encode_batch(records))
            payload = records[0] if records else b""
            entries.append(NewEntry(location, (Metadata(0, self.runtime.now_ms(), payload),)))
        self.queue(partition).append(entries)

    def queued_in(self, partition: str) -> list[int]:
        manifest = self.queue(partition).read()
        return [] if manifest is None else [each.sequence for each in manifest.entries()]


def batches_of(
    driver: MicroBatchStream, start: SourceOffset | None, end: SourceOffset
) -> list[PartitionBatch]:
    """Return the batches that the tasks of a micro-batch read."""
    tasks = driver.plan_input_partitions(start, end)
    return [batch for task in tasks for batch in task.batches]


def values_of(
    driver: MicroBatchStream, start: SourceOffset | None, end: SourceOffset
) -> list[bytes]:
    """Return the values of a micro-batch, from the metadata of :meth:`SourceTopic.append`."""
    return [each.metadata[0].payload for each in batches_of(driver, start, end)]


def committed_before(driver: MicroBatchStream, start: SourceOffset | None) -> SourceOffset:
    """Return the end of the next micro-batch, after committing its start as Spark does."""
    end = driver.latest_offset(start)
    if start is not None and end != start:
        driver.commit(start)
    return end


def report_of(driver: MicroBatchStream) -> dict[str, Any]:
    report = driver.report()
    assert report is not None
    return report
