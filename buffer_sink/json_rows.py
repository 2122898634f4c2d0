"""Rows of any columns as JSON: with ``valueFormat=json`` all columns together are the value.

The objects are those of Spark's ``to_json``: a field that is null is left out, also of structs, and
an element of an array or a map is ``null``; binary is Base64; numbers that JSON does not have are
text (``"NaN"``, ``"Infinity"``). Unlike there, timestamps are in UTC with microseconds, and
floating-point numbers have their shortest spelling: ``1e+20`` for ``1.0E20``.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StructField, StructType

from opendata_buffer.errors import InvalidInput

_TEXT = pa.large_string()
_ESCAPES = {ord("\\"): r"\\", ord('"'): r"\""} | {
    code: {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r"}.get(code, f"\\u{code:04X}")
    for code in range(32)
}

OWN = ("_metadata", "_key", "_partition")
"""Columns that are no fields of the record: the ``metadata``, ``key`` and ``partition`` of rows
without ``valueFormat``."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Name and column of each field of a record, and of the buffer's own, without underscore."""

    fields: tuple[tuple[str, int], ...]
    own: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, schema: StructType) -> tuple[Fields, StructType]:
        """The fields of a schema, and what is left of it once they are one column ``value``.

        InvalidInput if there is no field, two have one name, or a type has no form in JSON.
        """
        fields: list[tuple[str, int]] = []
        own: list[tuple[str, int]] = []
        rest = [StructField("value", BinaryType())]
        for position, field in enumerate(schema.fields):
            if field.name.lower() in OWN:
                name = field.name.lower().removeprefix("_")
                own.append((name, position))
                rest.append(StructField(name, field.dataType, field.nullable))
                continue
            if field.name in (name for name, _ in fields):
                raise InvalidInput(
                    f"column {field.name!r} is there twice, and JSON has one field of a name: drop "
                    "or rename one"
                )
            _check_encodable(field)
            fields.append((field.name, position))
        if not fields:
            raise InvalidInput(
                "option valueFormat is 'json', but there is no column to write: besides "
                f"{', '.join(OWN)} the DataFrame has none"
            )
        return cls(tuple(fields), tuple(own)), StructType(rest)

    def encode(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with all fields as one column ``value``, and the other columns behind it."""
        fields = [(name, rows.column(position)) for name, position in self.fields]
        values = _object(fields, len(rows)).cast(pa.large_binary())
        own = [rows.column(position) for _, position in self.own]
        return pa.record_batch([values, *own], names=["value", *(name for name, _ in self.own)])


def _check_encodable(field: StructField) -> None:
    """Refuse a column that Spark does not give to a Python sink, or that has no form in JSON."""
    found = None
    if not _holds_variant(field.dataType):
        with suppress(Exception):  # each version of Spark has its own for a type it cannot do
            try:
                found = to_arrow_type(field.dataType, timezone="UTC")  # Spark 4.3 asks for one
            except TypeError:
                found = to_arrow_type(field.dataType)
    if found is None:
        raise InvalidInput(
            f"column {field.name!r} cannot be written as JSON: a Python sink cannot read type "
            f"{field.dataType.simpleString()}. Cast it, or put it into text with to_json first."
        )
    try:
        _text(pa.nulls(0, found))
    except InvalidInput as error:
        raise InvalidInput(f"column {field.name!r} cannot be written as JSON: {error}") from None


def _holds_variant(kind: DataType) -> bool:
    """Whether a type is a variant or holds one. The names of its fields may be anything."""
    if isinstance(kind, StructType):
        return any(_holds_variant(each.dataType) for each in kind.fields)
    if isinstance(kind, ArrayType):
        return _holds_variant(kind.elementType)
    if isinstance(kind, MapType):
        return _holds_variant(kind.keyType) or _holds_variant(kind.valueType)
    return kind.typeName() == "variant"


class _Text(NamedTuple):
    """Values as JSON, without the text before and after each; null where the value is null."""

    inner: pa.Array
    before: str = ""
    after: str = ""


def _object(fields: list[tuple[str, pa.Array]], length: int) -> pa.Array:
    """Objects, never null."""
    # The fields before one that is never null end with a comma, those behind it begin with one.
    certain = next((i for i, (_, values) in enumerate(fields) if not values.null_count), None)
    parts: list[pa.Array | pa.Scalar] = []
    for index, (name, values) in enumerate(fields):
        key = f'"{_escaped(name)}":'
        text = _text(values)
        first = "," if certain is None or index > certain else ""
        last = "," if certain is not None and index < certain else ""
        if values.null_count:
            parts.append(pc.fill_null(_around(first + key, text, last), _scalar("")))
        else:
            parts += [_scalar(first + key + text.before), text.inner, _scalar(text.after + last)]
    if not fields:
        return pa.repeat(_scalar("{}"), length)
    if certain is not None:
        return _joined(_scalar("{"), *parts, _scalar("}"))
    inside = pc.binary_replace_slice(_joined(*parts), 0, 1, "")
    return _joined(_scalar("{"), inside, _scalar("}"))


def _text(values: pa.Array) -> _Text:
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _text(values.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _Text(_escape(values.cast(_TEXT)), '"', '"')
    is_plain = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_decimal, pa.types.is_null)
    if any(is_of(kind) for is_of in is_plain):
        return _Text(values.cast(_TEXT))
    if pa.types.is_floating(kind):
        return _Text(_floats(values))
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz is not None else ""
        naive = values.cast(pa.timestamp(kind.unit)).cast(_TEXT)
        return _Text(_with_t(naive), '"', zone + '"')
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return _Text(values.cast(_TEXT), '"', '"')
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _Text(_base64(values), '"', '"')
    if pa.types.is_struct(kind):
        fields = [(kind.field(i).name, each) for i, each in enumerate(values.flatten())]
        return _Text(_like(values, _object(fields, len(values))))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _Text(_lists(values, _around("", _text(values.flatten()), "")), "[", "]")
    if pa.types.is_map(kind):
        return _Text(_maps(values), "{", "}")
    raise InvalidInput(f"type {kind} has no form in JSON: cast it, for example to STRING")


def _escape(values: pa.Array) -> pa.Array:
    """The inside of JSON strings. Most columns have nothing to escape, and are returned as is."""
    size = int(pc.sum(pc.binary_length(values)).as_py() or 0)
    if not size:
        return values
    offsets = np.frombuffer(values.buffers()[1], np.int64)
    begin = offsets[values.offset]
    data = np.frombuffer(values.buffers()[2], np.uint8)[
        begin : offsets[values.offset + len(values)]
    ]
    if (data > 127).any():
        values = _utf8(values)
    if not ((data < 32).any() or (data == 34).any() or (data == 92).any()):
        return values
    there = np.bincount(data, minlength=128)
    for code, escape in _ESCAPES.items():  # the backslash first: the others make some
        if there[code]:
            values = pc.replace_substring(values, chr(code), escape)
    return values


def _utf8(values: pa.Array) -> pa.Array:
    """The same with U+FFFD for bytes that are not UTF-8, which Spark's strings may have."""
    raw = values.cast(pa.large_binary())
    try:
        raw.cast(_TEXT)
        return values
    except pa.ArrowInvalid:
        texts = (each and each.decode("utf-8", "replace") for each in raw.to_pylist())
        return pa.array(texts, _TEXT)


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(ord(character), character) for character in text)


def _floats(values: pa.Array) -> pa.Array:
    text = values.cast(_TEXT)
    fraction = pc.or_(pc.match_substring(text, "."), pc.match_substring(text, "e"))
    if pc.all(fraction).as_py() is False:
        text = pc.if_else(fraction, text, _joined(text, _scalar(".0")))
    finite = pc.is_finite(values)
    if pc.all(finite, min_count=0).as_py() is not False:
        return text
    infinite = pc.if_else(pc.greater(values, 0), _scalar('"Infinity"'), _scalar('"-Infinity"'))
    return pc.if_else(finite, text, pc.if_else(pc.is_nan(values), _scalar('"NaN"'), infinite))


def _with_t(text: pa.Array) -> pa.Array:
    """Date and time of day with a T between them."""
    if pc.all(pc.equal(pc.binary_length(text), len("2024-01-02 03:04:05.000000"))).as_py():
        return pc.binary_replace_slice(text, 10, 11, "T")
    return pc.replace_substring(text, " ", "T", max_replacements=1)


def _base64(values: pa.Array) -> pa.Array:
    texts = (each and base64.b64encode(each).decode("ascii") for each in values.to_pylist())
    return pa.array(texts, _TEXT)


def _lists(values: pa.Array, elements: pa.Array) -> pa.Array:
    """The elements of each list, joined by commas."""
    lengths = pc.fill_null(pc.list_value_length(values), 0).cast(pa.int64())
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int64), ends]))
    filled = pc.fill_null(elements, _scalar("null"))
    lists = pa.LargeListArray.from_arrays(offsets, filled)
    return _like(values, pc.binary_join(lists, _scalar(",")))


def _maps(values: pa.Array) -> pa.Array:
    entries = pa.StructArray.from_arrays([values.keys, values.items], names=["key", "value"])
    lists = pa.ListArray.from_buffers(
        pa.list_(entries.type),
        len(values),
        values.buffers()[:2],
        offset=values.offset,
        children=[entries],
    )
    flat = lists.flatten()
    keys, items = flat.field("key"), flat.field("value")
    names = _around('"', _Text(_names(keys)), '":')
    written = pc.fill_null(_around("", _text(items), ""), _scalar("null"))
    return _lists(lists, _joined(names, written))


def _names(keys: pa.Array) -> pa.Array:
    """The inside of names made of keys: JSON has names of text only."""
    text = _text(keys)
    if pa.types.is_nested(keys.type):  # Its JSON, as a text.
        return _escape(_around("", text, ""))
    inner = text.inner
    if pa.types.is_floating(keys.type):  # Numbers that JSON does not have are in quotes already.
        inner = pc.replace_substring(inner, '"', "")
    return _around(text.before.removeprefix('"'), _Text(inner), text.after.removesuffix('"'))


def _around(before: str, text: _Text, after: str) -> pa.Array:
    before, after = before + text.before, text.after + after
    if not before and not after:
        return text.inner
    return _joined(_scalar(before), text.inner, _scalar(after))


def _joined(*parts: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*parts, _scalar(""))


def _like(values: pa.Array, text: pa.Array) -> pa.Array:
    """Null where the value is."""
    if not values.null_count:
        return text
    return pc.if_else(values.is_valid(), text, pa.scalar(None, _TEXT))


def _scalar(text: str) -> pa.Scalar:
    return pa.scalar(text, _TEXT)
