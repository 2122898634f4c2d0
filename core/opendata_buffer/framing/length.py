"""Records with their length in front: ``u32`` little-endian, then that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing.splitter import broken, too_large

__all__ = ["LengthSplitter", "join_length"]

_LENGTH = struct.Struct("<I")


class LengthSplitter:
    """Cuts a stream of length-prefixed records.

    Args:
        max_bytes: Largest record; a length above it is refused before memory is taken for it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._record = 1
        self._begin = 0
        self._error: InvalidInput | None = None

    def feed(self, chunk: bytes) -> list[bytes]:
        """The records that ``chunk`` completes."""
        self._raise()
        self._held += chunk
        records: list[bytes] = []
        at = 0
        with memoryview(self._held) as held:
            while len(held) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(held, at)
                if size > self._max_bytes:
                    self._error = too_large(self._record, self._begin, size, self._max_bytes)
                    break
                end = at + _LENGTH.size + size
                if end > len(held):
                    break
                records.append(bytes(held[at + _LENGTH.size : end]))
                self._record += 1
                self._begin += end - at
                at = end
        del self._held[:at]
        return records

    def finish(self) -> list[bytes]:
        """Nothing, where the stream ends between two records."""
        self._raise()
        if self._held:
            raise broken(
                self._record,
                self._begin,
                f"the input ends {len(self._held)} bytes into the record and its length",
            )
        return []

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def join_length(records: Iterable[bytes]) -> bytes:
    """The records, each behind its length."""
    pieces: list[bytes] = []
    for record in records:
        pieces += (_LENGTH.pack(len(record)), record)
    return b"".join(pieces)
