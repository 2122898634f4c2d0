"""The path of a record into an open batch: no lock, no copy and no handle for each record.

A lock, two clocks, an encoded block and a handle for each ``produce()`` call would cost a call
with one record many times what its record costs. So the :class:`~.batching.Batcher` opens an
:class:`AppendBuffer` for the calls of one millisecond, and callers add to it by one
``list.append``, which neither another thread nor a signal interrupts. Only the call that opens the
next buffer takes the lock. Single records are joined when their batch is uploaded, by the uploading
thread; a list of records comes as one item that its caller has encoded.

A caller may be stopped just before its ``append`` while the buffer is closed and uploaded. Its
record is not lost::

    caller                                   batcher, with the lock held
    1  buffer = current.buffer               a  current.buffer = CLOSED
    2  buffer.append(item)                   b  buffer.close(): the items in it by now count
    3  current.buffer is still buffer?

If it is, (a) has not happened, and (b) will see the item. If not, the caller takes the lock and
calls :meth:`AppendBuffer.was_included`: an item behind those that count is taken out, and the
caller puts it into the next buffer. A caller that is interrupted between 2 and 3 does not know
whether its record was accepted; nor does it after any other exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pyarrow as pa

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.arrow import encode_arrow_block, encode_bytes
from opendata_buffer.formats.batch import encode_block
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.producer.handle import WriteHandle

BUFFER_S = 0.001
"""How long a buffer is open: metadata has times in milliseconds."""

RECORD_HELD = 64
"""What a record takes of ``max_buffered_bytes`` beside its bytes: a Python object's head, and its
place in a list."""

PIECE_HELD = 128
"""What a piece takes beside its bytes: two objects, and their place in a list."""

BUFFER_HELD = 256
"""What an append buffer takes beside its items: its objects."""

REQUEST_HELD = 256
"""What a produce request takes beside its bytes: about the memory of its objects."""

_PREFIX = 4
"""Bytes before each record of a block."""

Item = bytes | tuple[bytes | memoryview, int]
"""What one call adds to a buffer: a record; or a piece, several records encoded as part of a record
block with their number. The caller encodes them because it has just made them: they are in the
processor's caches, and one object is kept instead of each."""


class AppendBuffer:
    """Items of one millisecond in produce order. Only :attr:`append` is used without the lock.

    Args:
        first: The item it is opened for.
        ingestion_time_ms: Of all its records.
        handle: Of all its calls.
        limit: Bytes of ``max_buffered_bytes`` that it may take; see :func:`held_at_opening`.
        until: When it takes no more, monotonic seconds.

    Attributes:
        left: Bytes left of the limit. Callers subtract the size of an item before they append it.
        pieces: Items that are pieces.
        more: Records beyond one of each item.
        metadata: Its calls have none.
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
        self.more = records_in(first) - 1
        self.left = limit - held_at_opening(first)
        self.until = until

    @property
    def calls(self) -> int:
        """Calls in it."""
        return len(self._items) if self._closed_at is None else self._closed_at

    @property
    def count(self) -> int:
        """Records in it."""
        return self.calls + self.more

    @property
    def held(self) -> int:
        """Bytes of ``max_buffered_bytes`` that it takes."""
        return self._limit - self.left

    @property
    def size(self) -> int:
        """Bytes of its records in a block, at most: items that came too late are included."""
        single = self.calls - self.pieces
        return self.held - BUFFER_HELD - PIECE_HELD * self.pieces - (RECORD_HELD - _PREFIX) * single

    def close(self) -> None:
        """The items in it by now count, later ones do not. With the lock held."""
        if self._closed_at is None:
            self._closed_at = len(self._items)

    def was_included(self, item: Item) -> bool:
        """Whether an item that was appended around the time of closing counts.

        With the lock held, once for each such item. An item that does not count is removed.
        """
        self.close()
        for index in range(self.calls, len(self._items)):
            # By identity. If two callers appended the same object and one was late, either of
            # them may append it again.
            if self._items[index] is item:
                del self._items[index]
                return False
        return True

    def items(self) -> list[Item]:
        """All that count, in order; once it is closed."""
        # A copy: a thread that came too late may still add an item to the list, and takes it back.
        return self._items[: self.calls]


def records_in(item: Item) -> int:
    """How many records the item has."""
    return item[1] if type(item) is tuple else 1


def block_bytes(item: Item) -> int:
    """Bytes of the item's records in a block."""
    return len(item[0]) if type(item) is tuple else _PREFIX + len(item)


def held_at_opening(item: Item) -> int:
    """Bytes of ``max_buffered_bytes`` that a buffer takes which is opened for this item."""
    beside = PIECE_HELD if type(item) is tuple else RECORD_HELD - _PREFIX
    return BUFFER_HELD + block_bytes(item) + beside


CLOSED = AppendBuffer(b"", 0, None, 0, float("-inf"))
"""Takes nothing, so callers take the lock: its time is over, and it has no bytes left."""


class CurrentBuffer:
    """Holds the buffer that is open now; it is replaced only with the lock held."""

    __slots__ = ("__weakref__", "buffer")

    def __init__(self) -> None:
        self.buffer = CLOSED


@dataclass(slots=True, eq=False)
class ProduceRequest:
    """One ``produce()`` call, encoded: of those that need more than a place in a buffer.

    Attributes:
        block: Its entries as a piece of a record block.
        count: How many entries.
        metadata: The caller's metadata payload.
        ingestion_time_ms: When the call was made, milliseconds since the Unix epoch.
        transaction: The transaction it belongs to; it then has a batch of its own.
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
        """Bytes of ``max_buffered_bytes`` that it takes (failure F33)."""
        return len(self.block) + len(self.metadata) + REQUEST_HELD

    @property
    def size(self) -> int:
        """Bytes of its records in a block."""
        return len(self.block)


RECORDS_AT_ONCE = 16_384
"""Joined to one piece of a record block: a fifth faster than all of a batch at once, because the
records are still in the processor's caches when they get their length prefixes."""

_BYTES = {bytes}


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
    return encode_list(taken) or (encode_block(taken), len(taken))


def encode_list(entries: Sequence[Any]) -> tuple[bytes | memoryview, int] | None:
    """As :func:`encode_entries`, of a list or tuple that holds nothing but ``bytes``; or None."""
    # A copy: another thread may change the list between the check and the encoding.
    records = tuple(entries)
    if set(map(type, records)) != _BYTES:
        return None
    return encode_bytes(records), len(records)


class RecordEncoder:
    """Puts the parts of a batch together to a record block, in order."""

    def __init__(self) -> None:
        self._pieces: list[bytes | memoryview] = []
        self._records: list[bytes] = []  # of neighbouring buffers, encoded together
        self._encoded = 0

    @property
    def count(self) -> int:
        """Records so far."""
        return self._encoded + len(self._records)

    def add(self, block: bytes | memoryview, count: int) -> None:
        """Add a piece that is encoded, and the number of its records."""
        self._encode()
        self._pieces.append(block)
        self._encoded += count

    def add_buffer(self, buffer: AppendBuffer) -> None:
        """Add the items of a closed buffer."""
        items = buffer.items()
        if not buffer.pieces:
            self._records += items  # type: ignore[arg-type]
        else:
            for item in items:
                if type(item) is tuple:
                    self.add(*item)
                else:
                    self._records.append(item)  # type: ignore[arg-type]
        if len(self._records) >= RECORDS_AT_ONCE:
            self._encode()

    def pieces(self) -> list[bytes | memoryview]:
        """The block, one piece behind the other."""
        self._encode()
        return self._pieces

    def _encode(self) -> None:
        if self._records:
            self._pieces.append(encode_bytes(self._records))
            self._encoded += len(self._records)
            self._records = []
