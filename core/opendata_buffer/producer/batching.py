"""Which entries go into which batch, and what a batch is (OpenData RFC 0001, Producer). Pure.

Times are passed in, as seconds of the monotonic clock.

The thread that calls ``produce()`` may be interrupted between any two steps (Ctrl-C), so every
change here is one step that leaves all else valid: a request is accepted by one ``append``, a batch
is sealed by setting one attribute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from uuid import UUID

from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.formats.batch import Compression, seal_pieces
from opendata_buffer.formats.entries import Metadata, NewEntry
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.producer.append_buffer import (
    BUFFER_S,
    CLOSED,
    AppendBuffer,
    CurrentBuffer,
    Item,
    ProduceRequest,
    RecordEncoder,
    block_bytes,
    held_at_opening,
    records_in,
)
from opendata_buffer.producer.handle import DurabilityWatcher, Durable, WriteHandle
from opendata_buffer.runtime import Moment

RANGE_BYTES = 16
"""What a metadata range takes in the manifest beside its payload."""

MAX_RECORDS = 2**32 - 1
"""What a footer can count (failure F34)."""

METADATA_FLUSH_BYTES = 4 * 1024 * 1024
"""Metadata beyond which a batch is full: it is one entry of the manifest (failure F35)."""


class Stage(Enum):
    """Where a batch stands: see :mod:`.ordered_uploads`. An open batch is UPLOADING."""

    UPLOADING = auto()
    UPLOADED = auto()
    APPENDING = auto()
    COMPLETED = auto()


@dataclass(slots=True, eq=False)
class Batch:
    """The calls that go into one object, from the first one until their outcome is known.

    Calls are counted as they come. The thread that brings one may be interrupted between counting
    it and adding it, so the counts may be too high, never too low; :meth:`encode` counts anew. The
    items of an open :class:`~.append_buffer.AppendBuffer` are counted when that is closed.

    Attributes:
        watcher: Shared by the handles of its calls.
        due_at: When it is sealed at the latest, monotonic seconds.
        ordered: Whether its failure stops the ordered batches behind it: it is a transaction, or
            the separator in front of the first one.
        transaction: Identity of the call that has this batch to itself.
        message: Identity as a message of the call that has this batch to itself.
        parts: In produce order, until it is encoded; none in a separator.
        buffer: The last part, while it is open.
        size: Bytes of the record block; at most, until it is encoded.
        metadata_size: Bytes that the ranges take in the manifest, at most.
        count: Records; at most, until it is encoded.
        calls: Calls, at most.
        held: Bytes of ``max_buffered_bytes``, at most.
        held_before: Bytes of the batches that waited ahead of it when it was opened.
        sealed_at: When it was sealed, monotonic seconds; None while it is open.
        deadline: When to give up, monotonic seconds.
        metadata: The ranges of its queue entry; set with ``data``.
        data: The object's bytes, or its pieces, until the outcome is known; None before encoding.
        location: The object's key.
        named: When the location's ULID was made; None before the first upload.
        trouble: The error of its last attempt.
        outcome: Set when it is completed.
    """

    watcher: DurabilityWatcher
    due_at: float = 0.0
    ordered: bool = False
    transaction: Transaction | None = None
    message: UUID | None = None
    parts: list[ProduceRequest | AppendBuffer] = field(default_factory=list)
    buffer: AppendBuffer | None = None
    size: int = 0
    metadata_size: int = 0
    count: int = 0
    calls: int = 0
    held: int = 0
    held_before: int = 0
    sealed_at: float | None = None
    deadline: float = float("inf")
    stage: Stage = Stage.UPLOADING
    metadata: tuple[Metadata, ...] = ()
    data: bytes | list[bytes | memoryview] | None = None
    location: str = ""
    named: Moment | None = None
    trouble: OpenDataBufferError | None = None
    outcome: Durable | BaseException | None = None

    @property
    def entry(self) -> NewEntry:
        """The queue entry to append."""
        return NewEntry(self.location, self.metadata)

    def age(self, now: Moment) -> float:
        """Seconds since its name was made, by the clock that says more (failure F5)."""
        return 0.0 if self.named is None else self.named.age_ms(now) / 1000

    def add(self, request: ProduceRequest) -> None:
        """Accept a request."""
        self._count(request, 1)
        self._count_range(request)
        if request.alone:
            self.transaction, self.message = request.transaction, request.message
            # A message is identified by its clock: a failed one does not hide later ones.
            self.ordered = request.message is None
        self.parts.append(request)

    def add_buffer(self, buffer: AppendBuffer) -> None:
        """Accept a buffer, which goes on to take calls; :meth:`close_buffer` counts them."""
        self._count_range(buffer)
        self.buffer = buffer
        self.parts.append(buffer)

    def close_buffer(self) -> None:
        """Close the buffer, if there is one, and count the items in it."""
        buffer = self.buffer
        if buffer is not None:
            buffer.close()
            self._count(buffer, buffer.calls)
            self.buffer = None

    def encode(self, compression: Compression, level: int) -> list[bytes | memoryview]:
        """The object's bytes, in pieces; sets ``metadata``, ``count`` and ``size``."""
        ranges: list[Metadata] = []
        encoder = RecordEncoder()
        before: ProduceRequest | AppendBuffer | None = None
        for part in self.parts:
            if before is None or not _shares_range(part, before):
                ranges.append(Metadata(encoder.count, part.ingestion_time_ms, part.metadata))
            before = part
            if isinstance(part, AppendBuffer):
                encoder.add_buffer(part)
            else:
                encoder.add(part.block, part.count)
        pieces = encoder.pieces()
        self.metadata, self.count = tuple(ranges), encoder.count
        self.size = sum(map(len, pieces))
        return seal_pieces(pieces, encoder.count, compression, level)

    def _count(self, part: ProduceRequest | AppendBuffer, calls: int) -> None:
        self.size += part.size
        self.count += part.count
        self.held += part.held
        self.calls += calls

    def _count_range(self, part: ProduceRequest | AppendBuffer) -> None:
        if not self.parts or not _shares_range(part, self.parts[-1]):
            self.metadata_size += RANGE_BYTES + len(part.metadata)


def _shares_range(
    part: ProduceRequest | AppendBuffer, before: ProduceRequest | AppendBuffer
) -> bool:
    """Whether one metadata range can stand for both."""
    return part.ingestion_time_ms == before.ingestion_time_ms and part.metadata == before.metadata


class Batcher:
    """Accumulates calls until size or age says that a batch is full.

    Args:
        flush_interval: Seconds in which the open batch becomes due, at the latest.
        flush_size: Bytes beyond which it is full; a loose limit.
        max_size: Bytes no batch exceeds.
        watcher: Makes the watcher of a new batch.
    """

    def __init__(
        self,
        *,
        flush_interval: float,
        flush_size: int,
        max_size: int,
        watcher: Callable[[], DurabilityWatcher],
    ) -> None:
        self._flush_interval = flush_interval
        self._flush_size = flush_size
        self._max_size = max_size
        self._watcher = watcher
        self._batches: deque[Batch] = deque()  # sealed ones; the last may be open
        self._last_due_at: float | None = None
        self.current = CurrentBuffer()

    @property
    def due_at(self) -> float | None:
        """From when on :meth:`take` has a batch, monotonic seconds; None when there is none."""
        if not self._batches:
            return None
        first = self._batches[0]
        return first.due_at if first.sealed_at is None else first.sealed_at

    @property
    def held(self) -> int:
        """Bytes of ``max_buffered_bytes`` that wait here."""
        if not self._batches:
            return 0
        first, last = self._batches[0], self._batches[-1]
        in_buffer = 0 if last.buffer is None else last.buffer.held
        return last.held_before + last.held + in_buffer - first.held_before

    @property
    def calls(self) -> int:
        """Calls that wait here."""
        buffer = self._batches[-1].buffer if self._batches else None
        counted = sum(batch.calls for batch in self._batches)
        return counted if buffer is None else counted + buffer.calls

    @property
    def batches(self) -> list[Batch]:
        """All that wait here, in produce order."""
        return list(self._batches)

    def add(self, request: ProduceRequest, now: float) -> DurabilityWatcher:
        """Put a request into the open batch, or into a new one; returns the batch's watcher."""
        self._close_buffer()
        batch = self._fitting(request.size, request.count, request.alone, now)
        if batch is None:
            batch = self._new(now)
            batch.add(request)
            if request.alone:
                batch.sealed_at = now
            self._last_due_at = batch.due_at
            self._batches.append(batch)
        else:
            batch.add(request)
        self._seal_full(batch, now)
        return batch.watcher

    def add_item(self, item: Item, time_ms: int, now: float, room: int) -> WriteHandle:
        """Put a call without metadata into a new buffer, which becomes the current one.

        Args:
            item: Its records.
            time_ms: Ingestion time of the buffer, milliseconds since the Unix epoch.
            now: Monotonic seconds.
            room: Bytes of ``max_buffered_bytes`` that are free.
        """
        self._close_buffer()
        fitting = self._fitting(block_bytes(item), records_in(item), False, now)
        batch = self._new(now) if fitting is None else fitting
        # Every byte held counts as one of the block, which is smaller: so no limit is exceeded,
        # and the true size is counted when the buffer is closed. Each record holds more than four
        # bytes, so their number stays below its limit, too.
        limit = min(
            room,
            self._flush_size - batch.size,
            self._max_size - batch.size,
            4 * (MAX_RECORDS - batch.count),
        )
        handle = WriteHandle(batch.watcher, time_ms)
        until = min(now + BUFFER_S, batch.due_at)
        buffer = AppendBuffer(item, time_ms, handle, max(limit, held_at_opening(item)), until)
        batch.add_buffer(buffer)
        if fitting is None:
            self._last_due_at = batch.due_at
            self._batches.append(batch)
        if self._seal_full(batch, now):
            batch.close_buffer()
        else:
            self.current.buffer = buffer
        return handle

    def add_separator(self, now: float) -> None:
        """Put an empty batch behind everything accepted so far."""
        self.seal(now)
        separator = self._new(now)
        separator.ordered = True
        separator.sealed_at = now
        self._batches.append(separator)

    def seal(self, now: float) -> None:
        """Let nothing more into the open batch, however small it is."""
        self._close_buffer()
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
            self._close_buffer()
            first.sealed_at = now
        first.close_buffer()  # an interrupted caller may have left it open
        return self._batches.popleft()

    def _close_buffer(self) -> None:
        """Let callers take the lock, and count what they have put into the buffer."""
        self.current.buffer = CLOSED
        if self._batches:
            self._batches[-1].close_buffer()

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
        size = batch.size if batch.buffer is None else batch.size + batch.buffer.size
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
        batch = Batch(self._watcher(), self._next_due_at(now))
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
