"""A record block from what callers brought: records, and pieces that they have encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import encode_block, encode_bytes
from opendata_buffer.producer.run import Run

__all__ = ["BlockBuilder", "encode_entries", "encode_list"]

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
    return encode_block(taken), len(taken)


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
