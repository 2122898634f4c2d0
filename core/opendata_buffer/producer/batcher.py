"""Which entries go into which batch: a pure accumulator (OpenData RFC 0001, Producer).

Knows no thread and no store; times are passed in, as seconds of a monotonic clock.

The thread that calls ``produce()`` may be interrupted between any two steps (Ctrl-C), so every
change here is one step that leaves all else valid: a call is accepted by one ``append``, a batch
is sealed by setting one attribute. What counts calls and bytes is changed before and may then be
too high, never too low; it is dropped with its batch, and what is uploaded is counted anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pyarrow as pa

from opendata_buffer.commit.durability import Completion
from opendata_buffer.commit.upload import Upload
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import Compression, encode_block, seal_block
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata

__all__ = ["CALL_BYTES", "Batch", "Batcher", "Call", "encode_entries"]

MAX_RECORDS = 2**32 - 1

METADATA_FLUSH_BYTES = 4 * 1024 * 1024
"""Metadata beyond which a batch is full: it is one entry of the manifest (failure F35)."""

RANGE_BYTES = 16
"""What a metadata range takes in the manifest beside its payload."""

CALL_BYTES = 256
"""What a waiting call takes of the producer's budget beside its bytes: about what its objects
take of the process's memory."""


def encode_entries(entries: Any) -> tuple[bytes | memoryview, int]:
    """The record block of one ``produce()`` call, and the number of entries in it.

    Raises:
        InvalidInput: See :func:`.encode_block` and :func:`.encode_arrow_block`.
    """
    if isinstance(entries, pa.Array | pa.ChunkedArray):
        return encode_arrow_block(entries)
    if isinstance(entries, bytes | bytearray | memoryview | str):
        raise InvalidInput(
            f"entries is one {type(entries).__name__}: give a list of entries, [entry]"
        )
    taken = entries if isinstance(entries, list | tuple) else list(entries)
    return encode_block(taken), len(taken)


@dataclass(slots=True, eq=False)
class Call:
    """One ``produce()`` call, encoded.

    Attributes:
        block: Its entries as a piece of a record block.
        count: How many entries.
        metadata: The caller's metadata payload.
        ingestion_time_ms: When the call was made, milliseconds since the Unix epoch.
        transaction: Whose the call is; it then has a batch of its own.
        message: Identity of the call as a message; it then has a batch of its own, too.
    """

    block: bytes | memoryview
    count: int
    metadata: bytes
    ingestion_time_ms: int
    transaction: Transaction | None = None
    message: UUID | None = None

    @property
    def alone(self) -> bool:
        """Whether it has a batch to itself."""
        return self.transaction is not None or self.message is not None

    @property
    def held(self) -> int:
        """Bytes of the producer's budget that it takes."""
        return len(self.block) + len(self.metadata) + CALL_BYTES

    def continues(self, before: Call) -> bool:
        """Whether one metadata range can stand for both calls."""
        return (
            self.ingestion_time_ms == before.ingestion_time_ms and self.metadata == before.metadata
        )


@dataclass(slots=True, eq=False)
class Batch:
    """The calls that go into one object.

    Attributes:
        completion: Shared by the handles of its calls.
        due_at: When it is sealed at the latest, monotonic seconds.
        calls: In produce order; none in a separator.
        size: Bytes of the record block, at most.
        metadata_size: Bytes that the ranges take in the manifest, at most.
        count: Records, at most.
        held: Bytes of the producer's budget, at most.
        held_before: Bytes that the batches took which were ahead of it when it was opened.
        sealed_at: When it was sealed, monotonic seconds; None while it is open.
    """

    completion: Completion
    due_at: float
    calls: list[Call] = field(default_factory=list)
    size: int = 0
    metadata_size: int = 0
    count: int = 0
    held: int = 0
    held_before: int = 0
    sealed_at: float | None = None

    @property
    def transaction(self) -> Transaction | None:
        """Identity of the call that has this batch to itself."""
        return self.calls[0].transaction if self.calls else None

    @property
    def message(self) -> UUID | None:
        """Identity as a message of the call that has this batch to itself."""
        return self.calls[0].message if self.calls else None

    def add(self, call: Call) -> None:
        """Accept a call."""
        self.size += len(call.block)
        self.count += call.count
        self.held += call.held
        if not self.calls or not call.continues(self.calls[-1]):
            self.metadata_size += RANGE_BYTES + len(call.metadata)
        self.calls.append(call)

    def metadata(self) -> tuple[Metadata, ...]:
        """The ranges in produce order: one for all neighbours with equal time and payload."""
        ranges: list[Metadata] = []
        start = 0
        before: Call | None = None
        for call in self.calls:
            if before is None or not call.continues(before):
                ranges.append(Metadata(start, call.ingestion_time_ms, call.metadata))
            start += call.count
            before = call
        return tuple(ranges)

    def upload(self, deadline: float) -> Upload:
        """The upload of this batch, to be given up at ``deadline`` (monotonic seconds)."""
        return Upload(
            completion=self.completion,
            transaction=self.transaction,
            message=self.message,
            # A batch without calls is the separator in front of a first transaction. Messages
            # are told by their clocks: of one that failed a later one says nothing.
            ordered=not self.calls or (self.transaction is not None and self.message is None),
            calls=len(self.calls),
            held=self.held,
            deadline=deadline,
        )

    def encode(self, compression: Compression, level: int) -> EncodedBatch:
        """What is stored and queued; counted anew, call by call."""
        pieces = [call.block for call in self.calls]
        count = sum(call.count for call in self.calls)
        data = seal_block(pieces, count, compression, level)
        return EncodedBatch(data, self.metadata(), count, sum(map(len, pieces)))


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch as it is stored and queued.

    Attributes:
        data: The object's bytes.
        metadata: The ranges of its queue entry.
        count: Records in it.
        size: Bytes of its record block, before compression.
    """

    data: bytes
    metadata: tuple[Metadata, ...]
    count: int
    size: int


class Batcher:
    """Accumulates calls until size or age says that a batch is full.

    Args:
        flush_interval: Seconds in which the open batch becomes due, at the latest.
        flush_size: Bytes beyond which it is full; a loose limit.
        max_size: Bytes no batch exceeds.
        completion: Makes the completion of a new batch.
    """

    def __init__(
        self,
        *,
        flush_interval: float,
        flush_size: int,
        max_size: int,
        completion: Callable[[], Completion],
    ) -> None:
        self._flush_interval = flush_interval
        self._flush_size = flush_size
        self._max_size = max_size
        self._completion = completion
        self._batches: deque[Batch] = deque()  # sealed ones; the last may be open
        self._last_due_at: float | None = None

    @property
    def due_at(self) -> float | None:
        """From when on :meth:`take` has a batch, monotonic seconds; None when there is none."""
        if not self._batches:
            return None
        first = self._batches[0]
        return first.due_at if first.sealed_at is None else first.sealed_at

    @property
    def held(self) -> int:
        """Bytes of the producer's budget that wait here."""
        if not self._batches:
            return 0
        first, last = self._batches[0], self._batches[-1]
        return last.held_before + last.held - first.held_before

    @property
    def calls(self) -> int:
        """Calls that wait here."""
        return sum(len(batch.calls) for batch in self._batches)

    @property
    def batches(self) -> list[Batch]:
        """All that wait here, in produce order."""
        return list(self._batches)

    def add(self, call: Call, now: float) -> Completion:
        """Put a call into the open batch, or into a new one.

        Returns:
            The completion of the batch the call went into.
        """
        batch = self._open()
        if batch is not None and (
            call.alone
            or batch.size + len(call.block) > self._max_size
            or batch.count + call.count > MAX_RECORDS
        ):
            batch.sealed_at = now
            batch = None
        if batch is None:
            batch = self._new(now)
            batch.add(call)
            if call.alone:
                batch.sealed_at = now
            self._last_due_at = batch.due_at
            self._batches.append(batch)
        else:
            batch.add(call)
        if (
            batch.size > self._flush_size
            or batch.metadata_size > METADATA_FLUSH_BYTES
            # Callers keep coming while the thread that keeps the time waits for the lock
            # (failure F32), so age counts here too.
            or now >= batch.due_at
        ) and batch.sealed_at is None:
            batch.sealed_at = now
        return batch.completion

    def separate(self, now: float) -> None:
        """Put an empty batch behind everything accepted so far."""
        self.seal(now)
        separator = self._new(now)
        separator.sealed_at = now
        self._batches.append(separator)

    def seal(self, now: float) -> None:
        """Let nothing more into the open batch, however small it is."""
        batch = self._open()
        if batch is not None:
            batch.sealed_at = now

    def take(self, now: float) -> Batch | None:
        """The oldest sealed batch; the open one counts when it is due."""
        if not self._batches:
            return None
        first = self._batches[0]
        if first.sealed_at is None:
            if now < first.due_at:
                return None
            first.sealed_at = now
        return self._batches.popleft()

    def _open(self) -> Batch | None:
        last = self._batches[-1] if self._batches else None
        return last if last is not None and last.sealed_at is None else None

    def _new(self, now: float) -> Batch:
        batch = Batch(self._completion(), self._next_due_at(now))
        if self._batches:
            last = self._batches[-1]
            batch.held_before = last.held_before + last.held
        return batch

    def _next_due_at(self, now: float) -> float:
        """At most an interval from now, and under a steady load one interval after the last.

        Counted from the first call alone, the wait for that call would add to every interval.
        """
        last = self._last_due_at
        if last is not None and last <= now < last + self._flush_interval:
            return last + self._flush_interval
        return now + self._flush_interval
