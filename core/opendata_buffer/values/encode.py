"""Columns as JSON: one object a row, column by column in bulk.

What Spark's ``to_json`` with its defaults says, in a spelling that loses nothing: a field that is
null is left out, also inside of structs, and an element of an array or a map is ``null``; binary is
Base64; what is no number of JSON is text (``"NaN"``, ``"Infinity"``). Other than there, timestamps
are in UTC and have their microseconds, and floating-point numbers are spelled as shortly as they
can be: ``1e+20`` for ``1.0E20``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.scalars import java_text

__all__ = ["check_encodable", "encode_objects"]

_TEXT = pa.large_string()
_ESCAPES = {ord("\\"): r"\\", ord('"'): r"\""} | {
    code: {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r"}.get(code, f"\\u{code:04X}")
    for code in range(32)
}


class _Text(NamedTuple):
    """Values as JSON, without what stands around each of them; null where the value is null."""

    inner: pa.Array
    before: str = ""
    after: str = ""


def encode_objects(fields: Iterable[tuple[str, pa.Array]], length: int) -> pa.Array:
    """A JSON object for each row, as ``large_binary``.

    Args:
        fields: Name and values of each, in order.
        length: How many rows there are.

    Raises:
        InvalidInput: A type has no form in JSON.
    """
    return _object(list(fields), length).cast(pa.large_binary())


def check_encodable(name: str, kind: pa.DataType) -> None:
    """Whether values of a type can be encoded.

    Args:
        name: Of the column, for the message.
        kind: Its type.

    Raises:
        InvalidInput: They cannot.
    """
    try:
        _text(pa.nulls(0, kind))
    except InvalidInput as error:
        raise InvalidInput(f"column {name!r} cannot be written as JSON: {error}") from None


def _object(fields: list[tuple[str, pa.Array]], length: int) -> pa.Array:
    """Objects, never null."""
    # A field that is never null needs no comma of its own: those before it end with one, those
    # behind it begin with one.
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
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return _Text(values.cast(_TEXT))
    if pa.types.is_decimal(kind):
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
    if pa.types.is_null(kind):
        return _Text(values.cast(_TEXT))
    raise InvalidInput(f"type {kind} has no form in JSON: cast it, for example to STRING")


def _escape(values: pa.Array) -> pa.Array:
    """The inside of JSON strings. Most text has nothing to escape, which one look tells."""
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
    """The same with U+FFFD for what is wrong: Spark's strings may hold any bytes, JSON may not."""
    raw = values.cast(pa.large_binary())
    try:
        raw.cast(_TEXT)
        return values
    except pa.ArrowInvalid:
        return pa.array(
            [None if each is None else java_text(each) for each in raw.to_pylist()], _TEXT
        )


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
    texts = (
        None if each is None else base64.b64encode(each).decode("ascii")
        for each in values.to_pylist()
    )
    return pa.array(texts, _TEXT)


def _lists(values: pa.Array, elements: pa.Array) -> pa.Array:
    """The elements of each list, which lie one after the other, with commas between them."""
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
    """The inside of the names that keys have, as JSON has names of text only."""
    text = _text(keys)
    if pa.types.is_nested(keys.type):  # What it is in JSON, as a text.
        return _escape(_around("", text, ""))
    inner = text.inner
    if pa.types.is_floating(keys.type):  # Those that are no numbers of JSON are in quotes.
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
