"""One task's part of a write: divide, encode and upload its rows, and report the uploads.

A task stores its own batches. One with few rows (``gather_bytes``) stores nothing: its rows travel
to the driver in the task's answer, and :func:`store_small` joins those of many tasks into few
batches. Otherwise many tasks with few rows each would make an object and a queue entry each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from buffer_sink.messages import Batch, SmallBatch, TaskUploads, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Block, BlockBuilder, Columns, PartitionRouter, coalesced
from opendata_buffer import metrics
from opendata_buffer.formats.batch import seal_block
from opendata_buffer.formats.keys import batch_key, later_ulid
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime, Task
from opendata_buffer.stores.base import Put

OPEN_BLOCKS = 4
"""Bytes of rows in blocks that are not full, at most, as a number of full blocks."""


class TaskWriter:
    """Uploads the rows of one task as batches.

    Batches are in the queue only when the driver appends them. The uploads of a failed or a
    repeated task are orphans, and the collector deletes them by their age.

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
        self._uploads = BatchUploads(options, task, store=store, runtime=runtime)
        self._runtime = runtime
        self._router: PartitionRouter | None = None
        if task.topic is not None:
            self._router = PartitionRouter(
                columns, options.partitioner, task.topic, task=task.number, runtime=runtime
            )
        self._builders: dict[str | None, BlockBuilder] = {}
        self._counts: Counter[str] = Counter()

    def write(self, rows: Iterable[pa.RecordBatch]) -> TaskUploads:
        """Upload all rows of the task, unless they are few and the driver is to store them.

        Raises:
            InvalidInput: A row that cannot be written.
            StorageError: An upload failed for good, or for ``cas_deadline_ms``.
        """
        with self._uploads as uploads:
            for batch in rows if self._router is None else coalesced(rows):
                for name, part in self._by_partition(batch):
                    for block in self._builder(name).add(part, self._runtime.now_ms()):
                        uploads.submit(name, self._clock(name), block)
                        del block  # it would stay in memory until the next one is full
                self._flush_largest()
            if not uploads.count and self._open_bytes() <= self._options.gather_bytes:
                return TaskUploads(self._task, tuple(self._small_batches()))
            for name in self._builders:
                self._flush(name)
        return TaskUploads(self._task, uploads.uploaded)

    def _by_partition(self, rows: pa.RecordBatch) -> Iterable[tuple[str | None, pa.RecordBatch]]:
        return [(None, rows)] if self._router is None else self._router.split(rows).items()

    def _builder(self, name: str | None) -> BlockBuilder:
        if name not in self._builders:
            where = f"task {self._task.number}"
            if name is not None:
                where = f"the rows of task {self._task.number} for partition {name}"
            self._builders[name] = BlockBuilder(self._columns, self._options, where)
        return self._builders[name]

    def _open_bytes(self) -> int:
        return sum(builder.size for builder in self._builders.values())

    def _flush_largest(self) -> None:
        """Bound the memory of blocks that are not full, over all partitions."""
        most = OPEN_BLOCKS * self._options.target_batch_bytes
        while self._open_bytes() > most:
            self._flush(max(self._builders, key=lambda name: self._builders[name].size))

    def _flush(self, name: str | None) -> None:
        block = self._builders[name].finish()
        if block is not None:
            self._uploads.submit(name, self._clock(name), block)

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


class BatchUploads:
    """Names, seals and stores batches of one write, on ``upload_concurrency`` threads at most.

    A context manager: leaving it waits for all uploads; leaving it by an error waits for those
    that run, and drops the one that waits.

    Args:
        options: The sink's options.
        task: A task of the write: it has the write's identity and topic.
        store: Where batches go.
        runtime: Clocks, names and threads.

    Attributes:
        count: How many batches were submitted or added.
    """

    def __init__(
        self, options: SinkOptions, task: WriteTask, *, store: Put, runtime: Runtime
    ) -> None:
        self.count = 0
        self._options = options
        self._task = task
        self._store = store
        self._runtime = runtime
        # Spark repeats a failed task, too, but not in local mode, and with all its uploads.
        self._retrying = queue_retry(runtime, options.queue)
        self._changed = runtime.condition()
        self._waiting: list[Callable[[], None]] = []
        self._threads: list[Task] = []
        self._closed = False
        self._failure: BaseException | None = None
        self._uploaded: dict[int, UploadedBatch] = {}

    def __enter__(self) -> BatchUploads:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._changed:
            if error is not None:
                self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if error is None:
            self._check()

    @property
    def uploaded(self) -> tuple[UploadedBatch, ...]:
        """The batches in the order of their calls, in which the queue gets them."""
        return tuple(batch for _, batch in sorted(self._uploaded.items()))

    def add(self, batch: UploadedBatch) -> None:
        """Take over a batch that is stored already, as the next one."""
        self._uploaded[self.count] = batch
        self.count += 1

    def submit(self, partition: str | None, clock: int, block: Block) -> None:
        """Upload a block soon; returns once that runs, or is the only one that waits.

        ``partition`` and ``clock`` are those of the :class:`.UploadedBatch` that it becomes.

        Raises:
            BaseException: The error of the first upload that failed.
        """
        key = self._name(partition, clock)
        job = partial(self._upload, self.count, key, partition, clock, block)
        self.count += 1
        with self._changed:
            while self._waiting and self._failure is None:
                self._changed.wait()
            self._check()
            self._waiting.append(job)
            if len(self._threads) < self._options.upload_concurrency:
                self._threads.append(self._runtime.spawn(self._work, "buffer-sink-upload"))
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting or self._failure is not None:
                return None
            self._changed.notify_all()
            return self._waiting.pop()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
                    self._changed.notify_all()
            finally:
                # A job holds a batch's bytes. Kept until the next job comes, it would hold one
                # batch more in memory than TaskWriter allows.
                del job

    def _name(self, partition: str | None, clock: int) -> str:
        # By the time in the name collectors know how long to wait for the driver's append.
        ulid = later_ulid(self._runtime.ulid(), self._options.max_write_duration_ms)
        topic, transaction = self._task.topic, self._task.transaction
        if partition is None or topic is None:
            return batch_key(self._options.queue.data_path_prefix, ulid, transaction)
        return topic.location(partition, ulid, topic.transaction(transaction), clock)

    def _upload(
        self, position: int, key: str, partition: str | None, clock: int, block: Block
    ) -> None:
        # Compression releases the interpreter lock, so on an upload thread it overlaps with the
        # next block's encoding and with the JVM.
        began = self._runtime.monotonic()
        options = self._options
        data = seal_block(block.pieces, block.records, options.compression)
        self._retrying(self._store.put, key, data)
        metrics.batches_flushed.add(1)
        metrics.entries_flushed.add(block.records)
        metrics.bytes_flushed.add(block.size)
        metrics.bytes_written.add(len(data))
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - began)
        self._uploaded[position] = UploadedBatch(
            key, block.records, len(data), block.metadata, partition, clock
        )


def store_small(
    batches: Sequence[Batch], uploads: BatchUploads, target: int
) -> tuple[UploadedBatch, ...]:
    """On the driver: store what tasks did not, in batches of at most ``target`` bytes.

    Args:
        batches: All batches of a write, in the order of tasks and rows.
        uploads: Stores the small ones.
        target: Largest record block that small batches are joined to.

    Returns:
        Uploaded batches only, those of each of a topic's partitions in their order.
    """
    with uploads:
        for part in _grouped(batches, target):
            if isinstance(part, UploadedBatch):
                uploads.add(part)
            else:
                first = part[0]  # all other clocks of the group are later, so the first one serves
                uploads.submit(first.partition, first.clock, join_blocks(part))
    return uploads.uploaded


def _grouped(batches: Sequence[Batch], target: int) -> list[UploadedBatch | list[SmallBatch]]:
    """Uploaded batches as they are, and small ones in groups, in order within each partition."""
    grouped: list[UploadedBatch | list[SmallBatch]] = []
    last: dict[str | None, list[SmallBatch]] = {}
    for each in batches:
        if isinstance(each, UploadedBatch):
            last.pop(each.partition, None)  # small batches behind it must not come before it
            grouped.append(each)
            continue
        group = last.get(each.partition)
        if group is None or sum(len(small.data) for small in group) + len(each.data) > target:
            group = last[each.partition] = []
            grouped.append(group)
        group.append(each)
    return grouped


def join_blocks(smalls: Sequence[SmallBatch]) -> Block:
    """The records of several batches as one block."""
    records = 0
    metadata: list[Metadata] = []
    for small in smalls:
        for each in small.metadata:
            # Clocks of executors differ, and within a batch times never fall.
            time_ms = max([each.ingestion_time_ms, *(m.ingestion_time_ms for m in metadata[-1:])])
            if not metadata or metadata[-1].payload != each.payload:
                metadata.append(Metadata(records + each.start_index, time_ms, each.payload))
        records += small.records
    return Block(tuple(small.data for small in smalls), records, tuple(metadata))
