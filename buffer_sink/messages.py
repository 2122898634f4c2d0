"""What a task tells the driver: which objects it uploaded, for which transaction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.runtime import Moment

__all__ = ["Group", "SinkCommit", "Upload", "collect"]


@dataclass(frozen=True, slots=True)
class Upload:
    """One batch object.

    Attributes:
        location: Its key.
        records: How many records it holds.
        bytes: Size of the object.
        metadata: Its ranges, as the queue entry will carry them.
    """

    location: str
    records: int
    bytes: int
    metadata: tuple[Metadata, ...]


@dataclass(frozen=True)
class SinkCommit(WriterCommitMessage):
    """The result of one task.

    Attributes:
        partition: The task's partition.
        transaction: Identity of the write the task belongs to, if it has one.
        planned: When the driver planned the write: no upload of it is older.
        uploads: The task's batches in the order of its rows; empty for no rows.
    """

    partition: int
    transaction: Transaction | None
    planned: Moment
    uploads: tuple[Upload, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """All uploads of one write: they enter the queue together or not at all."""

    transaction: Transaction | None
    planned: Moment
    uploads: tuple[Upload, ...]

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


def collect(messages: Iterable[WriterCommitMessage | None]) -> Group | None:
    """Join the tasks' messages, in partition order. None when no task wrote a row.

    Raises:
        InvalidInput: The messages belong to different writes.
    """
    # None stands for a task without an answer. Spark calls commit only when every task has
    # succeeded, but its interface allows for it.
    commits = sorted(
        (each for each in messages if isinstance(each, SinkCommit) and each.uploads),
        key=lambda each: each.partition,
    )
    if not commits:
        return None
    transactions = {each.transaction for each in commits}
    if len(transactions) > 1:
        names = ", ".join(sorted(str(each) for each in transactions))
        raise InvalidInput(f"tasks of one write carry different identities: {names}")
    return Group(
        transaction=commits[0].transaction,
        planned=min((each.planned for each in commits), key=lambda each: each.monotonic),
        uploads=tuple(upload for each in commits for upload in each.uploads),
    )
