"""Columns of values that records have as strings: times, decimals, bytes. Pure."""

from __future__ import annotations

from datetime import UTC

import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.values.found import Found, one_by_one
from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.scalars import (
    base64_bytes,
    date_reader,
    decimal_of,
    timestamp_reader,
)

__all__ = ["from_texts"]

_LOCAL = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
_ZONED = rf"{_LOCAL}(?:Z|[+-](?:0[0-9]|1[0-7]):?[0-5][0-9])$"


def from_texts(texts: pa.StringArray, dtype: pa.DataType, options: ValueOptions) -> Found:
    """Values that a record has as strings; texts must have no nulls that stand for doubt."""
    types = pa.types
    if types.is_string(dtype):
        return Found(texts)
    if types.is_timestamp(dtype) or types.is_date(dtype):
        return _times(texts, dtype, options)
    if types.is_decimal(dtype):
        return one_by_one(texts, dtype, lambda text: decimal_of(text, dtype.precision, dtype.scale))
    assert types.is_binary(dtype), dtype
    return one_by_one(texts, dtype, base64_bytes)


def _times(texts: pa.StringArray, dtype: pa.DataType, options: ValueOptions) -> Found:
    """Dates and timestamps: in bulk as ISO 8601 has them, else one by one."""
    if pa.types.is_date(dtype):
        if options.date_format in ("", "yyyy-MM-dd"):
            try:
                return Found(texts.cast(dtype))
            except pa.ArrowInvalid:
                pass
        return one_by_one(texts, dtype, date_reader(options))
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
            others = one_by_one(rest, dtype, timestamp_reader(dtype, options))
            return Found(pc.coalesce(array, others.array), others.doubtful)
    return one_by_one(texts, dtype, timestamp_reader(dtype, options))


def _plain(texts: pa.StringArray, zoned: bool) -> bool:
    """Whether all have seconds; of zones only Z: of others Arrow takes more than Spark does."""
    length = pc.min_max(pc.binary_length(texts)).as_py()
    if length["min"] is None:
        return True
    if not zoned:
        return bool(length["min"] >= 19)
    return bool(length["min"] >= 20 and pc.all(pc.ends_with(texts, "Z")).as_py())
