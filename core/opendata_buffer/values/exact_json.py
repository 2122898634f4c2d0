"""One JSON record to the values of a row, step by step as Spark's own parser goes.

The way for every record that the fast readers do not take: it is slow, and what it answers is the
measure for them. Spark keeps what fits of a record: a field whose value does not is null, and
parsing goes on behind the value, from wherever the parser stood when it failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from opendata_buffer.values.chars import BadJson
from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.scalars import (
    Unfit,
    date_reader,
    decimal_of,
    float32_of,
    java_double,
    java_string,
    java_text,
    json_string,
    timestamp_reader,
)
from opendata_buffer.values.times import MAX_LONG, MIN_LONG
from opendata_buffer.values.tokens import Token, Tokens

__all__ = ["ExactJson", "ExactRow"]

Convert = Callable[[Tokens], Any]
_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_POSITIVE = ("+INF", "+Infinity", "Infinity")
_NEGATIVE = ("-INF", "-Infinity")


class _Partial(Exception):
    """A struct, array or map in which something did not fit; ``value`` is what did."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value


class ExactRow:
    """What became of one record.

    Attributes:
        values: One for each column, as Arrow takes them; timestamps and dates as integers.
        problem: Why the record is malformed; empty if it is not.
        rescued: Of a record with fields that the schema has no place for: these as a JSON object.
    """

    __slots__ = ("problem", "rescued", "values")

    def __init__(self, values: list[Any], problem: str = "", rescued: str | None = None) -> None:
        self.values = values
        self.problem = problem
        self.rescued = rescued


class ExactJson:
    """Reads records one by one.

    Args:
        fields: The columns to fill.
        options: How.
    """

    def __init__(self, fields: list[pa.Field], options: ValueOptions) -> None:
        self._options = options
        self._index = {each.name: at for at, each in reversed(list(enumerate(fields)))}
        self._converts = [self._convert(each.type) for each in fields]
        self._rescue = bool(options.rescued_column)

    def read(self, record: bytes) -> ExactRow:
        """The row of one record; never raises."""
        text = java_text(record)
        tokens = Tokens(text)
        nothing: list[Any] = [None] * len(self._converts)
        try:
            first = tokens.next()
            if first is None:
                return ExactRow(nothing)
            if first is not Token.START_OBJECT:
                return ExactRow(nothing, f"it is no JSON object but begins with {first.value!r}")
            rescued: dict[str, str] = {}
            values, problem = self._members(
                tokens, self._index, self._converts, rescued if self._rescue else None
            )
        except BadJson as error:
            return ExactRow(nothing, str(error))
        if not rescued:
            return ExactRow(values, problem)
        members = (f"{json_string(name)}:{value}" for name, value in rescued.items())
        return ExactRow(values, problem, java_string("{" + ",".join(members) + "}"))

    def _members(
        self,
        tokens: Tokens,
        index: dict[str, int],
        converts: list[Convert],
        rescued: dict[str, str] | None = None,
    ) -> tuple[list[Any], str]:
        """The values of an object's members, and the first reason why one did not fit."""
        values: list[Any] = [None] * len(converts)
        problem = ""
        while tokens.next() not in (Token.END_OBJECT, None):
            name = "" if tokens.name is None else tokens.name
            at = None if tokens.name is None else index.get(java_string(name))
            if at is None:
                if rescued is not None and tokens.token is Token.NAME:
                    self._keep(tokens, name, rescued)
                else:
                    tokens.skip()
                continue
            behind_name = tokens.token is Token.NAME
            try:
                values[at] = converts[at](tokens)
            except _Partial as error:
                problem = problem or f"field {name!r}: {error}"
                values[at] = error.value
            except (Unfit, BadJson) as error:
                begin = tokens.begin
                tokens.skip()
                if rescued is not None and behind_name and isinstance(error, Unfit):
                    rescued[name] = tokens.since(begin)
                else:
                    problem = problem or f"field {name!r}: {error}"
        return values, problem

    @staticmethod
    def _keep(tokens: Tokens, name: str, rescued: dict[str, str]) -> None:
        found = tokens.next()
        begin = tokens.begin
        if found is Token.STRING:
            _ = tokens.value
        tokens.skip()
        rescued[name] = tokens.since(begin)

    # ---- converters --------------------------------------------------------------------------

    def _convert(self, dtype: pa.DataType) -> Convert:
        """A function that reads the value we are at, or behind the name we are at."""
        inner = self._inner(dtype)

        def convert(tokens: Tokens) -> Any:
            while tokens.token is Token.NAME:
                tokens.next()
            if tokens.token in (None, Token.NULL):
                return None
            return inner(tokens)

        return convert

    def _inner(self, dtype: pa.DataType) -> Convert:
        types = pa.types
        if types.is_boolean(dtype):
            return _boolean
        if types.is_signed_integer(dtype):
            return _integer(_BITS[str(dtype)])
        if types.is_floating(dtype):
            return _floating(float32_of if types.is_float32(dtype) else float)
        if types.is_decimal(dtype):
            return _decimal(dtype.precision, dtype.scale)
        if types.is_string(dtype):
            return _string
        if types.is_binary(dtype):
            return _binary
        if types.is_date(dtype):
            return _from_text(date_reader(self._options))
        if types.is_timestamp(dtype):
            return _from_text(timestamp_reader(dtype, self._options), seconds=dtype.tz is not None)
        if types.is_struct(dtype):
            return self._struct(dtype)
        if types.is_list(dtype):
            return self._list(self._convert(dtype.value_type))
        assert types.is_map(dtype), dtype
        return self._map(self._convert(dtype.item_type))

    def _struct(self, dtype: pa.StructType) -> Convert:
        fields = list(dtype)
        index = {each.name: at for at, each in reversed(list(enumerate(fields)))}
        converts = [self._convert(each.type) for each in fields]

        def convert(tokens: Tokens) -> dict[str, Any]:
            if tokens.token is not Token.START_OBJECT:
                raise _unfit(tokens, "an object")
            values, problem = self._members(tokens, index, converts)
            found = {each.name: value for each, value in zip(fields, values, strict=True)}
            if problem:
                raise _Partial(found, problem)
            return found

        return convert

    def _list(self, element: Convert) -> Convert:
        def convert(tokens: Tokens) -> list[Any]:
            if tokens.token is not Token.START_ARRAY:
                raise _unfit(tokens, "an array")
            values, problem = [], ""
            while tokens.next() not in (Token.END_ARRAY, None):
                try:
                    values.append(element(tokens))
                except _Partial as error:
                    problem = problem or str(error)
                    values.append(error.value)
            if problem:
                raise _Partial(values, problem)
            return values

        return convert

    def _map(self, item: Convert) -> Convert:
        def convert(tokens: Tokens) -> list[tuple[str, Any]]:
            if tokens.token is not Token.START_OBJECT:
                raise _unfit(tokens, "an object")
            found: dict[str, Any] = {}
            partial, problem = "", ""
            while tokens.next() not in (Token.END_OBJECT, None):
                name = java_string(tokens.name or "")
                try:
                    found[name] = item(tokens)
                except _Partial as error:
                    partial = partial or str(error)
                    found[name] = error.value
                except (Unfit, BadJson) as error:
                    problem = problem or str(error)
                    tokens.skip()
            if problem:
                raise Unfit(problem)
            if partial:
                raise _Partial(list(found.items()), partial)
            return list(found.items())

        return convert


def _unfit(tokens: Tokens, expected: str) -> Unfit:
    text = tokens.value
    return Unfit(f"{expected} is expected and {text[:40]!r} found")


def _boolean(tokens: Tokens) -> bool:
    if tokens.token in (Token.TRUE, Token.FALSE):
        return tokens.token is Token.TRUE
    raise _unfit(tokens, "true or false")


def _integer(bits: int) -> Convert:
    # A byte is read as Java's parser does it, which takes 128 to 255 for negative ones.
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    accepted = 255 if bits == 8 else most

    def convert(tokens: Tokens) -> int:
        if tokens.token is not Token.INT:
            raise _unfit(tokens, "an integer")
        number = int(tokens.value)
        if not least <= number <= accepted:
            raise Unfit(f"{tokens.value[:40]} does not fit into {bits} bits")
        return number - 256 if number > most else number

    return convert


def _floating(read: Callable[[str], float]) -> Convert:
    def convert(tokens: Tokens) -> float:
        text = tokens.value
        if tokens.token is Token.STRING or not text[-1:].isdigit():
            if tokens.token in (Token.STRING, Token.FLOAT):
                if text == "NaN":
                    return float("nan")
                if text in _POSITIVE:
                    return float("inf")
                if text in _NEGATIVE:
                    return float("-inf")
            raise _unfit(tokens, "a number")
        number = read(text)
        # An integer has no negative zero.
        return 0.0 if number == 0 and tokens.token is Token.INT else number

    return convert


def _decimal(precision: int, scale: int) -> Convert:
    def convert(tokens: Tokens) -> Any:
        if tokens.token in (Token.INT, Token.FLOAT, Token.STRING):
            return decimal_of(tokens.value, precision, scale)
        raise _unfit(tokens, "a number")

    return convert


def _string(tokens: Tokens) -> str:
    return java_string(tokens.value if tokens.token is Token.STRING else _written(tokens))


def _binary(tokens: Tokens) -> bytes:
    if tokens.token is Token.STRING:
        return tokens.base64()
    raise _unfit(tokens, "base64 in a string")


def _from_text(read: Callable[[str], int], seconds: bool = False) -> Convert:
    def convert(tokens: Tokens) -> int:
        if tokens.token is Token.STRING and tokens.value:
            return read(tokens.value)
        if seconds and tokens.token is Token.INT:
            number = int(tokens.value)
            if MIN_LONG <= number <= MAX_LONG:
                # Java's product of two longs, which runs over without a word.
                return (number * 1_000_000 + (1 << 63)) % (1 << 64) - (1 << 63)
        raise _unfit(tokens, "text with a date or time")

    return convert


def _written(tokens: Tokens) -> str:
    """The value we are at as JSON without spaces, in the spelling of Java's writer."""
    if tokens.token not in (Token.START_OBJECT, Token.START_ARRAY):
        return _written_scalar(tokens)
    parts, counts, named = [str(tokens.token.value)], [0], False
    while counts:  # A loop, for records may nest deeper than Python calls.
        token = tokens.next()
        assert token is not None, "the end of a text inside an object is an error"
        if token in (Token.END_OBJECT, Token.END_ARRAY):
            parts.append(token.value)
            counts.pop()
            continue
        if not named:
            parts.append("," if counts[-1] else "")
            counts[-1] += 1
        named = token is Token.NAME
        if named:
            parts.append(json_string(tokens.name or "") + ":")
        elif token in (Token.START_OBJECT, Token.START_ARRAY):
            parts.append(token.value)
            counts.append(0)
        else:
            parts.append(_written_scalar(tokens))
    return "".join(parts)


def _written_scalar(tokens: Tokens) -> str:
    token, text = tokens.token, tokens.value
    if token is Token.STRING:
        return json_string(text)
    if token is Token.INT:
        return str(int(text))
    if token is Token.FLOAT:
        if text[-1:].isdigit():
            return java_double(float(text))
        return '"NaN"' if text == "NaN" else f'"{"-" if text[0] == "-" else ""}Infinity"'
    if token in (Token.TRUE, Token.FALSE, Token.NULL):
        return text
    raise Unfit("there is no value here")
