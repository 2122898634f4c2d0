"""Spark's writers, ``df.write`` and ``df.writeStream``: planned on the driver, run in tasks.

Spark makes a writer on the driver, pickles it to the tasks, and commits with another copy of
it, so a plan holds values only. What lives longer, stores and queue positions, is kept per
process: Spark reuses its Python workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import WriterCommitMessage

from buffer_sink.json_rows import Fields
from buffer_sink.messages import Batch, TaskUploads, TopicWrite, UploadedBatch, WriteTask, collect
from buffer_sink.options import SinkOptions
from buffer_sink.queue_commit import QueueCommitter, UploadCommitter
from buffer_sink.rows import Columns, check_one_queue, check_schema, check_topic
from buffer_sink.task_writer import BatchUploads, TaskWriter, store_small
from buffer_sink.topic_commit import TopicCommitter
from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.errors import InvalidInput, ObjectNotFound, PermanentStorageError
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.queue.ownership import TOPIC_KEY, queue_hint
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.base import Get, Store, read_sidecar
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import DESCRIPTION, TopicDescription

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_RUNTIME = SystemRuntime()

QUEUE_KNOWN_S = 60.0
"""How long a store in which no topic was found is not asked for one again."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One write, as the driver planned it.

    Attributes:
        made: When it was planned; no upload of the write is older.
        transaction: Identity of a batch write, if it has one.
        fields: The columns that are encoded into one value; None where a column is the value.
        located: Whether the store was asked what it holds, a topic or a queue.
        topic: The topic it goes to; None for a single queue, and until the store was asked.
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
        """Plan a write now, without a request; raises InvalidInput for a column."""
        fields = None
        if options.value_format == "json":
            fields, schema = Fields.of(schema)
        now = Moment.now(_RUNTIME)
        return cls(options, check_schema(schema), now, options.transaction, fields)

    def locate(self) -> WritePlan:
        """The plan of one attempt, to the topic or the queue that the store holds.

        Costs one small read, unless the options name one queue, or this process has written to
        the queue within a minute.

        Raises:
            InvalidInput: A column or the partitioner is missing, or cannot be used here.
            CorruptData, StorageError: The topic's description cannot be read.
        """
        if self.located:
            return self
        options = self.options
        description = None if options.one_queue else _topic_of(options.queue)
        if description is not None:
            check_topic(self.columns, options.partitioner)
            topic = TopicWrite.planned(description, _RUNTIME)
            return replace(self, located=True, topic=topic)
        check_one_queue(self.columns)
        if options.partitioner is not None:
            words = queue_hint(options.queue.store, options.queue)
            raise InvalidInput(
                f"option partitioner is {options.partitioner!r}, but there is no topic at "
                f"{options.queue.store}, and a single queue has nothing to choose from: make one "
                f"with 'opendata-buffer topic create {words} --partitions 4', or leave out the "
                "option"
            )
        if not options.one_queue:
            _remember_queue(options.queue)
        return replace(self, located=True)

    def upload(
        self, rows: Iterator[pa.RecordBatch], transaction: Transaction | None
    ) -> TaskUploads:
        """In a task: upload its rows; nothing becomes visible."""
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
        """On the driver: make the uploads of all tasks visible, all of them or none."""
        group = collect(messages, self._store_small)
        is_of_topic = group is not None and group.topic is not None
        try:
            _committer(self.options, is_of_topic).append(group)
        except BaseException:
            # What this process remembers of the queue may be the reason, for example when the
            # queue was deleted on purpose. The error reported it; the next write reads it anew.
            _forget_committers()
            raise

    def _store_small(self, batches: Sequence[Batch], task: WriteTask) -> tuple[UploadedBatch, ...]:
        uploads = BatchUploads(self.options, task, store=_store_of(self.options), runtime=_RUNTIME)
        return store_small(batches, uploads, self.options.target_batch_bytes)


class _PlannedWriter:
    """A write's plan, and how Spark's copies of a writer share it."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles the writer that it plans a write with, and not the one that it commits a
        # micro-batch with. So the one read that shows what the store holds is made here.
        self._plan = self._plan.locate()
        return type(self), (self._plan,)


def _arrow_writer(name: str) -> Any:
    """A base class of Spark; its place is empty where this Spark lacks it."""
    return getattr(datasource, name, object)


class BufferBatchWriter(_PlannedWriter, _arrow_writer("DataSourceArrowWriter")):  # type: ignore[misc]
    """Writes one DataFrame into a buffer: all of it becomes visible at once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet."""
        return self._plan.upload(iterator, self._plan.transaction)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the uploads of all tasks visible, all or none of them."""
        self._plan.append(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: the garbage collector deletes the uploads of a write that failed.

        Spark also calls this when ``commit`` raised, and then they may be in the queue.
        """


class BufferStreamWriter(_PlannedWriter, _arrow_writer("DataSourceStreamArrowWriter")):  # type: ignore[misc]
    """Writes micro-batches into a buffer, each exactly once."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet."""
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

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Make the uploads of all tasks visible, all or none of them, and once."""
        for message in messages:
            if isinstance(message, TaskUploads) and message.task.transaction is not None:
                found = message.task.transaction.batch
                if found != batchId:
                    raise InvalidInput(
                        f"tasks wrote batch {found} and Spark commits batch {batchId}: this "
                        "version of Spark is not supported by the sink"
                    )
        self._plan.append(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Does nothing, as :meth:`BufferBatchWriter.abort`."""


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> BufferBatchWriter:
    """The writer of one DataFrame; raises InvalidInput for an option, a column or the save mode."""
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
    """The writer of a micro-batch; raises InvalidInput for an option, column or output mode."""
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
    """A local property of the running Spark job; None outside of a task."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def query_id() -> str | None:
    """Id of the task's streaming query, from its checkpoint; None where Spark sets none."""
    return task_property("sql.streaming.queryId")


def find_topic(store: Get) -> TopicDescription | None:
    """The topic at a store's root, by one read; None when there is none or no right to read it."""
    try:
        return read_sidecar(store, TOPIC_KEY, DESCRIPTION, TopicDescription.from_json)
    except (ObjectNotFound, PermanentStorageError):
        # Without the right to list, S3 refuses where it would answer "not found", for example a
        # writer that may use one prefix of the bucket only.
        return None


def _store_of(options: SinkOptions) -> Store:
    return open_store(options.queue.store, options.queue.store_options)


_queues_until: dict[tuple[str, StoreOptions], float] = {}


def _topic_of(queue: QueueConfig) -> TopicDescription | None:
    store, now = (queue.store, queue.store_options), _RUNTIME.monotonic()
    return None if now < _queues_until.get(store, now) else find_topic(open_store(*store))


def _remember_queue(queue: QueueConfig) -> None:
    """For a time, do not ask this store for a topic: none can be made beside a queue."""
    store, now = (queue.store, queue.store_options), _RUNTIME.monotonic()
    if now >= _queues_until.get(store, now):
        _queues_until[store] = now + QUEUE_KNOWN_S


_committers: dict[tuple[SinkOptions, bool], UploadCommitter] = {}
_MOST_COMMITTERS = 8


def _committer(options: SinkOptions, is_of_topic: bool) -> UploadCommitter:
    """The process's committer for these options; those that were used last are kept."""
    committer = _committers.pop((options, is_of_topic), None)
    if committer is None:
        kind = TopicCommitter if is_of_topic else QueueCommitter
        committer = kind(_store_of(options), options, _RUNTIME)
    _committers[options, is_of_topic] = committer
    while len(_committers) > _MOST_COMMITTERS:
        _committers.pop(next(iter(_committers))).disconnect()
    return committer


def _forget_committers() -> None:
    while _committers:
        _committers.popitem()[1].disconnect()
