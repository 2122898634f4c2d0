"""Say which field of a malformed record does not fit, for errors and logs.

Arrow's readers reject a text in their own words, such as ``Column(/n) changed from string to
number``. :func:`explain_json` finds the field by reading it again alone, and names the type in the
schema and the value in the record::

    field 'address.zip' must be STRING, and is the number 8001

This costs a few reads for each field, so it is done only for the one record that an error or a log
names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

_MOST_CHARACTERS = 40
"""Characters of a value that are shown."""

_MOST_ELEMENTS = 100
"""Elements of an array that are read again to find the one that does not fit."""

_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "BYTE",
    pa.int16(): "SHORT",
    pa.int32(): "INT",
    pa.int64(): "LONG",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.binary(): "BINARY in base64",
    pa.date32(): "DATE",
    pa.timestamp("us"): "TIMESTAMP_NTZ, without an offset",
    pa.timestamp("us", "UTC"): "TIMESTAMP, with an offset such as Z",
}

_OF_CSV = re.compile(
    r"In CSV column #(\d+): CSV conversion error to .*?: invalid value '(.*)'", re.S
)
_COUNT_OF_CSV = re.compile(r"Expected (\d+) columns, got (\d+)")

Fits = Callable[[Any, pa.DataType], bool]
"""Returns whether a value of JSON can be read into a column of the type."""


class _Twice(ValueError):
    """An object has a name twice."""


def explain_json(record: bytes, fields: Sequence[pa.Field], reason: str, fits: Fits) -> str:
    """Return why a JSON record does not fit the columns.

    Args:
        record: The record.
        fields: The columns.
        reason: What Arrow's reader said.
        fits: Reads one value.

    Returns:
        The first field that does not fit, with the type of its column and its value; ``reason`` if
        the record is not one JSON object, or if each field fits alone.
    """
    try:
        found = json.loads(record, object_pairs_hook=_object)
    except _Twice as error:
        return str(error)
    except (ValueError, RecursionError):
        return reason
    if not isinstance(found, dict):
        return reason
    for field in fields:
        if field.name in found:
            misfit = _misfit(field.name, found[field.name], field.type, fits)
            if misfit is not None:
                return misfit
    return reason


def explain_csv(fields: Sequence[pa.Field], reason: str) -> str:
    """Return why a line of CSV does not fit the columns.

    Args:
        fields: The columns.
        reason: What Arrow's reader said.

    Returns:
        The field with the type of its column and its text, or the number of fields; ``reason`` if
        it is about neither.
    """
    if (found := _OF_CSV.search(reason)) is not None and int(found[1]) < len(fields):
        return misfit_of(fields[int(found[1])], found[2])
    if (found := _COUNT_OF_CSV.search(reason)) is not None:
        return f"it has {found[2]} fields, and the schema has {found[1]} columns"
    return reason


def misfit_of(field: pa.Field, text: str) -> str:
    """Return the reason for a field of a line of CSV whose text does not fit its column."""
    return _sentence(field.name, field.type, _text(text))


def _misfit(path: str, value: Any, dtype: pa.DataType, fits: Fits) -> str | None:
    """Return the innermost part of a value that does not fit."""
    if fits(value, dtype):
        return None
    inner: list[tuple[str, Any, pa.DataType]] = []
    if pa.types.is_struct(dtype) and isinstance(value, dict):
        inner = [
            (f"{path}.{field.name}", value[field.name], field.type)
            for field in dtype
            if field.name in value
        ]
    elif pa.types.is_list(dtype) and isinstance(value, list):
        inner = [
            (f"{path}[{number}]", element, dtype.value_type)
            for number, element in enumerate(value[:_MOST_ELEMENTS])
        ]
    for part in inner:
        misfit = _misfit(*part, fits)
        if misfit is not None:
            return misfit
    return _sentence(path, dtype, _words(value))


def _sentence(path: str, dtype: pa.DataType, actual: str) -> str:
    return f"field {path!r} must be {_type_name(dtype)}, and is {actual}"


def _type_name(dtype: pa.DataType) -> str:
    if pa.types.is_list(dtype):
        return f"an ARRAY of {_type_name(dtype.value_type)}"
    if pa.types.is_struct(dtype):
        return "an object"
    if pa.types.is_decimal(dtype):
        return f"DECIMAL({dtype.precision}, {dtype.scale})"
    return _NAMES.get(dtype, str(dtype))


def _words(value: Any) -> str:
    """Return a value of JSON with its type."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return _text(value)
    text = json.dumps(value)
    return text if value is None or isinstance(value, bool) else f"the number {_short(text)}"


def _text(value: str) -> str:
    return f"the text {_short(value)!r}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Twice(f"field {twice!r} is there twice")
    return found
