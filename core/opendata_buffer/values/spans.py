"""Arrow columns from places in a run of bytes, many values at a time. Pure.

A span is where one value stands: where it begins and how long it is. What numbers, words and times
look like is checked for all spans at once, and only what surely means to Spark what it means to
Arrow becomes a value; each function says which spans are *doubtful*, and those are null.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.scalars import (
    Unfit,
    base64_bytes,
    date_reader,
    decimal_of,
    timestamp_reader,
)

__all__ = ["Bytes", "Found", "Spans", "bare", "decimals", "doubles", "from_texts", "longs", "times"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_PAD = 16
_MINUS = 0x2D
_WORD = np.dtype("<u8")
_INT = r"^-?(?:0|[1-9][0-9]{0,17})$"
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"
_LOCAL = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
_ZONED = rf"{_LOCAL}(?:Z|[+-](?:0[0-9]|1[0-7]):?[0-5][0-9])$"


@dataclass(frozen=True, slots=True)
class Found:
    """A column, and where it is not to be trusted.

    Attributes:
        array: The values; null where there is none and where one is doubtful.
        doubtful: True where Spark may read another value, or call it malformed; None: nowhere.
    """

    array: pa.Array
    doubtful: Mask | None = None


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


def bare(spans: Spans, dtype: pa.DataType) -> Found:
    """Values that stand without quotes: numbers, ``true``, ``false`` and ``null``."""
    types = pa.types
    null = spans.are(b"null")
    if types.is_boolean(dtype):
        true, false = spans.are(b"true"), spans.are(b"false")
        return Found(pa.array(true, mask=~(true | false)), _any(~(true | false | null)))
    if types.is_signed_integer(dtype):
        return longs(spans, null, dtype)
    if types.is_floating(dtype):
        return doubles(spans, null, dtype)
    if types.is_decimal(dtype):
        return decimals(spans, null, dtype)
    return Found(pa.nulls(len(null), dtype), _any(~null))


def longs(spans: Spans, null: Mask, dtype: pa.DataType) -> Found:
    """Integers in the spelling of JSON, of at most 18 digits."""
    sign, first, _ = spans.first_digits()
    digits = spans.length - sign
    good = (first >= 0x30) & (first <= 0x39) & (digits > 0) & (digits <= 18)
    good &= (first != 0x30) | (digits == 1)
    texts = spans.texts(good & ~null)
    wide, wrong = _cast(texts, pa.int64(), _INT)
    doubtful = ~(good | null) | wrong
    if dtype.bit_width < 64:
        values = wide.fill_null(0).to_numpy(zero_copy_only=False)
        most = (1 << (dtype.bit_width - 1)) - 1
        over = (values > most) | (values < -most - 1)
        if over.any():
            doubtful |= over
            wide = pc.if_else(pa.array(over), pa.scalar(None, pa.int64()), wide)
        wide = wide.cast(dtype)
    return Found(wide, _any(doubtful))


def doubles(spans: Spans, null: Mask, dtype: pa.DataType) -> Found:
    """Numbers in the spelling of JSON."""
    good = _looks_like_number(spans) & ~null
    texts = spans.texts(good)
    lowered = _data(texts).lower()
    exponents = b"e" in lowered and b".e" in lowered
    wide, wrong = _cast(texts, pa.float64(), _NUMBER, sure=not exponents)
    values = wide.fill_null(1).to_numpy(zero_copy_only=False)
    # -0 is 0 where it is an integer, and beyond the largest number is no business of ours.
    wrong |= ((values == 0) & (np.signbit(values))) | ~np.isfinite(values)
    if pa.types.is_float32(dtype):
        wrong |= halfway(values)
        with np.errstate(over="ignore"):
            wide = pa.array(values.astype(np.float32), mask=_nulls(wide))
    return Found(wide, _any(~(good | null) | wrong))


def _data(texts: pa.StringArray) -> bytes:
    """The bytes of all texts, without what the array has beside them."""
    data = texts.buffers()[2]
    if data is None:
        return b""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :]
    begin, end = int(offsets[0]), int(offsets[len(texts)])
    return bytes(data.slice(begin, end - begin))


def halfway(values: npt.NDArray[np.float64]) -> Mask:
    """Which numbers of 64 bits lie in the middle between two of 32, and what is too small to tell.

    Rounded twice, from text to 64 bits and on to 32, these may end at the wrong one.
    """
    bits = values.view(np.uint64) & np.uint64((1 << 29) - 1)
    middle: Mask = (bits == np.uint64(1 << 28)) | ((values != 0) & (np.abs(values) < 1.2e-38))
    return middle


def decimals(spans: Spans, null: Mask, dtype: pa.DataType) -> Found:
    """Numbers in the spelling of JSON, exactly."""
    good = _looks_like_number(spans) & ~null
    texts = spans.texts(good)
    regular = pc.match_substring_regex(texts, _NUMBER).fill_null(False)
    wrong = good & ~regular.to_numpy(zero_copy_only=False)
    if not wrong.any():
        try:
            return Found(texts.cast(dtype), _any(~(good | null)))
        except pa.ArrowInvalid:
            pass  # Something is to be rounded, or too long.
    found, unfit = _one_by_one(
        texts, dtype, lambda text: decimal_of(text, dtype.precision, dtype.scale)
    )
    return Found(found, _any(~(good | null) | wrong | unfit))


def from_texts(texts: pa.StringArray, dtype: pa.DataType, options: ValueOptions) -> Found:
    """Values that a record has as strings; texts must have no nulls that stand for doubt."""
    types = pa.types
    if types.is_string(dtype):
        return Found(texts)
    if types.is_timestamp(dtype) or types.is_date(dtype):
        return times(texts, dtype, options)
    if types.is_decimal(dtype):
        found, unfit = _one_by_one(
            texts, dtype, lambda text: decimal_of(text, dtype.precision, dtype.scale)
        )
        return Found(found, _any(unfit))
    assert types.is_binary(dtype), dtype
    found, unfit = _one_by_one(texts, dtype, base64_bytes)
    return Found(found, _any(unfit))


def times(texts: pa.StringArray, dtype: pa.DataType, options: ValueOptions) -> Found:
    """Dates and timestamps: in bulk as ISO 8601 has them, else one by one."""
    if pa.types.is_date(dtype):
        if options.date_format in ("", "yyyy-MM-dd"):
            try:
                return Found(texts.cast(dtype))
            except pa.ArrowInvalid:
                pass
        found, unfit = _one_by_one(texts, dtype, date_reader(options))
        return Found(found, _any(unfit))
    zoned = dtype.tz is not None
    given = options.pattern("timestampFormat" if zoned else "timestampNTZFormat") is not None
    if not given:
        try:
            array = texts.cast(dtype)
        except pa.ArrowInvalid:
            array = None
        if array is not None and _plain(texts, zoned):
            return Found(array)
        if zoned and options.zone is UTC:
            local = pc.match_substring_regex(texts, f"{_LOCAL}$")
            texts = pc.if_else(local, pc.binary_join_element_wise(texts, "Z", ""), texts)
        regular = pc.match_substring_regex(texts, _ZONED if zoned else f"{_LOCAL}$")
        some = pc.if_else(regular, texts, pa.scalar(None, pa.string()))
        try:
            array = some.cast(dtype)
        except pa.ArrowInvalid:
            array = None  # The 30th of February.
        if array is not None:
            if array.null_count == texts.null_count:
                return Found(array)
            rest = pc.if_else(regular, pa.scalar(None, pa.string()), texts)
            others, unfit = _one_by_one(rest, dtype, timestamp_reader(dtype, options))
            return Found(pc.coalesce(array, others), _any(unfit))
    found, unfit = _one_by_one(texts, dtype, timestamp_reader(dtype, options))
    return Found(found, _any(unfit))


def _plain(texts: pa.StringArray, zoned: bool) -> bool:
    """Whether all have seconds; of zones only Z: of others Arrow takes more than Spark does."""
    length = pc.min_max(pc.binary_length(texts)).as_py()
    if length["min"] is None:
        return True
    if not zoned:
        return bool(length["min"] >= 19)
    return bool(length["min"] >= 20 and pc.all(pc.ends_with(texts, "Z")).as_py())


def _looks_like_number(spans: Spans) -> Mask:
    """Begins and ends with a digit, but for a sign, and has no leading zero."""
    sign, first, second = spans.first_digits()
    last = spans.source.at[spans.begin + spans.length - 1]
    good: Mask = (spans.length > sign) & (first >= 0x30) & (first <= 0x39)
    good &= (last >= 0x30) & (last <= 0x39) & (spans.length < 1000)
    leading = (first == 0x30) & (spans.length - sign > 1) & (second >= 0x30) & (second <= 0x39)
    good &= ~leading
    return good


def _cast(
    texts: pa.StringArray, dtype: pa.DataType, regular: str, *, sure: bool = True
) -> tuple[pa.Array, Mask]:
    """The values, and which texts are none; ``sure``: what Arrow takes is one."""
    if sure:
        try:
            return texts.cast(dtype), np.zeros(len(texts), np.bool_)
        except pa.ArrowInvalid:
            pass
    fits = pc.match_substring_regex(texts, regular)
    wrong = np.array(pc.invert(fits).fill_null(False))
    return pc.if_else(fits, texts, pa.scalar(None, pa.string())).cast(dtype), wrong


def _one_by_one(
    texts: pa.StringArray, dtype: pa.DataType, read: Callable[[str], Any]
) -> tuple[pa.Array, Mask]:
    unfit = np.zeros(len(texts), np.bool_)
    values: list[Any] = []
    known: dict[str, Any] = {}  # Times repeat, and reading one takes microseconds.
    for at, text in enumerate(texts.to_pylist()):
        value = None
        if text is not None:
            try:
                value = known[text] if text in known else known.setdefault(text, read(text))
            except Unfit:
                unfit[at] = True
        values.append(value)
    return pa.array(values, dtype), unfit


def _bitmap(valid: Mask | None) -> pa.Buffer | None:
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _nulls(array: pa.Array) -> Mask | None:
    if not array.null_count:
        return None
    nulls: Mask = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _any(doubtful: Mask) -> Mask | None:
    return doubtful if doubtful.any() else None
