"""The messages between the driver and the tasks of a write. All of them pickle.

A task answers with :class:`TaskUploads`: the batch objects that it stored, or its few rows where
the driver is to store them. :func:`collect` joins the answers of all tasks into one
:class:`Group`, which enters the queue, or the partitions of a topic, together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.messages import CONTINUE_TXN, build_uuid, new_producer_id
from opendata_buffer.runtime import Moment, Runtime

if TYPE_CHECKING:
    from opendata_buffer.topic.description import TopicDescription

FIRST_CLOCK = 2
"""Clock of a write's first message. An acknowledgement with clock 1 rolls the write back."""

_TASK_BITS = 32


@dataclass(frozen=True, slots=True)
class TopicWrite:
    """One attempt at a write to a topic, with a producer id of its own.

    All its tasks divide their rows among the partitions that the driver found; the next write
    uses a partition that is added meanwhile.

    Attributes:
        active: Names of the partitions that are written, in the topic's order.
        draining: Names of those that are written no more.
        producer: The attempt's producer id, 6 bytes.
        app: App id for a write that was given none.
    """

    active: tuple[str, ...]
    draining: tuple[str, ...]
    producer: bytes
    app: str

    @classmethod
    def planned(cls, description: TopicDescription, runtime: Runtime) -> TopicWrite:
        """An attempt that writes to the topic as it is now."""
        chance = sha256(runtime.ulid().encode()).digest()  # 80 bits of a ULID are random
        producer = new_producer_id(lambda count: chance[:count])
        app = f"write-{runtime.ulid()}"
        return cls(tuple(description.active), tuple(description.draining), producer, app)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all partitions of the topic."""
        return (*self.active, *self.draining)

    def transaction(self, given: Transaction | None) -> Transaction:
        """The write's identity: the given one, or one of its own."""
        return given or Transaction(self.app, 0)

    def clock(self, task: int, index: int) -> int:
        """Clock of a batch, rising in the order in which a partition gets them.

        Tasks do not know how many batches the others make, so each has a range of its own.
        ``index`` counts the earlier batches of the task for the same partition; Spark's numbers
        of tasks are below 2^31.
        """
        return FIRST_CLOCK + (task << _TASK_BITS) + index

    def location(self, partition: str, ulid: str, txn: Transaction, clock: int) -> str:
        """Key of a batch of this attempt."""
        return batch_key(partition, ulid, txn, build_uuid(self.producer, clock, CONTINUE_TXN))


@dataclass(frozen=True, slots=True)
class UploadedBatch:
    """One batch object, stored and not yet queued.

    Attributes:
        location: Its key.
        bytes: Size of the object.
        metadata: Its ranges, as the queue entry will have them.
        partition: Name of the partition it is for; None for a single queue.
        clock: Clock of its message in that partition; 0 for a single queue.
    """

    location: str
    records: int
    bytes: int
    metadata: tuple[Metadata, ...]
    partition: str | None = None
    clock: int = 0


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """Rows of a task that stored nothing, for the driver to store; ``data`` is a record block."""

    data: bytes
    records: int
    metadata: tuple[Metadata, ...]
    partition: str | None = None
    clock: int = 0


Batch = UploadedBatch | SmallBatch


@dataclass(frozen=True, slots=True)
class WriteTask:
    """One task of a write, and what all tasks of that write have in common.

    Attributes:
        number: Spark's number of the task.
        planned: When the driver planned the write, by its clocks. No upload of it is older.
        transaction: Identity of the write, if it has one.
        query: Id of the streaming query that writes, if there is one.
        topic: The topic it writes to; None for a single queue.
    """

    number: int
    planned: Moment
    transaction: Transaction | None = None
    query: str | None = None
    topic: TopicWrite | None = None


@dataclass(frozen=True)
class TaskUploads(WriterCommitMessage):
    """The answer of one task: its batches in the order of its rows, all of them small or none."""

    task: WriteTask
    uploads: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """All uploads of one write in the order of tasks and rows: queued together or not at all.

    The other attributes are those of each :class:`WriteTask` of the write.
    """

    planned: Moment
    uploads: tuple[UploadedBatch, ...]
    transaction: Transaction | None = None
    query: str | None = None
    topic: TopicWrite | None = None

    @property
    def entries(self) -> list[NewEntry]:
        """The queue entries to append."""
        return [NewEntry(upload.location, upload.metadata) for upload in self.uploads]

    @property
    def locations(self) -> tuple[str, ...]:
        """Keys of the uploads."""
        return tuple(upload.location for upload in self.uploads)

    @property
    def records(self) -> int:
        """Records in all uploads."""
        return sum(upload.records for upload in self.uploads)


def collect(
    messages: Iterable[WriterCommitMessage | None],
    store_small: Callable[[Sequence[Batch], WriteTask], tuple[UploadedBatch, ...]],
) -> Group | None:
    """Join the tasks' answers, in the order of the tasks; None for no rows to a single queue.

    A write of no rows to a topic is a group without uploads: it may be the first one after a
    restart, and then has to complete or roll back what the run before left undecided.

    Args:
        messages: The tasks' answers.
        store_small: Stores the small batches among others, for any task of the write.

    Raises:
        InvalidInput: The messages belong to different writes, or tasks of a write to a topic have
            the same number.
        StorageError: Small batches could not be stored.
    """
    # Spark calls commit only when every task has succeeded, but its interface allows None for a
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
        # Their batches have the same clocks: consumers would take the second for a repeat.
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
