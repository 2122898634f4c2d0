"""What both of Spark's writers share: a write planned on the driver, run in tasks, appended.

Spark makes a writer on the driver, pickles it to the tasks, and commits with another copy of
it, so a plan holds values only. What lives longer, stores and queue positions, is kept per
process: Spark reuses its Python workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from buffer_sink.fields import Fields
from buffer_sink.messages import (
    SmallBatch,
    TaskUploads,
    TopicWrite,
    UploadedBatch,
    WriteTask,
    collect,
    find_topic,
)
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Columns, check_one_queue, check_schema, check_topic
from buffer_sink.task_writer import PartitionWriter
from buffer_sink.uploads import BatchObjects, store_small
from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import TopicDescription

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from buffer_sink.commit import WriteCommitter
    from buffer_sink.topic_commit import TopicCommitter

__all__ = [
    "BufferBatchWriter",
    "BufferStreamWriter",
    "Plan",
    "batch_id",
    "batch_writer",
    "query_id",
    "stream_writer",
    "task_property",
]


_RUNTIME = SystemRuntime()

QUEUE_S = 60.0
"""How long a store that a write took for a queue's is not looked at again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One write, as the driver planned it.

    Attributes:
        options: The sink's options.
        columns: Where the input columns are.
        made: When; no upload of the write is older.
        fields: The columns that are encoded into one value; None where there is such a column.
        located: Whether somebody looked what the store holds.
        topic: The topic it goes to; None for a single queue, and as long as nobody looked.
    """

    options: SinkOptions
    columns: Columns
    made: Moment
    fields: Fields | None = None
    located: bool = False
    topic: TopicWrite | None = None

    @classmethod
    def make(cls, options: SinkOptions, schema: StructType) -> Plan:
        """Plan a write now. Asks no store.

        Raises:
            InvalidInput: A column cannot be written.
        """
        fields = None
        if options.value_format == "json":
            fields, schema = Fields.of(schema)
        return cls(options, check_schema(schema), Moment.now(_RUNTIME), fields)

    def locate(self) -> Plan:
        """The plan of one attempt, once it is known what the store holds: a topic or a queue.

        Costs one small read, unless the options name one queue, or it is known already: in a
        process that wrote to the queue within a minute.

        Raises:
            InvalidInput: A column or the partitioner has no use here, or is missing.
            CorruptData, StorageError: The topic's description cannot be read.
        """
        if self.located:
            return self
        options, topic = self.options, None
        if not options.one_queue:
            description = _topic_of(options.queue)
            if description is not None:
                topic = TopicWrite.planned(description, _RUNTIME)
        if topic is not None:
            check_topic(self.columns, options.partitioner)
        else:
            check_one_queue(self.columns)
            if options.partitioner is not None:
                raise InvalidInput(
                    f"option partitioner is {options.partitioner!r}, but there is no topic at "
                    f"{options.queue.store}, and a single queue has nothing to choose from: make "
                    f"one with 'opendata-buffer topic create {options.queue.store} --partitions "
                    "N', or leave out the option"
                )
            if not options.one_queue:
                _remember_queue(options.queue)
        return replace(self, located=True, topic=topic)

    def upload(
        self, rows: Iterator[pa.RecordBatch], transaction: Transaction | None
    ) -> TaskUploads:
        """In a task: upload its rows; nothing becomes visible."""
        context = TaskContext.get()
        task = WriteTask(
            partition=context.partitionId() if context is not None else 0,
            planned=self.made,
            transaction=transaction,
            query=query_id(),
            topic=self.topic,
        )
        queue = self.options.queue
        store = open_store(queue.store, queue.store_options)
        writer = PartitionWriter(self.options, self.columns, task, store=store, runtime=_RUNTIME)
        return writer.write(rows if self.fields is None else map(self.fields.encode, rows))

    def append(self, messages: Iterable[WriterCommitMessage | None]) -> None:
        """On the driver: make the uploads of all tasks visible, all of them or none."""
        # Without the identity: it differs for each micro-batch of foreachBatch, and each
        # committer remembers a whole manifest.
        options = replace(self.options, app=None, version=None)
        group = collect(messages, self._store_small)
        try:
            _committer(options, group is not None and group.topic is not None).append(group)
        except BaseException:
            # What this process remembers of the queue may be the reason, for example when the
            # queue was deleted on purpose. The error told it; a new start looks afresh.
            _forget_committers()
            raise

    def _store_small(
        self,
        batches: Sequence[UploadedBatch | SmallBatch],
        transaction: Transaction | None,
        topic: TopicWrite | None,
    ) -> tuple[UploadedBatch, ...]:
        store = open_store(self.options.queue.store, self.options.queue.store_options)
        objects = BatchObjects(self.options, transaction, topic, store=store, runtime=_RUNTIME)
        return store_small(batches, objects, self.options, _RUNTIME)


def _topic_of(queue: QueueConfig) -> TopicDescription | None:
    place, now = (queue.store, queue.store_options), _RUNTIME.monotonic()
    if now < _queues_until.get(place, now):
        return None
    return find_topic(open_store(*place))


def _remember_queue(queue: QueueConfig) -> None:
    """No need to look for a topic there again at once.

    None can be made beside a queue; and where there is no queue yet, none is made in a topic.
    """
    if len(_queues_until) >= _MOST_PLACES:
        _queues_until.clear()
    place, now = (queue.store, queue.store_options), _RUNTIME.monotonic()
    if now >= _queues_until.get(place, now):
        _queues_until[place] = now + QUEUE_S


_queues_until: dict[tuple[str, StoreOptions], float] = {}
_MOST_PLACES = 64


_committers: dict[tuple[SinkOptions, bool], WriteCommitter | TopicCommitter] = {}
_MOST_COMMITTERS = 8


def _committer(options: SinkOptions, is_of_topic: bool) -> WriteCommitter | TopicCommitter:
    """The process's committer for these options; those that were used last are kept."""
    found = _committers.pop((options, is_of_topic), None)
    if found is None:
        store = open_store(options.queue.store, options.queue.store_options)
        # Late: what commits is nearly a third of what a write loads, and no task commits.
        if is_of_topic:
            from buffer_sink.topic_commit import TopicCommitter

            found = TopicCommitter(store, options, _RUNTIME)
        else:
            from buffer_sink.commit import WriteCommitter

            found = WriteCommitter(store, options, _RUNTIME)
    _committers[options, is_of_topic] = found
    while len(_committers) > _MOST_COMMITTERS:
        _committers.pop(next(iter(_committers))).disconnect()
    return found


def _forget_committers() -> None:
    while _committers:
        _committers.popitem()[1].disconnect()


def task_property(name: str) -> str | None:
    """A local property of the running Spark job; None outside of a task."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def query_id() -> str | None:
    """Id of the streaming query that the task belongs to; None where Spark does not tell it.

    It is that of the checkpoint and survives restarts; the run id would not.
    """
    return task_property("sql.streaming.queryId")


def batch_id() -> int | None:
    """Spark's number of the micro-batch that the task belongs to; None where it has none."""
    found = task_property("streaming.sql.batchId")
    return None if found is None else int(found)


# ---- ``df.writeStream.format("opendata-buffer")``: where Spark calls in. ----


class BufferStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches into a buffer, each exactly once.

    Args:
        plan: The micro-batch.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __reduce__(self) -> tuple[type[BufferStreamWriter], tuple[Plan]]:
        # Spark pickles the writer that it plans a write with, once for the tasks and once more,
        # and not the one that it commits a micro-batch with. So this is where a write learns
        # what it goes to, by one read.
        self._plan = self._plan.locate()
        return BufferStreamWriter, (self._plan,)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet."""
        return self._plan.upload(iterator, _transaction(self._plan.options.app))

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
        """Does nothing.

        Spark also calls this when ``commit`` raised, and then the uploads may be in the queue:
        deleting them would lose records. Orphans are the garbage collector's.
        """


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> BufferStreamWriter:
    """The writer of one micro-batch.

    Args:
        options: Options of ``writeStream``.
        schema: Columns of the stream.
        overwrite: Whether each batch is to replace what is there (output mode complete).

    Raises:
        InvalidInput: An option, a column or the output mode cannot be used.
    """
    if overwrite:
        raise InvalidInput(
            "output mode complete cannot be written to a buffer: a queue only grows. Use "
            "outputMode('append'), with a watermark if the query aggregates."
        )
    return BufferStreamWriter(Plan.make(SinkOptions.for_stream(options), schema))


def _transaction(app: str | None) -> Transaction:
    app = app or query_id()
    batch = batch_id()
    if app is None or batch is None:
        raise InvalidInput(
            "the task does not know its query and batch: the streaming sink runs only in the "
            "tasks of a streaming query"
        )
    return Transaction(app, batch)


# ---- ``df.write.format("opendata-buffer")``: where Spark calls in. ----


class BufferBatchWriter(DataSourceArrowWriter):
    """Writes one DataFrame into a buffer: all of it becomes visible at once.

    Args:
        plan: The write.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __reduce__(self) -> tuple[type[BufferBatchWriter], tuple[Plan]]:
        # Spark pickles the writer that it plans a write with, once for the tasks and once more,
        # and not the one that it commits a micro-batch with. So this is where a write learns
        # what it goes to, by one read.
        self._plan = self._plan.locate()
        return BufferBatchWriter, (self._plan,)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet."""
        return self._plan.upload(iterator, self._plan.options.transaction)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the uploads of all tasks visible, all or none of them."""
        self._plan.append(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: uploads of a write that failed are the garbage collector's.

        Spark also calls this when ``commit`` raised, and then they may be in the queue.
        """


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> BufferBatchWriter:
    """The writer of one DataFrame.

    Args:
        options: Options of ``df.write``.
        schema: Columns of the DataFrame.
        overwrite: Whether to replace what is there (save mode overwrite).

    Raises:
        InvalidInput: An option, a column or the save mode cannot be used.
    """
    if overwrite:
        raise InvalidInput(
            "mode overwrite cannot be written to a buffer: a queue only grows. Use "
            "mode('append'); for an empty queue use another dataPathPrefix."
        )
    return BufferBatchWriter(Plan.make(SinkOptions.for_batch(options), schema))
