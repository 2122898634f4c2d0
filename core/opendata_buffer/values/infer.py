"""The columns that some records have, by Spark's rules. Pure.

Whole numbers are 64 bits wide, or decimals where that is too little; a field that is a number here
and something else there is text, a field that is always null is text, too, and names are sorted. A
field without a name is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

import pyarrow as pa

from opendata_buffer.values.exact_csv import ExactCsv
from opendata_buffer.values.options import CSV, PERMISSIVE, ValueOptions
from opendata_buffer.values.scalars import Unfit, date_reader, java_string, timestamp_reader
from opendata_buffer.values.times import MAX_LONG, MIN_LONG

__all__ = ["ddl", "infer"]

_NULL = pa.null()
_MOST_NESTED = 50
"""Levels of objects and arrays. What lies deeper is text: Arrow sends Spark no type of more than 64
levels, and who walks through types does so by calls in calls."""

_NAMES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.date32(): "DATE",
    pa.timestamp("us", "UTC"): "TIMESTAMP",
    pa.timestamp("us"): "TIMESTAMP_NTZ",
}


class _List:
    """Arrays: the kind that takes all elements that were seen."""

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner: _Kind = _NULL


_Kind: TypeAlias = "pa.DataType | dict[str, _Kind] | _List"
"""Of the values of a field: a type, or of objects the kinds of their members by name."""


def infer(records: Iterable[bytes], options: ValueOptions) -> pa.Schema:
    """The columns that these records have; with the corrupt column if one is malformed.

    Empty if no record tells anything.
    """
    if options.format == CSV:
        return _infer_csv(records, options)
    found: _Kind = _NULL
    malformed = False
    for record in records:
        try:
            value = json.loads(record.decode(), parse_constant=float)
        except (ValueError, RecursionError):
            malformed = malformed or bool(record.strip())
            continue
        if isinstance(value, dict):
            found = _widened(found, value)
        else:
            malformed = True
    columns = list(_settled(found) or ()) if isinstance(found, dict) else []
    # A record may have a field of that name; the column is for the text of records all the same.
    fields = [each for each in columns if each.name != options.corrupt_column]
    kept = malformed and options.mode == PERMISSIVE
    if fields and (kept or len(fields) < len(columns)):
        fields.append(pa.field(options.corrupt_column, pa.string()))
    return pa.schema(fields)


def ddl(schema: pa.Schema) -> str:
    """The schema as Spark's ``schema("...")`` takes it."""
    return ", ".join(f"{_name(each.name)} {_ddl(each.type)}" for each in schema)


def _name(name: str) -> str:
    plain = name.isascii() and name.isidentifier()
    return name if plain else "`" + name.replace("`", "``") + "`"


def _ddl(dtype: pa.DataType) -> str:
    types = pa.types
    if types.is_decimal(dtype):
        return f"DECIMAL({dtype.precision},{dtype.scale})"
    if types.is_list(dtype):
        return f"ARRAY<{_ddl(dtype.value_type)}>"
    if types.is_map(dtype):
        return f"MAP<{_ddl(dtype.key_type)}, {_ddl(dtype.item_type)}>"
    if types.is_struct(dtype):
        members = ", ".join(f"{_name(each.name)}: {_ddl(each.type)}" for each in dtype)
        return f"STRUCT<{members}>"
    return _NAMES[dtype]


def _widened(found: _Kind, value: Any, level: int = 0) -> _Kind:
    """The narrowest kind that takes this value, too. Objects and arrays are widened in place.

    What a record costs is then its own size: beside all that was found before, objects with ids
    for names would take time by the square of their number.
    """
    if isinstance(value, dict | list) and level < _MOST_NESTED:
        empty: _Kind = {} if isinstance(value, dict) else _List()
        if found == _NULL:
            found = empty
        if isinstance(found, dict) and isinstance(value, dict):
            for name, each in value.items():
                if name:
                    held = java_string(name)
                    found[held] = _widened(found.get(held, _NULL), each, level + 1)
        elif isinstance(found, _List) and isinstance(value, list):
            for each in value:
                found.inner = _widened(found.inner, each, level + 1)
        else:
            return pa.string()
        return found
    scalar = _scalar(value)
    if isinstance(found, dict | _List):
        return found if scalar == _NULL else pa.string()
    return _both(found, scalar)


def _scalar(value: Any) -> pa.DataType:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if MIN_LONG <= value <= MAX_LONG:
            return pa.int64()
        digits = len(str(abs(value)))
        return pa.decimal128(digits, 0) if digits <= 38 else pa.float64()
    return pa.float64() if isinstance(value, float) else pa.string()


def _both(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The narrowest type that takes values of both."""
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    numbers = {_rank(one), _rank(other)}
    if None in numbers:
        return pa.string()
    if "double" in numbers:
        return pa.float64()
    digits = max(each.precision if types.is_decimal(each) else 20 for each in (one, other))
    return pa.decimal128(digits, 0)


def _rank(dtype: pa.DataType) -> str | None:
    if pa.types.is_float64(dtype):
        return "double"
    return "whole" if pa.types.is_int64(dtype) or pa.types.is_decimal(dtype) else None


def _settled(kind: _Kind) -> pa.DataType | None:
    """The type; text for what was always null, and None for objects that are always empty."""
    if isinstance(kind, dict):
        members = [(name, _settled(kind[name])) for name in sorted(kind)]
        fields = [pa.field(name, dtype) for name, dtype in members if dtype is not None]
        return pa.struct(fields) if fields else None
    if isinstance(kind, _List):
        return pa.list_(_settled(kind.inner) or pa.string())
    return pa.string() if pa.types.is_null(kind) else kind


# ---- CSV -----------------------------------------------------------------------------------------

_LADDER = ("null", "int", "long", "double", "date", "timestamp", "boolean", "string")
_TYPES = {
    "null": pa.string(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "boolean": pa.bool_(),
    "string": pa.string(),
}


def _infer_csv(records: Iterable[bytes], options: ValueOptions) -> pa.Schema:
    cut = ExactCsv([], options).cut
    names: list[str] | None = None
    kinds: list[str] = []
    for record in records:
        tokens = cut(record.decode("utf-8", "replace"))
        if tokens is None:
            continue
        if names is None:
            names = [f"_c{number}" for number in range(len(tokens))]
            kinds = ["null"] * len(tokens)
            if options.header:
                names = [each or name for each, name in zip(tokens, names, strict=True)]
                continue
        if options.header and tokens == names:
            continue
        for at, token in enumerate(tokens[: len(kinds)]):
            kinds[at] = _wider(kinds[at], _kind(token, options))
    return pa.schema(
        [pa.field(name, _TYPES[kind]) for name, kind in zip(names or [], kinds, strict=True)]
    )


def _kind(token: str | None, options: ValueOptions) -> str:
    if token is None:
        return "null"
    try:
        number = int(token) if token.strip() == token and "_" not in token else None
        if number is not None and MIN_LONG <= number <= MAX_LONG:
            return "int" if -(1 << 31) <= number < 1 << 31 else "long"
    except ValueError:
        pass
    try:
        if "_" not in token:
            float(token)
            return "double"
    except ValueError:
        pass
    for kind, read in (
        ("date", date_reader(options)),
        ("timestamp", timestamp_reader(_TYPES["timestamp"], options)),
    ):
        try:
            read(token)
            # Without a format much is a date, the year 2020 and the beginning of a time as well.
            if kind == "timestamp" or options.date_format or len(token) == len("2020-01-01"):
                return kind
        except Unfit:
            pass
    return "boolean" if token.lower() in ("true", "false") else "string"


def _wider(one: str, other: str) -> str:
    if "null" in (one, other) or one == other:
        return other if one == "null" else one
    group = {one, other}
    if group <= {"int", "long", "double"}:
        return max(one, other, key=_LADDER.index)
    return "timestamp" if group == {"date", "timestamp"} else "string"
