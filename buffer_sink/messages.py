"""What a task tells the driver: which objects it uploaded, for which write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pyspark.sql.datasource import WriterCommitMessage

from buffer_sink.topic_write import TopicWrite
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.runtime import Moment

__all__ = ["Group", "SmallBatch", "TaskUploads", "UploadedBatch", "WriteTask", "collect"]


@dataclass(frozen=True, slots=True)
class UploadedBatch:
    """One batch object, stored and not yet queued.

    Attributes:
        location: Its key.
        records: How many records it holds.
        bytes: Size of the object.
        metadata: Its ranges, as the queue entry will carry them.
        partition: Name of the topic's partition it is for; None for a single queue.
        clock: Of its message in that partition; 0 for a single queue.
    """

    location: str
    records: int
    bytes: int
    metadata: tuple[Metadata, ...]
    partition: str | None = None
    clock: int = 0


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """Rows of a task that stored nothing, for the driver to store.

    Attributes:
        data: The record block, not compressed.
        records: How many records it holds.
        metadata: Its ranges.
        partition: Name of the topic's partition it is for; None for a single queue.
        clock: Of its message in that partition; 0 for a single queue.
    """

    data: bytes
    records: int
    metadata: tuple[Metadata, ...]
    partition: str | None = None
    clock: int = 0


@dataclass(frozen=True, slots=True)
class WriteTask:
    """One task of a write, and what all tasks of that write have in common.

    Attributes:
        partition: The task's partition.
        planned: When the driver planned the write, by its clocks: no upload of it is older.
        transaction: Identity of the write, if it has one.
        query: Id of the streaming query that writes; None where Spark does not tell it.
        topic: The topic it writes to; None for a single queue.
    """

    partition: int
    planned: Moment
    transaction: Transaction | None = None
    query: str | None = None
    topic: TopicWrite | None = None


@dataclass(frozen=True)
class TaskUploads(WriterCommitMessage):
    """The result of one task.

    Attributes:
        task: Which.
        uploads: Its batches in the order of its rows; empty for no rows. All of them are small, or
            none is.
    """

    task: WriteTask
    uploads: tuple[UploadedBatch | SmallBatch, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """All uploads of one write: they enter the queue together or not at all.

    Attributes:
        planned: When the driver planned the write.
        uploads: In the order of partitions and rows.
        transaction: Identity of the write, if it has one.
        query: Id of the streaming query that writes, if it is known.
        topic: The topic it is for; None for a single queue.
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
    def records(self) -> int:
        """Records in all uploads."""
        return sum(upload.records for upload in self.uploads)

    @property
    def bytes(self) -> int:
        """Size of all objects."""
        return sum(upload.bytes for upload in self.uploads)


StoreSmall: TypeAlias = Callable[
    [Sequence[UploadedBatch | SmallBatch], Transaction | None, TopicWrite | None],
    tuple[UploadedBatch, ...],
]
"""Stores the small ones among batches, of a write with this identity, to this topic."""


def collect(
    messages: Iterable[WriterCommitMessage | None], store_small: StoreSmall
) -> Group | None:
    """Join the tasks' messages, in partition order.

    None when no task wrote a row into a single queue. A write of no rows to a topic is a group
    without uploads: it may be the first one after a restart, and has to end what the last run
    left.

    Args:
        messages: Of the tasks; each has uploaded its batches, or has small ones.
        store_small: Stores these.

    Raises:
        InvalidInput: The messages belong to different writes.
        StorageError: Small batches could not be stored.
    """
    # None stands for a task without an answer. Spark calls commit only when every task has
    # succeeded, but its interface allows for it.
    results = sorted(
        (
            each
            for each in messages
            if isinstance(each, TaskUploads) and (each.uploads or each.task.topic is not None)
        ),
        key=lambda each: each.task.partition,
    )
    if not results:
        return None
    writes = {(each.task.transaction, each.task.query, each.task.topic) for each in results}
    if len(writes) > 1:
        names = ", ".join(
            sorted(f"{transaction} of query {query}" for transaction, query, _ in writes)
        )
        raise InvalidInput(f"tasks of one write carry different identities: {names}")
    ((transaction, query, topic),) = writes
    batches = [batch for each in results for batch in each.uploads]
    uploads = tuple(batch for batch in batches if isinstance(batch, UploadedBatch))
    if len(uploads) < len(batches):
        uploads = store_small(batches, transaction, topic)
    return Group(
        planned=min((each.task.planned for each in results), key=lambda each: each.monotonic),
        uploads=uploads,
        transaction=transaction,
        query=query,
        topic=topic,
    )
