"""What both of Spark's writers share: a write planned on the driver, run in tasks, appended.

Spark makes a writer on the driver, pickles it to the tasks, and commits with another copy of
it, so a plan holds values only. What lives longer, stores and queue positions, is kept per
process: Spark reuses its Python workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import TaskContext

from buffer_sink.blocks import Columns, check_one_queue, check_schema
from buffer_sink.fields import Fields
from buffer_sink.gather import store_small
from buffer_sink.messages import SmallBatch, TaskUploads, UploadedBatch, WriteTask, collect
from buffer_sink.objects import BatchObjects
from buffer_sink.options import SinkOptions
from buffer_sink.partition import PartitionWriter
from buffer_sink.routing import check_topic
from buffer_sink.topic_write import TopicWrite, find_topic
from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import TopicDescription

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from buffer_sink.committer import WriteCommitter
    from buffer_sink.topic_committer import TopicCommitter

__all__ = ["Plan", "batch_id", "query_id", "task_property"]

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
            from buffer_sink.topic_committer import TopicCommitter

            found = TopicCommitter(store, options, _RUNTIME)
        else:
            from buffer_sink.committer import WriteCommitter

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
