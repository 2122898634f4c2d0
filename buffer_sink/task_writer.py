"""One task's part of a write: divide, encode and upload its rows, and report the uploads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import pyarrow as pa

from buffer_sink.messages import SmallBatch, TaskUploads, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Block, BlockBuilder, Columns, PartitionRouter, coalesced
from buffer_sink.uploads import BatchObjects, UploadWindow
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Put

OPEN_BLOCKS = 4
"""Most bytes of rows in blocks that are not full, as a number of full blocks."""


class TaskWriter:
    """Uploads the rows of one task as batches.

    Nothing becomes visible: batches are in the queue only when the driver appends them. The
    uploads of a failed or a repeated task are orphans, and the collector deletes them by their
    age.

    Memory: the block being filled, one waiting and ``upload_concurrency`` in upload, these with
    their sealed copy, each of ``target_batch_bytes``; and one of Spark's Arrow batches. For a
    topic there is a block being filled for each partition, of all together
    :data:`OPEN_BLOCKS` times ``target_batch_bytes``; and Arrow batches are joined by copying
    them, twice :data:`~buffer_sink.rows.COALESCED_BYTES`.

    Args:
        options: The sink's options.
        columns: Where value and metadata are in the rows.
        task: The task.
        store: Where batches go.
        runtime: Clocks, names and threads.
    """

    def __init__(
        self,
        options: SinkOptions,
        columns: Columns,
        task: WriteTask,
        *,
        store: Put,
        runtime: Runtime,
    ) -> None:
        self._options = options
        self._columns = columns
        self._task = task
        self._objects = BatchObjects(options, task, store=store, runtime=runtime)
        self._runtime = runtime
        self._router: PartitionRouter | None = None
        if task.topic is not None:
            self._router = PartitionRouter(
                columns, options.partitioner, task.topic, task=task.number, runtime=runtime
            )
        self._builders: dict[str | None, BlockBuilder] = {}
        self._counts: Counter[str] = Counter()
        self._started = 0
        self._uploaded: dict[int, UploadedBatch] = {}

    def write(self, rows: Iterable[pa.RecordBatch]) -> TaskUploads:
        """Upload all rows of the task, unless they are few and the driver is to store them.

        Call it once.

        Raises:
            InvalidInput: A row that cannot be written.
            StorageError: An upload failed for good, or for ``cas_deadline_ms``.
        """
        with UploadWindow(self._options.upload_concurrency, self._runtime) as window:
            for batch in rows if self._router is None else coalesced(rows):
                for name, part in self._by_partition(batch):
                    for block in self._builder(name).add(part, self._runtime.now_ms()):
                        self._upload(window, name, block)
                        del block  # it would stay in memory until the next one is full
                self._flush_largest(window)
            if not self._started and self._open_bytes() <= self._options.gather_bytes:
                return TaskUploads(self._task, tuple(self._small_batches()))
            for name in list(self._builders):
                self._flush(window, name)
        # Uploads end in any order; the queue gets them in the order of the rows.
        return TaskUploads(
            self._task, tuple(upload for _, upload in sorted(self._uploaded.items()))
        )

    def _by_partition(self, rows: pa.RecordBatch) -> Iterable[tuple[str | None, pa.RecordBatch]]:
        return [(None, rows)] if self._router is None else self._router.split(rows).items()

    def _builder(self, name: str | None) -> BlockBuilder:
        if name not in self._builders:
            where = f"task {self._task.number}"
            if name is not None:
                where = f"the rows of task {self._task.number} for partition {name}"
            self._builders[name] = BlockBuilder(
                self._columns,
                where=where,
                target=self._options.target_batch_bytes,
                limit=self._options.max_batch_bytes,
                max_ranges=self._options.max_metadata_ranges,
            )
        return self._builders[name]

    def _open_bytes(self) -> int:
        return sum(builder.size for builder in self._builders.values())

    def _flush_largest(self, window: UploadWindow) -> None:
        """Bound the memory of blocks that are not full, over all partitions."""
        most = OPEN_BLOCKS * self._options.target_batch_bytes
        while self._open_bytes() > most:
            self._flush(window, max(self._builders, key=lambda name: self._builders[name].size))

    def _flush(self, window: UploadWindow, name: str | None) -> None:
        block = self._builders[name].finish()
        if block is not None:
            self._upload(window, name, block)

    def _small_batches(self) -> Iterator[SmallBatch]:
        """All rows, for the driver to store."""
        for name, builder in self._builders.items():
            block = builder.finish()
            if block is not None:
                data = b"".join(block.pieces)
                yield SmallBatch(data, block.records, block.metadata, name, self._clock(name))

    def _clock(self, partition: str | None) -> int:
        """Clock of the next batch for a partition of the topic; 0 for a single queue."""
        if partition is None or self._task.topic is None:
            return 0
        clock = self._task.topic.clock(self._task.number, self._counts[partition])
        self._counts[partition] += 1
        return clock

    def _upload(self, window: UploadWindow, partition: str | None, block: Block) -> None:
        clock = self._clock(partition)
        key = self._objects.name(partition, clock)
        position, self._started = self._started, self._started + 1
        window.submit(partial(self._put, position, key, partition, clock, block))

    def _put(
        self, position: int, key: str, partition: str | None, clock: int, block: Block
    ) -> None:
        self._uploaded[position] = self._objects.put(key, partition, clock, block)
