"""One task's part of a write: divide, encode and upload its rows, and say where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import pyarrow as pa

from buffer_sink.messages import SmallBatch, TaskUploads, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Block, BlockBuilder, Columns, Router, gathered
from buffer_sink.uploads import BatchObjects, UploadWindow
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Put

__all__ = ["OPEN_BLOCKS", "PartitionWriter"]


OPEN_BLOCKS = 4
"""Blocks' worth of rows that wait in blocks which are not full; the largest goes first."""


class PartitionWriter:
    """Uploads the rows of one partition as batches.

    Nothing becomes visible: batches are in the queue only when the driver appends them. What a
    failed or a repeated task uploaded is an orphan, and the collector deletes it by its age.

    Memory: the block being filled, one waiting and ``upload_concurrency`` in upload, these with
    their sealed copy, each of ``target_batch_bytes``; and one of Spark's Arrow batches. Of a
    topic there is a block being filled per partition, and all of them together have
    :data:`OPEN_BLOCKS` times the size of one at most; and some Arrow batches are gathered and
    then copied, :data:`~buffer_sink.rows.GATHERED_BYTES` twice.

    Args:
        options: The sink's options.
        columns: Where value and metadata are in the rows.
        task: Which task this is.
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
        self._task = task
        self._objects = BatchObjects(
            options, task.transaction, task.topic, store=store, runtime=runtime
        )
        self._runtime = runtime
        self._columns = columns
        self._router: Router | None = None
        if task.topic is not None:
            self._router = Router(
                columns, options.partitioner, task.topic, task=task.partition, runtime=runtime
            )
        self._builders: dict[str | None, BlockBuilder] = {}
        self._counts: Counter[str] = Counter()
        self._started = 0
        self._uploaded: dict[int, UploadedBatch] = {}

    def write(self, rows: Iterable[pa.RecordBatch]) -> TaskUploads:
        """Upload all rows of the partition, unless they are few and shall be gathered.

        Call it once.

        Raises:
            InvalidInput: A row that cannot be written.
            StorageError: An upload failed for good, or for ``cas_deadline_ms``.
        """
        with UploadWindow(self._options.upload_concurrency, self._runtime) as window:
            for batch in rows if self._router is None else gathered(rows):
                for name, part in self._parts(batch):
                    for block in self._builder(name).add(part, self._runtime.now_ms()):
                        self._start(window, name, block)
                        del block  # it would stay in memory until the next one is full
                self._shed(window)
            if not self._started and self._is_small():
                return TaskUploads(self._task, tuple(self._small()))
            for name in list(self._builders):
                self._close(window, name)
        # Uploads end in any order; the queue gets them in the order of the rows.
        return TaskUploads(
            self._task, tuple(upload for _, upload in sorted(self._uploaded.items()))
        )

    def _parts(self, rows: pa.RecordBatch) -> Iterable[tuple[str | None, pa.RecordBatch]]:
        return [(None, rows)] if self._router is None else self._router.split(rows).items()

    def _builder(self, name: str | None) -> BlockBuilder:
        if name not in self._builders:
            where = f"partition {self._task.partition}"
            if name is not None:
                where = f"what partition {self._task.partition} of the DataFrame has for {name}"
            self._builders[name] = BlockBuilder(
                self._columns,
                where=where,
                target=self._options.target_batch_bytes,
                limit=self._options.max_batch_bytes,
                max_ranges=self._options.max_metadata_ranges,
            )
        return self._builders[name]

    def _shed(self, window: UploadWindow) -> None:
        """Keep blocks that are not full yet from adding up over many partitions."""
        most = OPEN_BLOCKS * self._options.target_batch_bytes
        while sum(builder.size for builder in self._builders.values()) > most:
            self._close(window, max(self._builders, key=lambda name: self._builders[name].size))

    def _close(self, window: UploadWindow, name: str | None) -> None:
        block = self._builders[name].finish()
        if block is not None:
            self._start(window, name, block)

    def _is_small(self) -> bool:
        size = sum(builder.size for builder in self._builders.values())
        return size <= self._options.gather_bytes

    def _small(self) -> Iterator[SmallBatch]:
        """Everything, for the driver to store."""
        for name, builder in self._builders.items():
            block = builder.finish()
            if block is not None:
                data = b"".join(block.pieces)
                yield SmallBatch(data, block.records, block.metadata, name, self._clock(name))

    def _clock(self, partition: str | None) -> int:
        """Of the next batch for a partition of the topic; 0 for a single queue."""
        if partition is None or self._task.topic is None:
            return 0
        clock = self._task.topic.clock(self._task.partition, self._counts[partition])
        self._counts[partition] += 1
        return clock

    def _start(self, window: UploadWindow, partition: str | None, block: Block) -> None:
        clock = self._clock(partition)
        key = self._objects.name(partition, clock)
        position, self._started = self._started, self._started + 1
        window.submit(partial(self._upload, position, key, partition, clock, block))

    def _upload(
        self, position: int, key: str, partition: str | None, clock: int, block: Block
    ) -> None:
        self._uploaded[position] = self._objects.put(key, partition, clock, block)
