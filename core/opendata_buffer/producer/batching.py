"""Records, and the batches that they go into.

**The problem.** A program calls ``send()`` a million times per second. A lock alone would cost more
than everything else that the call does, and a Python object per call would fill the memory.

**The idea.** The :class:`Batcher` opens an :class:`AppendBuffer` for the calls of one millisecond.
They share its handle and its time, so a caller only appends its record to a list. A ``list.append``
cannot be interrupted, neither by another thread nor by a signal. Only the call that opens the next
buffer takes the lock.

**What can go wrong.** A caller may stop just before its ``append``, while the buffer is closed and
uploaded. Its record is not lost::

    caller                                   batcher, with the lock held
    1  buffer = batcher.buffer               a  batcher.buffer = CLOSED
    2  buffer.append(item)                   b  buffer.close(): the items in it by now count
    3  batcher.buffer is still buffer?

If it is, (a) has not happened yet, so (b) will count the item. If not, the caller takes the lock
and calls :meth:`AppendBuffer.was_included`. If the item comes after the counted ones, it is
removed, and the caller puts it into the next buffer.

A caller may also be interrupted between any two steps (Ctrl-C). So every change of a batch is one
step that leaves everything else valid.

Times are passed in, as seconds of the monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias
from uuid import UUID

import pyarrow as pa

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.formats.arrow import MANY_RECORDS, encode_arrow_block, listed
from opendata_buffer.formats.batch import (
    Compression,
    Transaction,
    encode_block,
    join_records,
    seal_pieces,
)
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.producer.handles import Completion, Durable, WriteHandle
from opendata_buffer.runtime import Moment

BUFFER_S = 0.001
"""Seconds that a buffer is open. The times in metadata are in milliseconds."""

RECORD_HELD, PIECE_HELD, BUFFER_HELD, REQUEST_HELD = 64, 128, 256, 256
"""Bytes of ``max_buffered_bytes`` that a record, a piece, an append buffer and a produce request
take for their Python objects, in addition to their content."""

RANGE_BYTES = 16
"""Bytes that a metadata range takes in the manifest, in addition to its payload."""

MAX_RECORDS = 2**32 - 1
"""The largest number of records that a batch's footer can have (failure F34)."""

METADATA_FLUSH_BYTES = 4 * 1024 * 1024
"""A batch with more metadata than this, in bytes, is full (failure F35).

All of it is in one entry of the manifest.
"""

RECORDS_AT_ONCE = 16_384
"""How many records are joined to one piece of a block.

This is a fifth faster than joining all records of a batch at once, because these are still in the
processor's caches when they get their length prefixes.
"""

_PREFIX = 4
"""Bytes before each record of a block."""

_BYTES = {bytes}

Records: TypeAlias = (
    bytes
    | bytearray
    | memoryview
    | Iterable[bytes | bytearray | memoryview]
    | pa.Array
    | pa.ChunkedArray
)
"""The records of one call: bytes-like objects, one of them, or an Arrow column of binary or string
type."""

Piece = tuple[bytes | memoryview, int]
Item = bytes | Piece
"""A record or a piece, which one call adds to a buffer.

A piece is several records, encoded as part of a record block, and their number.
"""


class AppendBuffer:
    """The items of one millisecond, in produce order. Only :attr:`append` needs no lock.

    Callers subtract the size of an item from ``left``, and then append it.

    Args:
        first: The item that it is opened for.
        ingestion_time_ms: The time of all its records, in milliseconds since the Unix epoch.
        handle: The handle of all its calls.
        limit: Bytes of ``max_buffered_bytes`` that it may take.
        until: The time at which it is full, in monotonic seconds.
    """

    __slots__ = (
        "_closed_at",
        "_items",
        "_limit",
        "append",
        "handle",
        "ingestion_time_ms",
        "left",
        "more",
        "pieces",
        "until",
    )

    metadata = b""

    def __init__(
        self,
        first: Item,
        ingestion_time_ms: int,
        handle: WriteHandle | None,
        limit: int,
        until: float,
    ) -> None:
        self._items: list[Item] = [first]
        self._limit = limit
        self._closed_at: int | None = None
        self.append = self._items.append
        self.handle = handle
        self.ingestion_time_ms = ingestion_time_ms
        self.pieces = 1 if type(first) is tuple else 0
        self.more = records_in(first) - 1  # Records, not counting one for each item.
        self.left = limit - held_at_opening(first)
        self.until = until

    @property
    def calls(self) -> int:
        """How many calls are in it."""
        return len(self._items) if self._closed_at is None else self._closed_at

    @property
    def count(self) -> int:
        """How many records are in it."""
        return self.calls + self.more

    @property
    def held(self) -> int:
        """How many of ``max_buffered_bytes`` it takes."""
        return self._limit - self.left

    @property
    def size(self) -> int:
        """The bytes of its records in a block, at most: items that came too late are included."""
        single = self.calls - self.pieces
        return self.held - BUFFER_HELD - PIECE_HELD * self.pieces - (RECORD_HELD - _PREFIX) * single

    def close(self) -> None:
        """Count the items that are in it by now, and no later ones. The caller holds the lock."""
        if self._closed_at is None:
            self._closed_at = len(self._items)

    def was_included(self, item: Item) -> bool:
        """Return whether an item counts that was appended while the buffer was being closed.

        If it does not count, it is removed. The caller holds the lock, and calls this once for each
        such item.
        """
        self.close()
        for index in range(self.calls, len(self._items)):
            # Compare by identity. If two callers appended the same object and one was late, it
            # does not matter which of them appends it again.
            if self._items[index] is item:
                del self._items[index]
                return False
        return True

    def items(self) -> list[Item]:
        """Return the counted items. The buffer is closed."""
        # A copy, because a late caller may still append an item and remove it again.
        return self._items[: self.calls]


def records_in(item: Item) -> int:
    """Return how many records an item has."""
    return item[1] if type(item) is tuple else 1


def block_bytes(item: Item) -> int:
    """Return how many bytes the records of an item take in a block."""
    return len(item[0]) if type(item) is tuple else _PREFIX + len(item)


def held_at_opening(item: Item) -> int:
    """Return how many of ``max_buffered_bytes`` a buffer takes that is opened for this item."""
    overhead = PIECE_HELD if type(item) is tuple else RECORD_HELD - _PREFIX
    return BUFFER_HELD + block_bytes(item) + overhead


CLOSED = AppendBuffer(b"", 0, None, 0, float("-inf"))
"""A buffer without room, so that callers take the lock."""


@dataclass(slots=True, eq=False)
class ProduceRequest:
    """One ``produce()`` call that cannot go into an append buffer.

    Attributes:
        block: Its records, as a piece of a record block.
        count: How many records it has.
        metadata: The metadata of the call.
        ingestion_time_ms: Set when it is accepted, in milliseconds since the Unix epoch.
        transaction: The identity of its batch, if it is part of a transaction.
        message: The message that its batch is.
    """

    block: bytes | memoryview
    count: int
    metadata: bytes
    ingestion_time_ms: int
    transaction: Transaction | None = None
    message: UUID | None = None

    pieces = 1

    def items(self) -> list[Item]:
        """Return all of it, as one piece."""
        return [(self.block, self.count)]

    @property
    def alone(self) -> bool:
        """Whether it has a batch of its own, because it is a transaction or a message."""
        return self.transaction is not None or self.message is not None

    @property
    def held(self) -> int:
        """How many of ``max_buffered_bytes`` it takes (failure F33)."""
        return len(self.block) + len(self.metadata) + REQUEST_HELD

    @property
    def size(self) -> int:
        """The bytes of its records in a block."""
        return len(self.block)


def encode_entries(entries: Any) -> tuple[bytes | memoryview, int]:
    """Encode the records of one ``produce()`` call.

    Args:
        entries: A list or another iterable of bytes-like records, or an Arrow array.

    Returns:
        The record block, and the number of records in it.

    Raises:
        InvalidInput: See :func:`.encode_block` and :func:`.encode_arrow_block`.
    """
    taken = listed(entries)
    if not isinstance(taken, list | tuple):
        return encode_arrow_block(taken)
    return encode_list(taken) or (encode_block(taken), len(taken))


def encode_list(entries: Sequence[Any]) -> tuple[bytes | memoryview, int] | None:
    """Encode a list or tuple like :func:`encode_entries`, if all its items are ``bytes``.

    Args:
        entries: The records.

    Returns:
        The record block and the number of records; None if an item has another type.
    """
    # A copy, because another thread may change the list between the check and the encoding.
    records = tuple(entries)
    if set(map(type, records)) != _BYTES:
        return None
    return encode_bytes(records), len(records)


def encode_bytes(records: Sequence[bytes]) -> bytes | memoryview:
    """Encode records like :func:`.encode_block`; all of them are ``bytes``."""
    if len(records) >= MANY_RECORDS:
        # Arrow refuses more bytes than it can join at once.
        with suppress(InvalidInput):
            return encode_arrow_block(pa.array(records, pa.binary()))[0]
    return join_records(records)


Part = ProduceRequest | AppendBuffer


class Stage(Enum):
    """The stages of a batch; see :mod:`.ordered_uploads`. An open batch is UPLOADING."""

    UPLOADING = auto()
    UPLOADED = auto()
    APPENDING = auto()
    COMPLETED = auto()


@dataclass(slots=True, eq=False)
class Batch:
    """The calls that go into one object, from the first one until their outcome is known.

    A caller may be interrupted after it has counted its call and before it has added it. So the
    counts may be too high, but never too low. :meth:`encode` counts again.

    Times without a unit are monotonic seconds.

    Attributes:
        completion: Sets the outcome of its handles.
        due_at: When it is sealed at the latest.
        ordered: Whether the ordered batches after it fail if it fails. It is a transaction, or the
            separator before the first one of an app.
        transaction: The identity that its name carries.
        message: The message that it is.
        parts: Its requests and buffers, in produce order, until it is encoded. None in a separator.
        buffer: The last part, while it is open.
        size: Bytes of its records in a block, at most.
        metadata_size: Bytes that its ranges take in the manifest, at most.
        count: How many records it has, at most.
        calls: How many calls it has, at most.
        held: How many of ``max_buffered_bytes`` it takes.
        held_before: The bytes of the batches before it, when it was opened.
        sealed_at: When it was sealed.
        deadline: When it fails if it has no outcome.
        stage: Where it is on its way.
        metadata: The ranges of its queue entry; set together with ``data``.
        data: The bytes of the object, or its pieces, until the outcome is known. None before
            encoding.
        location: The name of its object.
        named: When that name was made. None before the first upload.
        last_error: The error of its last attempt.
        outcome: Where it is in the queue, or the error.
    """

    completion: Completion
    due_at: float = 0.0
    ordered: bool = False
    transaction: Transaction | None = None
    message: UUID | None = None
    parts: list[Part] = field(default_factory=list)
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
    last_error: OpenDataBufferError | None = None
    outcome: Durable | BaseException | None = None

    def age(self, now: Moment) -> float:
        """Return the seconds since its name was made, by the clock that says more (failure F5)."""
        return 0.0 if self.named is None else self.named.age_ms(now) / 1000

    def add(self, part: Part) -> None:
        """Add a request; or an open buffer, whose calls :meth:`close_buffer` counts."""
        if not self.parts or not _shares_range(part, self.parts[-1]):
            self.metadata_size += RANGE_BYTES + len(part.metadata)
        if isinstance(part, AppendBuffer):
            self.buffer = part
        else:
            self._count(part, 1)
            if part.alone:
                self.transaction, self.message = part.transaction, part.message
                # A message is identified by its clock, so a failed one does not hide later ones.
                self.ordered = part.message is None
        self.parts.append(part)

    def close_buffer(self) -> None:
        """Close the open buffer, if there is one, and count its items."""
        buffer = self.buffer
        if buffer is not None:
            buffer.close()
            self._count(buffer, buffer.calls)
            self.buffer = None

    def encode(self, compression: Compression, level: int) -> list[bytes | memoryview]:
        """Encode the batch, and set ``metadata``, ``count`` and ``size``.

        Args:
            compression: The compression of the record block.
            level: The compression level.

        Returns:
            The bytes of the object, in pieces.
        """
        ranges: list[Metadata] = []
        pieces: list[bytes | memoryview] = []
        records: list[bytes] = []  # From neighbouring buffers; encoded together.
        encoded = 0
        before: Part | None = None

        def encode_records() -> None:
            nonlocal encoded
            if records:
                pieces.append(encode_bytes(records))
                encoded += len(records)
                records.clear()

        for part in self.parts:
            if before is None or not _shares_range(part, before):
                start = encoded + len(records)
                ranges.append(Metadata(start, part.ingestion_time_ms, part.metadata))
            before = part
            if not part.pieces:
                records += part.items()  # type: ignore[arg-type]
            else:
                for item in part.items():
                    if type(item) is tuple:
                        encode_records()
                        pieces.append(item[0])
                        encoded += item[1]
                    else:
                        records.append(item)  # type: ignore[arg-type]
            if len(records) >= RECORDS_AT_ONCE:
                encode_records()
        encode_records()
        self.metadata, self.count = tuple(ranges), encoded
        self.size = sum(map(len, pieces))
        return seal_pieces(pieces, encoded, compression, level)

    def _count(self, part: Part, calls: int) -> None:
        self.size += part.size
        self.count += part.count
        self.held += part.held
        self.calls += calls


def _shares_range(part: Part, before: Part) -> bool:
    """Return whether one metadata range can stand for both parts."""
    return part.ingestion_time_ms == before.ingestion_time_ms and part.metadata == before.metadata


class Batcher:
    """Collects calls until a batch is full or old. The caller holds the lock.

    Args:
        config: The limits of a batch.
        completion: Makes the completion of a new batch.
    """

    def __init__(self, config: ProducerConfig, completion: Callable[[], Completion]) -> None:
        self._flush_interval = config.flush_interval_ms / 1000
        self._flush_size = config.flush_size_bytes
        self._max_size = config.max_batch_bytes
        self._completion = completion
        self.batches: deque[Batch] = deque()
        """The batches in produce order. All are sealed, except perhaps the last one."""
        self._last_due_at: float | None = None
        self.buffer = CLOSED  # The one that is open now.

    @property
    def due_at(self) -> float | None:
        """The time at which :meth:`take` has a batch; None without a batch."""
        if not self.batches:
            return None
        first = self.batches[0]
        return first.due_at if first.sealed_at is None else first.sealed_at

    @property
    def held(self) -> int:
        """How many of ``max_buffered_bytes`` wait here."""
        if not self.batches:
            return 0
        first, last = self.batches[0], self.batches[-1]
        in_buffer = 0 if last.buffer is None else last.buffer.held
        return last.held_before + last.held + in_buffer - first.held_before

    def add(self, request: ProduceRequest, now: float) -> Completion:
        """Put a request into the open batch, or into a new one.

        Args:
            request: The encoded call.
            now: The time in seconds, by the runtime's monotonic clock.

        Returns:
            The completion of its batch.
        """
        self._close_buffer()
        fitting = self._fitting(request.size, request.count, request.alone, now)
        batch = self._new(now) if fitting is None else fitting
        batch.add(request)
        if request.alone:
            batch.sealed_at = now
        if fitting is None:
            self._append(batch)
        self._seal_full(batch, now)
        return batch.completion

    def add_item(self, item: Item, time_ms: int, now: float, room: int) -> WriteHandle:
        """Put a call without metadata into a new buffer, which becomes the current one.

        Args:
            item: The records of the call.
            time_ms: The time of the buffer, in milliseconds since the Unix epoch.
            now: The monotonic time.
            room: How many of ``max_buffered_bytes`` are free.

        Returns:
            The handle of the buffer.
        """
        self._close_buffer()
        fitting = self._fitting(block_bytes(item), records_in(item), False, now)
        batch = self._new(now) if fitting is None else fitting
        # Until the buffer is closed, its held bytes stand for its bytes in the block. These are
        # fewer, so no limit is exceeded. A record holds more than four bytes, so the number of
        # records stays below its limit, too.
        limit = min(
            room,
            self._flush_size - batch.size,
            self._max_size - batch.size,
            4 * (MAX_RECORDS - batch.count),
        )
        handle = WriteHandle(batch.completion, time_ms)
        until = min(now + BUFFER_S, batch.due_at)
        buffer = AppendBuffer(item, time_ms, handle, max(limit, held_at_opening(item)), until)
        batch.add(buffer)
        if fitting is None:
            self._append(batch)
        if self._seal_full(batch, now):
            batch.close_buffer()
        else:
            self.buffer = buffer
        return handle

    def add_separator(self, now: float) -> None:
        """Put an empty batch after everything accepted so far."""
        self.seal(now)
        separator = self._new(now)
        separator.ordered = True
        separator.sealed_at = now
        self.batches.append(separator)

    def seal(self, now: float) -> None:
        """Close the open batch, however small it is."""
        self._close_buffer()
        batch = self._open()
        if batch is not None:
            batch.sealed_at = now

    def take(self, now: float) -> Batch | None:
        """Return the oldest sealed batch, or the open one if it is due; otherwise None."""
        if not self.batches:
            return None
        first = self.batches[0]
        if first.sealed_at is None:
            if now < first.due_at:
                return None
            self._close_buffer()
            first.sealed_at = now
        # An interrupted caller may have left its buffer open.
        first.close_buffer()
        return self.batches.popleft()

    def _close_buffer(self) -> None:
        """Make callers take the lock, and count the items in the buffer."""
        self.buffer = CLOSED
        if self.batches:
            self.batches[-1].close_buffer()

    def _fitting(self, size: int, count: int, alone: bool, now: float) -> Batch | None:
        """Return the open batch if the records fit into it. If they do not, seal it."""
        batch = self._open()
        if batch is not None and (
            alone or batch.size + size > self._max_size or batch.count + count > MAX_RECORDS
        ):
            batch.sealed_at = now
            return None
        return batch

    def _seal_full(self, batch: Batch, now: float) -> bool:
        """Seal the batch if it is full or due, and return whether it is sealed."""
        size = batch.size if batch.buffer is None else batch.size + batch.buffer.size
        if batch.sealed_at is None and (
            size > self._flush_size
            or batch.metadata_size > METADATA_FLUSH_BYTES
            # Check the age here, too: callers may come while the worker that keeps the time
            # waits for the lock (failure F32).
            or now >= batch.due_at
        ):
            batch.sealed_at = now
        return batch.sealed_at is not None

    def _open(self) -> Batch | None:
        last = self.batches[-1] if self.batches else None
        return last if last is not None and last.sealed_at is None else None

    def _new(self, now: float) -> Batch:
        batch = Batch(self._completion(), self._next_due_at(now))
        if self.batches:
            last = self.batches[-1]
            batch.held_before = last.held_before + last.held
        return batch

    def _append(self, batch: Batch) -> None:
        self._last_due_at = batch.due_at
        self.batches.append(batch)

    def _next_due_at(self, now: float) -> float:
        """Return when a batch that is opened now is due: after one interval.

        Under a steady load, it is one interval after the last batch was due. Otherwise the wait for
        the first call would be added to every interval.
        """
        last = self._last_due_at
        if last is not None and last <= now < last + self._flush_interval:
            return last + self._flush_interval
        return now + self._flush_interval
