"""The calls that go into one object: counted as they come, encoded when they are uploaded. Pure.

The thread that brings a call may be interrupted between counting it and putting it in, so the
counts may be too high, never too low: what is uploaded is counted anew. What comes through an open
:class:`~.run.Run` is counted when that is closed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from opendata_buffer.commit.durability import Completion
from opendata_buffer.commit.upload import Upload
from opendata_buffer.formats.batch import Compression, seal_pieces
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.producer.block import BlockBuilder
from opendata_buffer.producer.call import Call
from opendata_buffer.producer.run import Run

__all__ = ["RANGE_BYTES", "Batch", "EncodedBatch"]

RANGE_BYTES = 16
"""What a metadata range takes in the manifest beside its payload."""


def _continues(part: Call | Run, before: Call | Run) -> bool:
    """Whether one metadata range can stand for both."""
    return part.ingestion_time_ms == before.ingestion_time_ms and part.metadata == before.metadata


@dataclass(slots=True, eq=False)
class Batch:
    """The calls that go into one object.

    Attributes:
        completion: Shared by the handles of its calls.
        due_at: When it is sealed at the latest, monotonic seconds.
        parts: In produce order; none in a separator.
        run: The last part, while it is not counted.
        size: Bytes of the record block, at most.
        metadata_size: Bytes that the ranges take in the manifest, at most.
        count: Records, at most.
        calls: Calls, at most.
        held: Bytes of the producer's budget, at most.
        held_before: Bytes that the batches took which were ahead of it when it was opened.
        sealed_at: When it was sealed, monotonic seconds; None while it is open.
    """

    completion: Completion
    due_at: float
    parts: list[Call | Run] = field(default_factory=list)
    run: Run | None = None
    size: int = 0
    metadata_size: int = 0
    count: int = 0
    calls: int = 0
    held: int = 0
    held_before: int = 0
    sealed_at: float | None = None

    @property
    def alone(self) -> Call | None:
        """The call that has this batch to itself because of its identity."""
        first = self.parts[0] if self.parts else None
        return first if isinstance(first, Call) and first.alone else None

    @property
    def transaction(self) -> Transaction | None:
        """Identity of the call that has this batch to itself."""
        return self.alone.transaction if self.alone else None

    @property
    def message(self) -> UUID | None:
        """Identity as a message of the call that has this batch to itself."""
        return self.alone.message if self.alone else None

    def add(self, call: Call) -> None:
        """Accept a call."""
        self._count(call, 1)
        self._make_range(call)
        self.parts.append(call)

    def open(self, run: Run) -> None:
        """Accept a run, which goes on to take calls; it is counted by :meth:`fold`."""
        self._make_range(run)
        self.run = run
        self.parts.append(run)

    def fold(self) -> None:
        """Close the run, if there is one, and count what is in it."""
        run = self.run
        if run is not None:
            run.close()
            self._count(run, run.calls)
            self.run = None

    def _count(self, part: Call | Run, calls: int) -> None:
        self.size += part.size
        self.count += part.count
        self.held += part.held
        self.calls += calls

    def _make_range(self, part: Call | Run) -> None:
        if not self.parts or not _continues(part, self.parts[-1]):
            self.metadata_size += RANGE_BYTES + len(part.metadata)

    def upload(self, deadline: float) -> Upload:
        """The upload of this batch, to be given up at ``deadline`` (monotonic seconds)."""
        return Upload(
            completion=self.completion,
            transaction=self.transaction,
            message=self.message,
            # A batch without calls is the separator in front of a first transaction. Messages
            # are told by their clocks: of one that failed a later one says nothing.
            ordered=not self.parts or (self.transaction is not None and self.message is None),
            calls=self.calls,
            held=self.held,
            deadline=deadline,
        )

    def encode(self, compression: Compression, level: int) -> EncodedBatch:
        """What is stored and queued; counted anew, part by part. Its run is closed."""
        ranges: list[Metadata] = []
        block = BlockBuilder()
        before: Call | Run | None = None
        for part in self.parts:
            if before is None or not _continues(part, before):
                ranges.append(Metadata(block.count, part.ingestion_time_ms, part.metadata))
            before = part
            if isinstance(part, Run):
                block.add_run(part)
            else:
                block.add(part.block, part.count)
        pieces = block.pieces()
        sealed = seal_pieces(pieces, block.count, compression, level)
        return EncodedBatch(sealed, tuple(ranges), block.count, sum(map(len, pieces)))


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch as it is stored and queued.

    Attributes:
        pieces: The object's bytes, one piece behind the other.
        metadata: The ranges of its queue entry.
        count: Records in it.
        size: Bytes of its record block, before compression.
    """

    pieces: list[bytes | memoryview]
    metadata: tuple[Metadata, ...]
    count: int
    size: int

    @property
    def data(self) -> bytes:
        """The object's bytes, joined."""
        return b"".join(self.pieces)
