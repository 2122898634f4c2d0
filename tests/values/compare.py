"""Rows as plain values that can be compared, whoever read them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

__all__ = ["plain"]


def plain(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of a column, so that what is not equal looks different.

    Times are integers, a map is what looking up its keys gives, and of numbers the sign of zero
    counts; NaN equals itself.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    types = pa.types
    if types.is_timestamp(array.type):
        return array.cast(pa.int64()).to_pylist()
    if types.is_date(array.type):
        return array.cast(pa.int32()).to_pylist()
    return [_plain(each) for each in array.to_pylist()]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(each, tuple) for each in value):
            return {key: _plain(each) for key, each in value}
        return [_plain(each) for each in value]
    return value
