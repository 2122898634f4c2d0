"""A queue that drivers write to and consumers drain."""

from __future__ import annotations

from typing import Any

from buffer_sink.committer import Group, QueueCommitter, UploadedBatch
from buffer_sink.options import SinkOptions
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.formats.batch import (
    Transaction,
    batch_key,
    decode_batch,
    encode_batch,
    later_ulid,
)
from opendata_buffer.formats.manifest import Manifest, Metadata
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.transactions import record_key

PREFIX = "p"
CONFIG = QueueConfig(store="memory://x", data_path_prefix=PREFIX)
RECORD = record_key(PREFIX, "q")


class TargetQueue:
    """One store and any number of drivers and consumers on it."""

    def __init__(
        self, store: Any = None, runtime: ManualRuntime | None = None, *, claimed: bool = True
    ) -> None:
        self.runtime = runtime or ManualRuntime()
        self.store = store or MemoryStore(now_ms=self.runtime.now_ms)
        self.passes = TransactionFilter(PREFIX)
        self.taken: list[bytes] = []
        self.read: list[bytes] = []
        if claimed:  # written now, so that the script of a test applies only to the manifest
            claim_queue(self.store, CONFIG)

    def driver(self, **options: Any) -> QueueCommitter:
        return QueueCommitter(self.store, SinkOptions(queue=CONFIG, **options), self.runtime)

    def queue(self) -> Queue:
        return Queue(self.store, CONFIG, runtime=self.runtime, role="test")

    @property
    def manifest(self) -> Manifest:
        return self.queue().read() or Manifest.empty()

    def group(
        self,
        batch: int | None,
        *values: bytes,
        app: str = "q",
        query: str | None = None,
        ahead_s: int = 0,
    ) -> Group:
        """Upload one batch per value, like the first or a repeated attempt of the tasks."""
        txn = None if batch is None else Transaction(app, batch)
        uploads = []
        for value in values:
            key = batch_key(PREFIX, later_ulid(self.runtime.ulid(), ahead_s * 1000), txn)
            data = encode_batch([value])
            self.store.put(key, data)
            uploads.append(UploadedBatch(key, 1, (Metadata(0, 7, b""),)))
        return Group(Moment.now(self.runtime), tuple(uploads), txn, query)

    def drain(self, most: int = 1_000) -> None:
        """Read and acknowledge all batches, with and without the transaction filter."""
        queue = self.queue()
        entries = self.manifest.entries(limit=most)
        epoch = queue.claim_epoch(None).epoch if entries else 0
        for entry in entries:
            blob: Any = self.store.get(entry.location)
            records = decode_batch(blob.data)
            self.taken += records
            if self.passes.offer(entry.sequence, entry.location):
                self.read += records
            queue.dequeue(entry.sequence, epoch)
