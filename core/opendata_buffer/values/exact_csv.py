"""One CSV record to the values of a row, step by step as Spark's own parser goes.

Line ends are characters as any other. A quote that stands where none is expected ends nothing: the
field then goes on to the next separator, as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from opendata_buffer.values.exact_json import ExactRow
from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.scalars import (
    Unfit,
    date_reader,
    decimal_of,
    float32_of,
    java_text,
    timestamp_reader,
)

__all__ = ["ExactCsv"]

_INT = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_FLOAT = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_JAVA_SPACES = "".join(map(chr, range(0x21)))
_WORDS = {"NaN": "nan", "Inf": "inf", "-Inf": "-inf"}
_JAVA_WORDS = {
    f"{sign}{word}": f"{sign}{number}"
    for sign in ("", "+", "-")
    for word, number in (("NaN", "nan"), ("Infinity", "inf"))
}


class ExactCsv:
    """Reads records one by one.

    Args:
        fields: The columns to fill, in the order of a record's fields.
        options: How.
    """

    def __init__(self, fields: list[pa.Field], options: ValueOptions) -> None:
        self._options = options
        self._names = [each.name for each in fields]
        self._converts = [_reader(each.type, options) for each in fields]

    def read(self, record: bytes) -> ExactRow:
        """The row of one record; never raises."""
        nothing: list[Any] = [None] * len(self._converts)
        tokens = self.cut(java_text(record))
        if tokens is None:
            return ExactRow(nothing)
        problem = ""
        if len(tokens) != len(self._converts):
            problem = f"it has {len(tokens)} fields and the schema {len(self._converts)}"
        values = list(nothing)
        for at, (token, convert) in enumerate(zip(tokens, self._converts, strict=False)):
            if token is None or token == self._options.null_value:
                continue
            try:
                values[at] = convert(token)
            except Unfit as error:
                problem = problem or f"field {self._names[at]!r}: {error}"
        return ExactRow(values, problem)

    def cut(self, text: str) -> list[str | None] | None:
        """The fields of a record, None for an empty one; None if there is nothing at all."""
        if not text:
            return None
        quote = self._options.quote
        fields: list[str | None] = []
        at, size = 0, len(text)
        while True:
            if at < size and quote and text[at] == quote:
                field, at = _Quoted(text, at, self._options).read()
                fields.append(field)
            else:
                end = self._end(text, at)
                fields.append(text[at:end] or None)
                at = end
            if at >= size:
                return fields
            at += 1  # The separator.

    def _end(self, text: str, at: int) -> int:
        """Where a field without quotes ends: at a separator, or with the text."""
        found = text.find(self._options.sep, at)
        return found if found >= 0 else len(text)


class _Quoted:
    """A field that begins with a quote."""

    def __init__(self, text: str, at: int, options: ValueOptions) -> None:
        self._text = text
        self._at = at + 1
        self._quote = options.quote
        self._escape = options.escape
        self._sep = options.sep

    def read(self) -> tuple[str, int]:
        """The field, and where its separator or the end of the text is."""
        text, out = self._text, []
        size = len(text)
        if self._at >= size:
            return self._quote, size
        while self._at < size:
            char = text[self._at]
            after = text[self._at + 1] if self._at + 1 < size else ""
            if char == self._escape and after and after in (self._quote, self._escape):
                if self._escape != self._quote:
                    out.append(after)
                    self._at += 2
                    continue
                out.append(after)
                self._at += 2
                continue
            if char == self._quote:
                return self._behind("".join(out))
            out.append(char)
            self._at += 1
        return "".join(out), size

    def _behind(self, value: str) -> tuple[str, int]:
        """What becomes of the field behind a quote that is not escaped."""
        text, at = self._text, self._at + 1
        while at < len(text) and text[at] <= " " and text[at] != self._sep:
            at += 1
        if at >= len(text) or text[at] == self._sep:
            return value, at
        # It goes on: the quotes belong to the field, which ends at the next separator.
        end = text.find(self._sep, at)
        end = end if end >= 0 else len(text)
        return f"{self._quote}{value}{text[self._at : end]}", end


def _reader(dtype: pa.DataType, options: ValueOptions) -> Callable[[str], Any]:
    types = pa.types
    if types.is_string(dtype):
        return str
    if types.is_boolean(dtype):
        return _boolean
    if types.is_signed_integer(dtype):
        return _integer(dtype.bit_width)
    if types.is_floating(dtype):
        return _floating(float32_of if types.is_float32(dtype) else float)
    if types.is_decimal(dtype):
        return lambda text: decimal_of(text, dtype.precision, dtype.scale)
    if types.is_date(dtype):
        return date_reader(options)
    return timestamp_reader(dtype, options)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise Unfit(f"true or false is expected and {text[:40]!r} found")


def _integer(bits: int) -> Callable[[str], int]:
    most = (1 << (bits - 1)) - 1

    def read(text: str) -> int:
        if _INT.fullmatch(text) is None:
            raise Unfit(f"an integer is expected and {text[:40]!r} found")
        number = int(text)
        if not -most - 1 <= number <= most:
            raise Unfit(f"{text[:40]} does not fit into {bits} bits")
        return number

    return read


def _floating(convert: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        if text in _WORDS:
            return float(_WORDS[text])
        trimmed = text.strip(_JAVA_SPACES)
        if trimmed in _JAVA_WORDS:
            return float(_JAVA_WORDS[trimmed])
        if trimmed[-1:] in ("d", "D", "f", "F"):
            trimmed = trimmed[:-1]
        if _FLOAT.fullmatch(trimmed) is None:
            raise Unfit(f"a number is expected and {text[:40]!r} found")
        return convert(trimmed)

    return read
