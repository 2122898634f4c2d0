"""The fast way in: records that share a metadata range, with no lock, no copy and no handle each.

A producer that takes a record per call cannot afford, for each of them, what a call costs that
brings thousands: a lock, a clock or two, an encoded block, a handle. So the batcher opens a
:class:`Run` for what comes in the same millisecond, and callers put their records into it by one
``list.append``, which no other thread and no signal comes between. The lock is taken to open the
next run. Single records are joined when their batch is uploaded, by the thread that uploads it; a
list comes as one item, which its caller has encoded.

How nothing is lost, although a caller may be stopped just before its ``append`` while the run is
closed and uploaded::

    caller                                   batcher, with the lock held
    1  run = current.run                     a  current.run = CLOSED
    2  run.append(item)                      b  run.close(): what it has by now counts
    3  current.run is still run?

If it is, (a) has not happened, and (b) will see the item. If not, the caller takes the lock and
asks :meth:`Run.took_in`: the item lies among those that count, or behind them, and then it is
taken out and put into the next run. A caller that is interrupted between 2 and 3 does not know
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

__all__ = [
    "BlockBuilder",
    "CALL_BYTES",
    "CLOSED",
    "Call",
    "Current",
    "Item",
    "PIECE_HELD",
    "RECORD_HELD",
    "RUN_S",
    "Run",
    "block_bytes",
    "encode_entries",
    "encode_list",
    "held_at_opening",
    "records_in",
]


RUN_S = 0.001
"""How long a run is open: metadata tells times in milliseconds."""

RECORD_HELD = 64
"""What a record takes of the producer's budget beside its bytes: a Python object's head, and its
place in a list."""

PIECE_HELD = 128
"""What a piece takes beside its bytes: two objects, and their place in a list."""

RUN_HELD = 256
"""What a run takes beside its records: its objects."""

_PREFIX = 4
"""Bytes before each record of a block."""

Item = bytes | tuple[bytes | memoryview, int]
"""What one call brings: a record; or several as a piece of a record block, and how many they are.
Several are encoded by who brings them, who has just made them: they are in the processor's caches,
and one object is kept instead of each."""


class Run:
    """Calls of one millisecond, in produce order. Only :attr:`append` may be used without the lock.

    Args:
        first: The call it is opened for.
        ingestion_time_ms: Of all its records.
        handle: Of all its calls.
        budget: Bytes of the producer's budget that it may take; see :func:`held_at_opening`.
        until: When it takes no more, monotonic seconds.

    Attributes:
        left: What is left of the budget. Callers subtract what they bring, before they bring it.
        pieces: Calls that brought several records.
        more: Records beyond one of each call.
        metadata: Its calls have none.
    """

    __slots__ = (
        "_budget",
        "_closed_at",
        "_items",
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
        budget: int,
        until: float,
    ) -> None:
        self._items: list[Item] = [first]
        self._budget = budget
        self._closed_at: int | None = None
        self.append = self._items.append
        self.handle = handle
        self.ingestion_time_ms = ingestion_time_ms
        self.pieces = 1 if type(first) is tuple else 0
        self.more = records_in(first) - 1
        self.left = budget - held_at_opening(first)
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
        """Bytes of the producer's budget that it takes."""
        return self._budget - self.left

    @property
    def size(self) -> int:
        """Bytes of its records in a block, at most: of what came late, it counts them, too."""
        single = self.calls - self.pieces
        return self.held - RUN_HELD - PIECE_HELD * self.pieces - (RECORD_HELD - _PREFIX) * single

    def close(self) -> None:
        """What is in it by now counts, and nothing that comes later. With the lock held."""
        if self._closed_at is None:
            self._closed_at = len(self._items)

    def took_in(self, item: Item) -> bool:
        """Whether an item that was appended around the time of closing counts.

        With the lock held, once for each such item. One that does not count is gone.
        """
        self.close()
        for index in range(self.calls, len(self._items)):
            # By identity. If two callers brought the same object and one of them was late, it
            # does not matter which of the two brings it again.
            if self._items[index] is item:
                del self._items[index]
                return False
        return True

    def items(self) -> list[Item]:
        """All that count, in order; once it is closed."""
        return self._items if len(self._items) == self.calls else self._items[: self.calls]


def records_in(item: Item) -> int:
    """How many records the call brings."""
    return item[1] if type(item) is tuple else 1


def block_bytes(item: Item) -> int:
    """Bytes of the call's records in a block."""
    if type(item) is tuple:
        return len(item[0])
    return _PREFIX + len(item)


def held_at_opening(item: Item) -> int:
    """Bytes of the producer's budget that a run takes which is opened for this call."""
    beside = PIECE_HELD if type(item) is tuple else RECORD_HELD - _PREFIX
    return RUN_HELD + block_bytes(item) + beside


CLOSED = Run(b"", 0, None, 0, float("-inf"))
"""Takes nothing: callers come to the lock. Its time is over, and it has no bytes left."""


class Current:
    """Where callers find the run that is open now; replaced only with the lock held."""

    __slots__ = ("__weakref__", "run")

    def __init__(self) -> None:
        self.run = CLOSED


# ---- A record block from what callers brought: records, and pieces that they have encoded. ----


RECORDS_AT_ONCE = 16_384
"""Joined to one piece of a record block: a fifth faster than all of a batch at once, because what
is joined is still in the processor's caches when it is given its lengths."""

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
    # As they are now: another thread may change the list between two looks at it.
    records = tuple(entries)
    if set(map(type, records)) != _BYTES:
        return None
    return encode_bytes(records), len(records)


class BlockBuilder:
    """Puts the parts of a batch together, in order."""

    def __init__(self) -> None:
        self._pieces: list[bytes | memoryview] = []
        self._records: list[bytes] = []  # of neighbouring runs, joined in one go
        self._joined = 0

    @property
    def count(self) -> int:
        """Records so far."""
        return self._joined + len(self._records)

    def add(self, block: bytes | memoryview, count: int) -> None:
        """A piece that is encoded, and the number of its records."""
        self._join()
        self._pieces.append(block)
        self._joined += count

    def add_run(self, run: Run) -> None:
        """What came in while a run was open; it is closed."""
        items = run.items()
        if not run.pieces:
            self._records += items  # type: ignore[arg-type]
        else:
            for item in items:
                if type(item) is tuple:
                    self.add(*item)
                else:
                    self._records.append(item)  # type: ignore[arg-type]
        if len(self._records) >= RECORDS_AT_ONCE:
            self._join()

    def pieces(self) -> list[bytes | memoryview]:
        """The block, one piece behind the other."""
        self._join()
        return self._pieces

    def _join(self) -> None:
        if self._records:
            self._pieces.append(encode_bytes(self._records))
            self._joined += len(self._records)
            self._records = []


# ---- One ``produce()`` call on its way into a batch, as a value. ----


CALL_BYTES = 256
"""What a waiting call takes of the producer's budget beside its bytes: about what its objects
take of the process's memory."""


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
        """Bytes of the producer's budget that it takes (failure F33)."""
        return len(self.block) + len(self.metadata) + CALL_BYTES

    @property
    def size(self) -> int:
        """Bytes of its records in a block."""
        return len(self.block)
