"""Which entries go into which batch: a pure accumulator (OpenData RFC 0001, Producer).

Knows no thread and no store; times are passed in, as seconds of a monotonic clock.

The thread that calls ``produce()`` may be interrupted between any two steps (Ctrl-C), so every
change here is one step that leaves all else valid: a call is accepted by one ``append``, a batch
is sealed by setting one attribute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from opendata_buffer.formats.batch import Compression, seal_pieces
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.producer.append_buffer import (
    CLOSED,
    RUN_S,
    BlockBuilder,
    Call,
    Current,
    Item,
    Run,
    block_bytes,
    held_at_opening,
    records_in,
)
from opendata_buffer.producer.handle import Completion, DurabilityWatcher, WriteHandle
from opendata_buffer.producer.ordered_uploads import Upload

__all__ = ["Batch", "Batcher", "EncodedBatch", "RANGE_BYTES"]


# ---- The calls that go into one object ----
#
# Counted as they come, encoded when they are uploaded. Pure.
#
# The thread that brings a call may be interrupted between counting it and putting it in, so the
# counts may be too high, never too low: what is uploaded is counted anew. What comes through an
# open
# :class:`~.append_buffer.Run` is counted when that is closed.


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


MAX_RECORDS = 2**32 - 1
"""What a footer can count (failure F34)."""

METADATA_FLUSH_BYTES = 4 * 1024 * 1024
"""Metadata beyond which a batch is full: it is one entry of the manifest (failure F35)."""


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
        self.current = Current()

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
        in_run = 0 if last.run is None else last.run.held
        return last.held_before + last.held + in_run - first.held_before

    @property
    def calls(self) -> int:
        """Calls that wait here."""
        run = self._batches[-1].run if self._batches else None
        return sum(batch.calls for batch in self._batches) + (0 if run is None else run.calls)

    @property
    def batches(self) -> list[Batch]:
        """All that wait here, in produce order."""
        return list(self._batches)

    def add(self, call: Call, now: float) -> Completion:
        """Put a call into the open batch, or into a new one.

        Returns:
            The completion of the batch the call went into.
        """
        self._close_run()
        batch = self._fitting(call.size, call.count, call.alone, now)
        if batch is None:
            batch = self._new(now)
            batch.add(call)
            if call.alone:
                batch.sealed_at = now
            self._last_due_at = batch.due_at
            self._batches.append(batch)
        else:
            batch.add(call)
        self._seal_full(batch, now)
        return batch.completion

    def put(self, item: Item, time_ms: int, now: float, room: int) -> WriteHandle:
        """Put a call without metadata into a new run, which becomes the open one.

        Args:
            item: Its records.
            time_ms: Ingestion time of the run, milliseconds since the Unix epoch.
            now: Monotonic seconds.
            room: Bytes of the producer's budget that are free.
        """
        self._close_run()
        batch = self._fitting(block_bytes(item), records_in(item), False, now)
        new = batch is None
        if batch is None:
            batch = self._new(now)
        # Every byte held counts as one of the block, which is smaller: so neither budget nor
        # block is exceeded, and how much there really is shows when the run is closed. Each
        # record holds more than four bytes, so their number stays below its limit, too.
        budget = min(
            room,
            self._flush_size - batch.size,
            self._max_size - batch.size,
            4 * (MAX_RECORDS - batch.count),
        )
        handle = WriteHandle(DurabilityWatcher(batch.completion), time_ms)
        least = held_at_opening(item)
        until = min(now + RUN_S, batch.due_at)
        run = Run(item, time_ms, handle, max(budget, least), until)
        batch.open(run)
        if new:
            self._last_due_at = batch.due_at
            self._batches.append(batch)
        if self._seal_full(batch, now):
            batch.fold()
        else:
            self.current.run = run
        return handle

    def separate(self, now: float) -> None:
        """Put an empty batch behind everything accepted so far."""
        self.seal(now)
        separator = self._new(now)
        separator.sealed_at = now
        self._batches.append(separator)

    def seal(self, now: float) -> None:
        """Let nothing more into the open batch, however small it is."""
        self._close_run()
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
            self._close_run()
            first.sealed_at = now
        first.fold()  # an interrupted caller may not have come to it
        return self._batches.popleft()

    def _close_run(self) -> None:
        """Let callers come to the lock; what they have put into the run counts."""
        self.current.run = CLOSED
        if self._batches:
            self._batches[-1].fold()

    def _fitting(self, size: int, count: int, alone: bool, now: float) -> Batch | None:
        """The open batch, if so much more fits; otherwise it is sealed."""
        batch = self._open()
        if batch is not None and (
            alone or batch.size + size > self._max_size or batch.count + count > MAX_RECORDS
        ):
            batch.sealed_at = now
            return None
        return batch

    def _seal_full(self, batch: Batch, now: float) -> bool:
        """Seal the batch if it is full or due; whether it is sealed."""
        size = batch.size if batch.run is None else batch.size + batch.run.size
        if batch.sealed_at is None and (
            size > self._flush_size
            or batch.metadata_size > METADATA_FLUSH_BYTES
            # Callers keep coming while the thread that keeps the time waits for the lock
            # (failure F32), so age counts here too.
            or now >= batch.due_at
        ):
            batch.sealed_at = now
        return batch.sealed_at is not None

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
