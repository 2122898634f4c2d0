"""Where values stand in a run of bytes, many at a time. Pure.

A span is where one value stands: where it begins and how long it is. :mod:`.numbers` and
:mod:`.from_texts` make columns of spans.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Bytes", "Spans"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_PAD = 16
_MINUS = 0x2D
_WORD = np.dtype("<u8")


class Bytes:
    """Some bytes, to be looked at eight at a time from any place.

    Args:
        data: The bytes, which are copied.
        padded: The same with others behind them; nothing is copied then.

    Attributes:
        size: How many there are.
        at: The bytes, and others behind them.
        buffer: The same for Arrow.
    """

    def __init__(
        self, data: npt.NDArray[np.uint8], padded: npt.NDArray[np.uint8] | None = None
    ) -> None:
        if padded is None:
            padded = np.zeros(len(data) + _PAD, np.uint8)
            padded[: len(data)] = data
        self.size = len(data)
        self.at = padded
        # Words that overlap: the one at i begins with byte i.
        self._words = np.ndarray((len(data) + 8,), _WORD, padded.data, strides=(1,))
        self.buffer = pa.py_buffer(padded)

    @classmethod
    def within(cls, buffer: pa.Buffer | None, begin: int, end: int) -> Bytes:
        """A part of a buffer; copied only where too little of it lies behind that part."""
        if buffer is None:
            return cls(np.zeros(0, np.uint8))
        data = np.frombuffer(buffer, np.uint8)
        if end + _PAD > len(data):
            return cls(data[begin:end])
        return cls(data[begin:end], data[begin : end + _PAD])

    def word(self, at: Ints) -> npt.NDArray[np.uint64]:
        """The eight bytes from each place on, the first in the lowest bits."""
        found: npt.NDArray[np.uint64] = self._words[at]
        return found

    def are(self, at: Ints, text: bytes) -> Mask:
        """Whether this text stands at each place."""
        found: Mask | None = None
        for begin in range(0, len(text), 8):
            if len(text) >= 8:
                begin = min(begin, len(text) - 8)  # The last word overlaps the one before.
            piece = text[begin : begin + 8]
            word = self.word(at + begin if begin else at)
            if len(piece) < 8:
                word = word & np.uint64((1 << 8 * len(piece)) - 1)
            same = word == np.uint64(int.from_bytes(piece, "little"))
            found = same if found is None else found & same
        return np.ones(len(at), np.bool_) if found is None else found


# By the length of a text of up to twelve bytes: which bits of the first four, and of the rest.
_FIRST = np.array([(1 << 8 * min(size, 4)) - 1 for size in range(14)], np.uint64)
_REST = np.array([(1 << 8 * max(0, size - 4)) - 1 for size in range(13)] + [0], np.uint64)
_32 = np.uint64(32)


class Spans:
    """Where the values of one column stand, one for each row.

    Args:
        source: The bytes.
        begin: Where each value begins.
        length: Bytes of each.
        cut: The values, if they are cut out already.
    """

    def __init__(
        self, source: Bytes, begin: Ints, length: Ints, cut: pa.StringArray | None = None
    ) -> None:
        self.source = source
        self.begin = begin
        self.length = length
        self.head = source.word(begin)
        """The first eight bytes of each, and what comes behind shorter ones."""
        self._cut = cut

    def byte(self, number: int) -> npt.NDArray[np.uint64]:
        """One of the first eight bytes of each."""
        head = self.head >> np.uint64(8 * number) if number else self.head
        return head & np.uint64(0xFF)

    def first_digits(self) -> tuple[Mask, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Which begin with a minus, and the first two bytes behind that."""
        minus = self.byte(0) == _MINUS
        if not minus.any():
            return minus, self.byte(0), self.byte(1)
        return (
            minus,
            np.where(minus, self.byte(1), self.byte(0)),
            np.where(minus, self.byte(2), self.byte(1)),
        )

    def are(self, text: bytes) -> Mask:
        """Which values are this text of at most eight bytes."""
        bits = np.uint64((1 << 8 * len(text)) - 1)
        same: Mask = (self.head & bits) == np.uint64(int.from_bytes(text, "little"))
        same &= self.length == len(text)
        return same

    def texts(self, valid: Mask | None = None) -> pa.StringArray:
        """The bytes as they stand, which must be UTF-8; null where ``valid`` is not set."""
        length = self.length
        if valid is not None and valid.all():
            valid = None
        if self._cut is not None:
            if valid is None:
                return self._cut
            return pc.if_else(pa.array(valid), self._cut, pa.scalar(None, pa.string()))
        if valid is not None:
            length = np.where(valid, length, 0)
        if not VIEWS:
            return self._gathered(length, valid)
        # Views of 16 bytes, as Arrow lays them out: short texts are held, long ones pointed to.
        views = np.empty((len(length), 2), _WORD)
        size = np.minimum(length, 13)
        views[:, 0] = length.astype(np.uint64) | (self.head & _FIRST[size]) << _32
        longest = int(length.max(initial=0))
        if longest > 4:
            held = self.source.word(self.begin + 4) & _REST[size]
            if longest > 12:
                held = np.where(length > 12, self.begin.astype(np.uint64) << _32, held)
            views[:, 1] = held
        else:
            views[:, 1] = 0
        array = pa.Array.from_buffers(
            pa.string_view(), len(length), [_bitmap(valid), pa.py_buffer(views), self.source.buffer]
        )
        return array.cast(pa.string())

    def _gathered(self, length: Ints, valid: Mask | None) -> pa.StringArray:
        """The same byte by byte, for an Arrow that does not take views."""
        offsets = np.zeros(len(length) + 1, np.int32)
        np.cumsum(length, out=offsets[1:])
        places = np.repeat(self.begin - offsets[:-1], length) + np.arange(offsets[-1])
        data = np.ascontiguousarray(self.source.at[places])
        return pa.Array.from_buffers(
            pa.string(), len(length), [_bitmap(valid), pa.py_buffer(offsets), pa.py_buffer(data)]
        )


def _takes_views() -> bool:
    """Whether this Arrow makes strings of views; it was learnt after version 18."""
    try:
        none = pa.py_buffer(np.zeros((1, 2), _WORD))
        views = pa.Array.from_buffers(pa.string_view(), 1, [None, none, pa.py_buffer(b"")])
        return bool(views.cast(pa.string()).to_pylist() == [""])
    except (ValueError, pa.ArrowException):
        return False


VIEWS = _takes_views()


def _bitmap(valid: Mask | None) -> pa.Buffer | None:
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))
