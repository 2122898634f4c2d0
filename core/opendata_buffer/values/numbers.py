"""Columns of numbers and words from where they stand, many values at a time. Pure.

What surely means to Spark what it means to Arrow becomes a value; what does not is doubtful.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.values.found import Found, one_by_one
from opendata_buffer.values.scalars import decimal_of
from opendata_buffer.values.spans import Spans

__all__ = ["bare", "decimals", "doubles", "floats", "longs"]

Mask = npt.NDArray[np.bool_]

_INT = r"^-?(?:0|[1-9][0-9]{0,17})$"
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"


def bare(spans: Spans, dtype: pa.DataType) -> Found:
    """Values that stand without quotes: numbers, ``true``, ``false`` and ``null``."""
    types = pa.types
    null = spans.are(b"null")
    if types.is_boolean(dtype):
        true, false = spans.are(b"true"), spans.are(b"false")
        return Found.of(pa.array(true, mask=~(true | false)), ~(true | false | null))
    if types.is_signed_integer(dtype):
        return longs(spans, null, dtype)
    if types.is_floating(dtype):
        return doubles(spans, null, dtype)
    if types.is_decimal(dtype):
        return decimals(spans, null, dtype)
    return Found.of(pa.nulls(len(null), dtype), ~null)


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
    return Found.of(wide, doubtful)


def doubles(spans: Spans, null: Mask, dtype: pa.DataType) -> Found:
    """Numbers in the spelling of JSON."""
    good = _looks_like_number(spans) & ~null
    texts = spans.texts(good)
    lowered = _data(texts).lower()
    exponents = b"e" in lowered and b".e" in lowered
    wide, wrong = _cast(texts, pa.float64(), _NUMBER, sure=not exponents)
    found = floats(wide, dtype)
    if found.doubtful is not None:
        wrong |= found.doubtful
    return Found.of(found.array, ~(good | null) | wrong)


def floats(wide: pa.DoubleArray, dtype: pa.DataType) -> Found:
    """Numbers of 64 bits as a column of 64 or of 32; doubtful where Spark has other ones."""
    values = wide.fill_null(1).to_numpy(zero_copy_only=False)
    # -0 is 0 where it is an integer, and beyond the largest number is no business of ours.
    wrong = ((values == 0) & np.signbit(values)) | ~np.isfinite(values)
    if pa.types.is_float32(dtype):
        wrong |= _halfway(values)
        with np.errstate(over="ignore"):
            wide = pa.array(values.astype(np.float32), mask=_nulls(wide))
    return Found.of(wide, wrong)


def _halfway(values: npt.NDArray[np.float64]) -> Mask:
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
            return Found.of(texts.cast(dtype), ~(good | null))
        except pa.ArrowInvalid:
            pass  # Something is to be rounded, or too long.
    found = one_by_one(texts, dtype, lambda text: decimal_of(text, dtype.precision, dtype.scale))
    if found.doubtful is not None:
        wrong |= found.doubtful
    return Found.of(found.array, ~(good | null) | wrong)


def _looks_like_number(spans: Spans) -> Mask:
    """Begins and ends with a digit, but for a sign, and has no leading zero."""
    sign, first, second = spans.first_digits()
    last = spans.source.at[spans.begin + spans.length - 1]
    good: Mask = (spans.length > sign) & (first >= 0x30) & (first <= 0x39)
    good &= (last >= 0x30) & (last <= 0x39) & (spans.length < 1000)
    leading = (first == 0x30) & (spans.length - sign > 1) & (second >= 0x30) & (second <= 0x39)
    good &= ~leading
    return good


def _data(texts: pa.StringArray) -> bytes:
    """The bytes of all texts, without what the array has beside them."""
    data = texts.buffers()[2]
    if data is None:
        return b""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :]
    begin, end = int(offsets[0]), int(offsets[len(texts)])
    return bytes(data.slice(begin, end - begin))


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


def _nulls(array: pa.Array) -> Mask | None:
    if not array.null_count:
        return None
    nulls: Mask = array.is_null().to_numpy(zero_copy_only=False)
    return nulls
