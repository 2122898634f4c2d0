"""Rows as plain values that can be compared, whoever read them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

__all__ = ["differences", "plain"]


def differences(records: list[bytes], theirs: pa.Table, ours: pa.Table) -> list[str]:
    """Each value that is another one here, as a sentence."""
    found = []
    for name in ours.column_names:
        text = pa.types.is_string(ours.schema.field(name).type)
        pairs = zip(records, plain(theirs[name], text), plain(ours[name], text), strict=True)
        found += [
            f"{record!r}: {name} is {other!r} to Spark and {own!r} here"
            for record, other, own in pairs
            if other != own
        ]
    return found


def plain(array: pa.Array | pa.ChunkedArray, text: bool = False) -> list[Any]:
    """The values of a column, so that what is not equal looks different.

    Times are integers, a map is what looking up its keys gives, and of numbers the sign of zero
    counts; NaN equals itself.

    Args:
        array: The column.
        text: Whether it is of strings, which from Spark may be any bytes.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    types = pa.types
    if types.is_timestamp(array.type):
        return array.cast(pa.int64()).to_pylist()
    if types.is_date(array.type):
        return array.cast(pa.int32()).to_pylist()
    if text or types.is_string(array.type):
        texts = array.cast(pa.binary()).to_pylist()
        return [None if each is None else each.decode("utf-8", "replace") for each in texts]
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
