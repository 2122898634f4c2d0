"""Records in a row as bytes, and where their quotes are."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opendata_buffer.values.spans import Bytes

__all__ = ["Records"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_QUOTE = 0x22
_ESCAPE = 0x5C
_SPACE = 0x20
_MOST_SPACES = 1000
_MOST_BYTES = 1 << 20


class Records:
    """Some records in a row, and where their quotes are.

    Args:
        values: The records, of type ``pa.binary()`` and without nulls.

    Attributes:
        source: Their bytes.
        begin: Where each begins.
        end: Where each ends.
        quotes: Where the quotes of all are.
        first_quote: For each record the index of its first one in ``quotes``.
        quote_count: How many each has.
        plain: Which records may be cut at their quotes.
    """

    def __init__(self, values: pa.BinaryArray) -> None:
        stored = np.frombuffer(values.buffers()[1], np.int32)
        offsets = stored[values.offset : values.offset + len(values) + 1].astype(np.int64)
        self.source = Bytes.within(values.buffers()[2], int(offsets[0]), int(offsets[-1]))
        raw = self.source.at[: self.source.size]
        offsets -= offsets[0]
        self.begin: Ints = offsets[:-1]
        self.end: Ints = offsets[1:]
        found = raw == _QUOTE
        self.quotes: Ints = np.flatnonzero(found)
        edges = np.searchsorted(self.quotes, offsets)
        self.first_quote: Ints = edges[:-1]
        self.quote_count: Ints = np.diff(edges)
        self.plain: Mask = (self.quote_count > 0) & (self.end - self.begin <= _MOST_BYTES)
        # Memory that a cache still has takes less time than memory of its own.
        self._exclude(np.equal(raw, _ESCAPE, out=found))
        if len(raw) and raw.min() < _SPACE:
            self._exclude(np.less(raw, _SPACE, out=found))

    def _exclude(self, odd: Mask) -> None:
        """Records with such bytes are not plain."""
        if odd.any():
            places = np.flatnonzero(odd)
            self.plain[np.searchsorted(self.begin, places, "right") - 1] = False

    @cached_property
    def trimmed(self) -> Ints:
        """Where each ends without the spaces at its end, up to a thousand."""
        end, rows = self.end.copy(), np.arange(len(self.end))
        for step in (8, 1):  # Eight at a time, then what is left of them.
            spaces = np.uint64(int.from_bytes(b" " * step, "little"))
            bits = np.uint64((1 << 8 * step) - 1)
            left = rows
            for _ in range(_MOST_SPACES // step):
                left = left[end[left] - step >= self.begin[left]]
                left = left[self.source.word(end[left] - step) & bits == spaces]
                if not len(left):
                    break
                end[left] -= step
        return end
