"""Spark's writers, ``df.write`` and ``df.writeStream``: planned on the driver, run in tasks.

Spark pickles a writer and sends it to the tasks, but commits with another copy of it. So a plan
holds only values. Stores and queue positions are kept per process, because Spark reuses its Python
workers.

A task divides, encodes and stores its rows (:class:`TaskWriter`). If each small task stored an
object of its own, each would also need a queue entry. So a task with few rows sends them to the
driver in its answer (:class:`TaskUploads`), and :func:`store_small` joins the rows of many tasks.
:func:`collect` joins the answers.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import WriterCommitMessage

from buffer_sink.committer import (
    Group,
    QueueCommitter,
    TopicCommitter,
    TopicWrite,
    UploadedBatch,
    claim,
)
from buffer_sink.options import SinkOptions
from buffer_sink.rows import (
    Block,
    BlockBuilder,
    Columns,
    Fields,
    PartitionRouter,
    check_one_queue,
    check_schema,
    check_topic,
    coalesced,
)
from opendata_buffer import metrics
from opendata_buffer.assembly import open_pause
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.formats.batch import Transaction, batch_key, later_ulid, seal_pieces
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.hints import Action, Hint
from opendata_buffer.option_reader import briefly, in_options
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.runtime import Moment, Runtime, SystemRuntime, Task
from opendata_buffer.stores.base import Put, Store, ZeroCopy
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


SMALL_UPLOADS = 16
"""Most uploads of the driver at the same time. A micro-batch for a topic waits for the small
batches of all partitions. Their rows are in memory anyway, in the answers of the tasks."""

OPEN_BLOCKS = 8  # Bounds the bytes of all blocks that are not full, in units of full blocks.


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """Rows of a task that stored nothing, for the driver to store.

    Attributes:
        data: A record block.
        records: Records in the block.
        metadata: The metadata ranges of the block.
        partition: The name of their partition; None for a single queue.
        clock: The clock of the batch in that partition; 0 for a single queue.
    """

    data: bytes
    records: int
    metadata: tuple[Metadata, ...]
    partition: str | None = None
    clock: int = 0


Batch = UploadedBatch | SmallBatch


@dataclass(frozen=True, slots=True)
class WriteTask:
    """One task of a write, with the values that all tasks of that write have in common.

    Attributes:
        number: Spark's number of the task.
        planned: When the driver planned the write, by its clocks. No upload of it is older.
        transaction: The identity of the write, if it has one.
        query: The id of the streaming query that writes, if there is one.
        topic: The topic to write to; None for a single queue.
    """

    number: int
    planned: Moment
    transaction: Transaction | None = None
    query: str | None = None
    topic: TopicWrite | None = None


@dataclass(frozen=True)
class TaskUploads(WriterCommitMessage):
    """The answer of one task: its batches in the order of its rows, either all small or none."""

    task: WriteTask
    uploads: tuple[Batch, ...]


class TaskWriter:
    """Uploads one task's rows as batches, which are invisible until the driver appends them.

    Memory: the block that is being filled, one block that waits, and ``upload_concurrency`` blocks
    that are being uploaded, each of up to ``target_batch_bytes``. Uploads to a cloud also hold a
    sealed copy of each. One of Spark's Arrow batches comes on top.

    For a topic, each partition has a block that is being filled; all of them together have at most
    :data:`OPEN_BLOCKS` times ``target_batch_bytes``. Arrow batches are also joined by copying them,
    which takes twice :data:`~buffer_sink.rows.COALESCED_BYTES`.
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
        """Upload all rows of the task, unless they are so few that the driver stores them.

        Args:
            rows: The rows of the task.

        Returns:
            The uploaded batches, or the rows themselves if they have at most ``gather_bytes``.

        Raises:
            InvalidInput: A row cannot be written.
            StorageError: An upload failed permanently, or kept failing for ``timeout_ms``.
        """
        with self._uploads as uploads:
            for batch in rows if self._router is None else coalesced(rows):
                parts = {None: batch} if self._router is None else self._router.split(batch)
                for name, part in parts.items():
                    for block in self._builder(name).add(part, self._runtime.now_ms()):
                        uploads.submit(name, self._clock(name), block)
                        del block  # Otherwise it stays in memory until the next one is full.
                self._flush_largest()
            if not uploads.count and self._open_bytes() <= self._options.gather_bytes:
                return TaskUploads(self._task, tuple(self._small_batches()))
            for name in self._builders:
                self._flush(name)
        return TaskUploads(self._task, uploads.uploaded)

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
        for name, builder in self._builders.items():
            block = builder.finish()
            if block is not None:
                data = b"".join(block.pieces)
                yield SmallBatch(data, block.records, block.metadata, name, self._clock(name))

    def _clock(self, partition: str | None) -> int:
        """Return the clock of the next batch for a partition of the topic; 0 for a single queue."""
        if partition is None or self._task.topic is None:
            return 0
        clock = self._task.topic.clock(self._task.number, self._counts[partition])
        self._counts[partition] += 1
        return clock


class BatchUploads:
    """Names, seals and stores batches of one write, on a bounded number of threads.

    Use it as a context manager. Leaving it waits for all uploads. Leaving it with an error waits
    for the uploads that are running, and drops the one that waits.

    Args:
        options: The options of the sink.
        task: Any task of the write.
        store: The store to upload to.
        runtime: Clock, threads and random numbers.
        threads: Most uploads at the same time. Default: ``upload_concurrency`` of the options.

    Attributes:
        count: Batches that were submitted or added.
    """

    def __init__(
        self,
        options: SinkOptions,
        task: WriteTask,
        *,
        store: Put,
        runtime: Runtime,
        threads: int | None = None,
    ) -> None:
        self.count = 0
        self._options = options
        self._most_threads = options.upload_concurrency if threads is None else threads
        self._task = task
        self._store = store
        self._runtime = runtime
        # Spark also repeats a failed task, but not in local mode, and it repeats all its uploads.
        self._retrying = options.queue.retries(runtime)
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
        """The batches, in the order of the calls that submitted or added them.

        The queue gets them in this order.
        """
        return tuple(batch for _, batch in sorted(self._uploaded.items()))

    def add(self, batch: UploadedBatch) -> None:
        """Add a batch that is already stored, as the next one."""
        self._uploaded[self.count] = batch
        self.count += 1

    def submit(self, partition: str | None, clock: int, block: Block) -> None:
        """Submit a block for upload.

        Returns as soon as the upload runs, or is the only one that waits.

        Args:
            partition: The name of its partition; None for a single queue.
            clock: The clock of the batch in that partition; 0 for a single queue.
            block: The block.

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
            if len(self._threads) < self._most_threads:
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
                # A job holds the bytes of a batch. If it were kept until the next job comes, one
                # more batch would be in memory than TaskWriter allows.
                del job

    def _name(self, partition: str | None, clock: int) -> str:
        # The time in the name tells collectors how long to wait for the driver's append.
        ulid = later_ulid(self._runtime.ulid(), self._options.max_write_duration_ms)
        topic, transaction = self._task.topic, self._task.transaction
        if partition is None or topic is None:
            return batch_key(self._options.queue.data_path_prefix, ulid, transaction)
        return topic.location(partition, ulid, topic.transaction(transaction), clock)

    def _upload(
        self, position: int, key: str, partition: str | None, clock: int, block: Block
    ) -> None:
        # Compression releases the interpreter lock. On an upload thread it therefore overlaps with
        # the encoding of the next block and with the JVM.
        began = self._runtime.monotonic()
        options = self._options
        pieces = seal_pieces(block.pieces, block.records, options.compression)
        if isinstance(self._store, ZeroCopy):  # Joining the pieces would copy them.
            self._retrying(self._store.put_pieces, key, pieces)
        else:
            self._retrying(self._store.put, key, b"".join(pieces))
        metrics.batches_flushed.add(1)
        metrics.entries_flushed.add(block.records)
        metrics.bytes_flushed.add(block.size)
        metrics.bytes_written.add(sum(map(len, pieces)))
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - began)
        self._uploaded[position] = UploadedBatch(
            key, block.records, block.metadata, partition, clock
        )


def collect(
    messages: Iterable[WriterCommitMessage | None],
    store_small: Callable[[Sequence[Batch], WriteTask], tuple[UploadedBatch, ...]],
) -> Group | None:
    """Join the tasks' answers, in the order of the tasks.

    A write without rows to a topic is a group without uploads. It may be the first write after a
    restart, and then has to complete or roll back whatever the previous run left undecided.

    Args:
        messages: The answers; None for a task without one.
        store_small: Gets all batches of the write, and any of its tasks. Stores the small batches
            among them, and returns uploaded batches only.

    Returns:
        The uploads of the write; None if it has no rows and goes to a single queue.

    Raises:
        InvalidInput: The messages belong to different writes, or tasks of a write to a topic have
            the same number.
        StorageError: Small batches could not be stored.
    """
    # Spark calls commit only after every task has succeeded. But its interface allows None for a
    # task without an answer.
    answers = [each for each in messages if isinstance(each, TaskUploads)]
    results = [each for each in answers if each.uploads or each.task.topic is not None]
    results.sort(key=lambda each: each.task.number)
    if not results:
        return None
    writes = {(each.task.transaction, each.task.query, each.task.topic) for each in results}
    if len(writes) > 1:
        names = sorted(f"{transaction} of query {query}" for transaction, query, _ in writes)
        raise InvalidInput(f"tasks of one write carry different identities: {', '.join(names)}")
    task = results[0].task
    if task.topic is not None and len({each.task.number for each in results}) < len(results):
        # Their batches have the same clocks: consumers would take the second one for a repeat.
        raise InvalidInput(
            f"several tasks of one write carry the number {task.number}: this Spark does not give "
            "tasks their TaskContext. Write to the topic with opendata_buffer.TopicProducer"
        )
    batches = [batch for each in results for batch in each.uploads]
    uploads = tuple(batch for batch in batches if isinstance(batch, UploadedBatch))
    if len(uploads) < len(batches):
        uploads = store_small(batches, task)
    return Group(
        planned=min((each.task.planned for each in results), key=lambda each: each.monotonic),
        uploads=uploads,
        transaction=task.transaction,
        query=task.query,
        topic=task.topic,
    )


def store_small(
    batches: Sequence[Batch], uploads: BatchUploads, target: int
) -> tuple[UploadedBatch, ...]:
    """Store the small batches of a write, on the driver.

    Args:
        batches: All batches of the write, in the order of tasks and rows.
        uploads: Stores the joined batches.
        target: Bytes of the largest record block that small batches are joined to.

    Returns:
        Only uploaded batches. The batches of each partition are in the given order.
    """
    with uploads:
        for part in _grouped(batches, target):
            if isinstance(part, UploadedBatch):
                uploads.add(part)
            else:
                first = part[0]  # The clocks of the others are later.
                uploads.submit(first.partition, first.clock, join_blocks(part))
    return uploads.uploaded


def _grouped(batches: Sequence[Batch], target: int) -> list[UploadedBatch | list[SmallBatch]]:
    """Return uploaded batches as they are, and small ones in groups of at most ``target`` bytes.

    Within each partition, batches keep their order.
    """
    grouped: list[UploadedBatch | list[SmallBatch]] = []
    last: dict[str | None, list[SmallBatch]] = {}
    for each in batches:
        if isinstance(each, UploadedBatch):
            last.pop(each.partition, None)  # Later small batches must come after this one.
            grouped.append(each)
            continue
        group = last.get(each.partition)
        if group is None or sum(len(small.data) for small in group) + len(each.data) > target:
            group = last[each.partition] = []
            grouped.append(group)
        group.append(each)
    return grouped


def join_blocks(smalls: Sequence[SmallBatch]) -> Block:
    """Return the records of several batches as one block."""
    records = 0
    metadata: list[Metadata] = []
    for small in smalls:
        for each in small.metadata:
            # The clocks of executors differ, but times must not decrease within a batch.
            time_ms = max([each.ingestion_time_ms, *(m.ingestion_time_ms for m in metadata[-1:])])
            if not metadata or metadata[-1].payload != each.payload:
                metadata.append(Metadata(records + each.start_index, time_ms, each.payload))
        records += small.records
    return Block(tuple(small.data for small in smalls), records, tuple(metadata))


_RUNTIME = SystemRuntime()

QUEUE_KNOWN_S = 60.0  # A queue that was claimed is not claimed or looked up again for this long.


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One write, as the driver planned it. Immutable, and pickled to the tasks.

    Attributes:
        options: The options of the sink.
        columns: The positions of the input columns.
        made: When it was planned; no upload of the write is older.
        transaction: The identity of a batch write, if it has one.
        fields: The columns that are encoded into one value; None if one column is the value.
        located: Whether the plan knows if the store holds a ``topic`` or a single queue.
        topic: The attempt to write to a topic; None for a single queue.
    """

    options: SinkOptions
    columns: Columns
    made: Moment
    transaction: Transaction | None = None
    fields: Fields | None = None
    located: bool = False
    topic: TopicWrite | None = None

    @classmethod
    def make(cls, options: SinkOptions, schema: StructType) -> WritePlan:
        """Plan a write now, without a request to the store.

        Args:
            options: The options of the write.
            schema: The schema of the rows.

        Returns:
            The plan, which does not know yet whether the store holds a topic.

        Raises:
            InvalidInput: A column is missing, or cannot be written.
        """
        fields = None
        if options.value_format == "json":
            fields, schema = Fields.of(schema)
        now = Moment.now(_RUNTIME)
        return cls(options, check_schema(schema), now, options.transaction, fields)

    def locate(self) -> WritePlan:
        """Find out whether the store holds a topic or a queue, for one attempt of the write.

        Claims the queue before a task uploads anything: without a claim, the batches would be taken
        for another queue's (failure F51). Makes two small reads, or one if the options name one
        queue. Makes none if this process did the same within the last minute.

        Returns:
            The plan of the attempt.

        Raises:
            InvalidInput: A column or the partitioner is missing, or cannot be used here. Or the
                queue must not be created, as in :func:`.claim_for_writing`.
            CorruptData: The topic's description cannot be decoded.
            StorageError: The topic's description cannot be read.
        """
        if self.located:
            return self
        options = self.options
        queue, now = options.queue, _RUNTIME.monotonic()
        is_known = now < _queues_until.get(queue, now)
        found = None
        if not (options.one_queue or is_known):
            found = Topic.find(queue, store=_store_of(options), runtime=_RUNTIME)
        if found is not None:
            check_topic(self.columns, options.partitioner)
            topic = TopicWrite.planned(found.description, _RUNTIME)
            return replace(self, located=True, topic=topic)
        check_one_queue(self.columns)
        if options.partitioner is not None:
            raise InvalidInput(
                f"option partitioner is {options.partitioner!r}, but there is no topic at "
                f"{options.queue.store}, and a single queue has nothing to choose from. Leave out "
                "the option, or make a topic",
                Hint(Action.CREATE_TOPIC, queue_name(options.queue.store, options.queue)),
            )
        if not is_known:
            claim(options, _store_of(options), _RUNTIME)
            _queues_until[queue] = now + QUEUE_KNOWN_S
        return replace(self, located=True)

    def upload(
        self, rows: Iterator[pa.RecordBatch], transaction: Transaction | None
    ) -> TaskUploads:
        """Upload the rows of a task, on an executor; nothing becomes visible.

        Args:
            rows: The rows of the task.
            transaction: The identity of the write, if it has one.

        Returns:
            The answer of the task.

        Raises:
            InvalidInput: A row cannot be written.
            StorageError: An upload failed permanently, or kept failing for ``timeout_ms``.
        """
        context = TaskContext.get()
        task = WriteTask(
            number=context.partitionId() if context is not None else 0,
            planned=self.made,
            transaction=transaction,
            query=query_id(),
            topic=self.topic,
        )
        store = _store_of(self.options)
        writer = TaskWriter(self.options, self.columns, task, store=store, runtime=_RUNTIME)
        return writer.write(rows if self.fields is None else map(self.fields.encode, rows))

    def append(self, messages: Iterable[WriterCommitMessage | None]) -> None:
        """Make the uploads of all tasks visible, on the driver: all of them or none.

        Args:
            messages: The answers of the tasks; None for a task that failed.

        Raises:
            OpenDataBufferError: As :func:`collect`, and as ``append()`` of :class:`.QueueCommitter`
                or :class:`.TopicCommitter`.
        """
        group = collect(messages, self._store_small)
        is_of_topic = group is not None and group.topic is not None
        try:
            _committer(self.options, is_of_topic).append(group)
        except BaseException:
            # The state that this process remembers of the queue may be the cause, for example
            # because the queue was deleted on purpose. The error has reported that; the next write
            # reads the queue again.
            _forget_committers()
            raise

    def _store_small(self, batches: Sequence[Batch], task: WriteTask) -> tuple[UploadedBatch, ...]:
        uploads = BatchUploads(
            self.options,
            task,
            store=_store_of(self.options),
            runtime=_RUNTIME,
            threads=SMALL_UPLOADS,
        )
        return store_small(batches, uploads, self.options.target_batch_bytes)


class WriteRefused(pickle.PicklingError):
    """A write that cannot be planned, for Spark, which pickles the plan. Its cause says why."""


class _PlannedWriter:
    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles the writer that plans a write, but not the one that commits a micro-batch.
        # Locating the topic or queue here therefore happens once for each write.
        try:
            with in_options():
                self._plan = self._plan.locate()
        except OpenDataBufferError as error:
            # PySpark prints a traceback of its pickler on the driver for every other error.
            raise WriteRefused(f"{type(error).__name__}: {error}") from error
        return type(self), (self._plan,)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        """Do nothing: the garbage collector deletes the uploads of a write that failed.

        Spark also calls this after ``commit`` raised an error, when the uploads may be queued.
        """


def _arrow_writer(name: str) -> Any:
    """Return a base class of Spark, or ``object`` if this Spark does not have it."""
    return getattr(datasource, name, object)


class BufferBatchWriter(_PlannedWriter, _arrow_writer("DataSourceArrowWriter")):  # type: ignore[misc]
    """Writes one DataFrame into a buffer: all of it becomes visible at once."""

    @briefly
    @in_options()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet."""
        return self._plan.upload(iterator, self._plan.transaction)

    @briefly
    @in_options()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the uploads of all tasks visible, all of them or none."""
        self._plan.append(messages)


class BufferStreamWriter(_PlannedWriter, _arrow_writer("DataSourceStreamArrowWriter")):  # type: ignore[misc]
    """Writes micro-batches into a buffer, each exactly once."""

    @briefly
    @in_options()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet.

        Args:
            iterator: The rows of the task.

        Returns:
            The uploaded batches.

        Raises:
            InvalidInput: A row cannot be written, or the task does not belong to a streaming query.
            StorageError: As :meth:`TaskWriter.write`.
        """
        app, batch = self._plan.options.app or query_id(), task_property("streaming.sql.batchId")
        if app is None or batch is None:
            missing = "streaming.sql.batchId" if batch is None else "sql.streaming.queryId"
            raise InvalidInput(
                f"the task has no local property {missing}, so the sink does not know its query "
                "and batch, as outside of a streaming query. In one, use "
                "df.writeStream.foreachBatch(buffer_sink.foreach_batch_writer(path, "
                "txn_app_id=...)), which needs none"
            )
        return self._plan.upload(iterator, Transaction(app, int(batch)))

    @briefly
    @in_options()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Make the uploads of all tasks visible, all of them or none, exactly once.

        Args:
            messages: The answers of the tasks.
            batchId: Spark's number of the micro-batch.

        Raises:
            InvalidInput: The tasks wrote another micro-batch.
            OpenDataBufferError: As :meth:`WritePlan.append`.
        """
        for message in messages:
            if isinstance(message, TaskUploads) and message.task.transaction is not None:
                found = message.task.transaction.batch
                if found != batchId:
                    raise InvalidInput(
                        f"tasks wrote batch {found} and Spark commits batch {batchId}: this "
                        "version of Spark is not supported by the sink"
                    )
        self._plan.append(messages)


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> BufferBatchWriter:
    """Make the writer of one DataFrame.

    Args:
        options: The options of ``df.write``.
        schema: The schema of the rows.
        overwrite: Whether the save mode is ``overwrite``.

    Returns:
        The writer.

    Raises:
        InvalidInput: An option, a column or the save mode cannot be used, or this Spark has no
            Arrow writers.
    """
    if overwrite:
        raise InvalidInput(
            "mode overwrite cannot be written to a buffer: a queue only grows. Use "
            "mode('append'); for an empty queue use another dataPathPrefix."
        )
    _check_arrow_writer()
    return BufferBatchWriter(WritePlan.make(SinkOptions.for_batch(options), schema))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> BufferStreamWriter:
    """Make the writer of micro-batches.

    Args:
        options: The options of ``writeStream``.
        schema: The schema of the rows.
        overwrite: Whether the output mode is ``complete``.

    Returns:
        The writer.

    Raises:
        InvalidInput: An option, a column or the output mode cannot be used, or this Spark has no
            Arrow writers of streams.
    """
    if overwrite:
        raise InvalidInput(
            "output mode complete cannot be written to a buffer: a queue only grows. Use "
            "outputMode('append'), with a watermark if the query aggregates."
        )
    _check_arrow_writer()
    if not hasattr(datasource, "DataSourceStreamArrowWriter"):
        raise InvalidInput(
            "this Spark has no Arrow writer of streams (DataSourceStreamArrowWriter), which Spark "
            "4.1 and Databricks 17.3 have. Here use "
            "df.writeStream.foreachBatch(buffer_sink.foreach_batch_writer(path, txn_app_id=...)), "
            "which writes each micro-batch once, too"
        )
    return BufferStreamWriter(WritePlan.make(SinkOptions.for_stream(options), schema))


def _check_arrow_writer() -> None:
    if not hasattr(datasource, "DataSourceArrowWriter"):
        raise InvalidInput(
            "this Spark has no Arrow writer of Python data sources (DataSourceArrowWriter), which "
            "Spark 4.0 and Databricks 16.4 have. Here use opendata_buffer.Producer, for example in "
            "the function of foreachPartition or foreachBatch"
        )


def task_property(name: str) -> str | None:
    """Return a local property of the running Spark job; None outside a task."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def query_id() -> str | None:
    """Return the id of the task's streaming query, from its checkpoint; None if Spark sets none."""
    return task_property("sql.streaming.queryId")


def _store_of(options: SinkOptions) -> Store:
    return open_store(options.queue.store, options.queue.store_options)


_queues_until: dict[QueueConfig, float] = {}
_committers: dict[tuple[SinkOptions, bool], QueueCommitter | TopicCommitter] = {}
_MOST_COMMITTERS = 8


def _committer(options: SinkOptions, is_of_topic: bool) -> QueueCommitter | TopicCommitter:
    """Return the process's committer for these options; keep the most recently used ones."""
    committer = _committers.pop((options, is_of_topic), None)
    if committer is None:
        kind = TopicCommitter if is_of_topic else QueueCommitter
        committer = kind(_store_of(options), options, _RUNTIME, open_pause)
    _committers[options, is_of_topic] = committer
    while len(_committers) > _MOST_COMMITTERS:
        _committers.pop(next(iter(_committers))).disconnect()
    return committer


def _forget_committers() -> None:
    _queues_until.clear()  # The next write claims its queue again, before it uploads.
    while _committers:
        _committers.popitem()[1].disconnect()
