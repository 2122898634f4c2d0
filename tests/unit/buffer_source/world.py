"""A queue in memory that runs of one query read: what the tests of the driver's side share."""

from __future__ import annotations

from collections.abc import Sequence

from buffer_source.options import SourceOptions
from buffer_source.stream import StreamDriver
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

__all__ = ["World"]


class World:
    """A queue, and as many runs of one query as a test wants."""

    def __init__(self, runtime: ManualRuntime) -> None:
        self.runtime = runtime
        self.store = MemoryStore(now_ms=runtime.now_ms)
        self._queue = self._new_queue()

    def _new_queue(self) -> Queue:
        config = QueueConfig(store="/world")
        return Queue(self.store, config, runtime=self.runtime, role="producer")

    def produce(
        self, count: int = 1, *, records: Sequence[bytes] = (b"x",), txn: Transaction | None = None
    ) -> None:
        """Append ``count`` batches, each a group of its own, or one transaction."""
        entries = []
        for _ in range(count):
            location = batch_key("ingest", self.runtime.ulid(), txn)
            self.store.put(location, encode_batch(list(records)))
            entries.append(NewEntry(location, (Metadata(0, self.runtime.now_ms(), b"m"),)))
        self._queue.append(entries)

    def replace_queue(self) -> None:
        """Somebody deletes the manifest and the queue starts again at sequence 0."""
        self.store.delete_many(["ingest/manifest"])
        self._queue = self._new_queue()

    def delete_everything(self) -> None:
        """As :meth:`replace_queue`, with all that was in the directory."""
        self.store.delete_many([each.key for each in self.store.list("").objects])
        self._queue = self._new_queue()

    def manifest(self) -> Manifest:
        got = self.store.get("ingest/manifest")
        assert isinstance(got, Blob)
        return Manifest.parse(got.data)

    @property
    def queued(self) -> list[int]:
        return [entry.sequence for entry in self.manifest().entries()]

    def run(self, **options: str) -> StreamDriver:
        """A new run of the query, as after a restart."""
        given = {"path": "/world", "gcEnabled": "false", **options}
        return StreamDriver(SourceOptions.from_spark(given), self.store, self.runtime)
