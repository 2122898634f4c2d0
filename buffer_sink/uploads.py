"""Batch objects of a write: named, sealed and stored, several at once in bounded memory.

A task stores its own batches. Where the option ``gatherBytes`` allows it, a task with few rows
stores nothing: its rows travel to the driver in the task's answer, and :func:`store_small` joins
those of many tasks into few batches. Otherwise a micro-batch of many tasks with few rows each
would make an object and a queue entry for each task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from buffer_sink.messages import SmallBatch, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Block
from opendata_buffer import metrics
from opendata_buffer.formats.batch import seal_block
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import batch_key, later_ulid
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime, Task
from opendata_buffer.stores.base import Put


class UploadWindow:
    """Runs jobs on at most ``concurrency`` threads; ``submit`` blocks while all are busy.

    A context manager: leaving it by an error waits for the running jobs and drops the others.

    Args:
        concurrency: Jobs at once. One more may wait, so that a thread never idles.
        runtime: Where threads come from.
    """

    def __init__(self, concurrency: int, runtime: Runtime) -> None:
        self._concurrency = concurrency
        self._runtime = runtime
        self._changed = runtime.condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0
        self._threads: list[Task] = []
        self._closed = False
        self._failure: BaseException | None = None

    def __enter__(self) -> UploadWindow:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            if exc is not None:
                self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if exc is None:
            self._check()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job soon; returns once it runs or is the only one that waits.

        Raises:
            BaseException: The error of the first job that failed.
        """
        with self._changed:
            while self._waiting and self._failure is None:
                self._changed.wait()
            self._check()
            self._waiting.append(job)
            if self._running == len(self._threads) < self._concurrency:
                self._threads.append(self._runtime.spawn(self._work, "buffer-sink-upload"))
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting or self._failure is not None:
                    return
                job = self._waiting.popleft()
                self._running += 1
                self._changed.notify_all()
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
            finally:
                # A job holds a batch's bytes. Kept until the next job comes, it would hold one
                # batch more in memory than the window allows.
                del job
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()


class BatchObjects:
    """Names and stores the batches of one write. Several threads may call it at once.

    Args:
        options: The sink's options.
        task: A task of the write: it has the write's identity and topic.
        store: Where batches go.
        runtime: Clocks and names.
    """

    def __init__(
        self, options: SinkOptions, task: WriteTask, *, store: Put, runtime: Runtime
    ) -> None:
        self._options = options
        self._task = task
        self._store = store
        self._runtime = runtime
        # Spark repeats a failed task, too, but not in local mode, and with all its uploads.
        self._retrying = queue_retry(runtime, options.queue)

    def name(self, partition: str | None, clock: int) -> str:
        """A new key.

        Args:
            partition: Name of the topic's partition; None for a single queue.
            clock: Clock of the batch's message in that partition.
        """
        # The time in the name tells collectors how long to wait for the driver's append.
        ulid = later_ulid(self._runtime.ulid(), self._options.max_write_duration_ms)
        topic, transaction = self._task.topic, self._task.transaction
        if partition is None or topic is None:
            return batch_key(self._options.queue.data_path_prefix, ulid, transaction)
        return topic.location(partition, ulid, topic.transaction(transaction), clock)

    def put(self, key: str, partition: str | None, clock: int, block: Block) -> UploadedBatch:
        """Seal a block and store it.

        Raises:
            StorageError: It failed for good, or for ``cas_deadline_ms``.
        """
        # Compression releases the interpreter lock, so on an upload thread it overlaps with the
        # next block's encoding and with the JVM.
        began = self._runtime.monotonic()
        options = self._options
        data = seal_block(block.pieces, block.records, options.compression, options.zstd_level)
        self._retrying(self._store.put, key, data)
        metrics.batches_flushed.add(1)
        metrics.entries_flushed.add(block.records)
        metrics.bytes_flushed.add(block.size)
        metrics.bytes_written.add(len(data))
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - began)
        return UploadedBatch(key, block.records, len(data), block.metadata, partition, clock)


def store_small(
    batches: Sequence[UploadedBatch | SmallBatch],
    objects: BatchObjects,
    options: SinkOptions,
    runtime: Runtime,
) -> tuple[UploadedBatch, ...]:
    """On the driver: store what tasks did not, in batches of ``target_batch_bytes`` at most.

    Args:
        batches: All batches of a write, in the order of tasks and rows.
        objects: Stores them.
        options: The sink's options.
        runtime: Threads.

    Returns:
        Uploaded batches only, those of each of a topic's partitions in their order.

    Raises:
        StorageError: An upload failed for good, or for ``cas_deadline_ms``. Nothing is visible.
    """
    uploaded: dict[int, UploadedBatch] = {}

    def upload(position: int, key: str, first: SmallBatch, block: Block) -> None:
        uploaded[position] = objects.put(key, first.partition, first.clock, block)

    with UploadWindow(options.upload_concurrency, runtime) as window:
        for position, part in enumerate(_grouped(batches, options.target_batch_bytes)):
            if isinstance(part, UploadedBatch):
                uploaded[position] = part
                continue
            first = part[0]  # all other clocks of the group are later, so the first one serves
            key = objects.name(first.partition, first.clock)
            window.submit(partial(upload, position, key, first, join_blocks(part)))
    return tuple(batch for _, batch in sorted(uploaded.items()))


def _grouped(
    batches: Sequence[UploadedBatch | SmallBatch], target: int
) -> list[UploadedBatch | list[SmallBatch]]:
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
