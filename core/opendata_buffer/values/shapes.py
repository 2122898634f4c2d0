"""JSON records that share a shape, in bulk: the same names in the same order, values of one kind.

What one program writes mostly looks like that. The places of the quotes then tell where each
value stands, so a whole piece is cut by a few operations over all records. A record is taken only
if what stands between its values is, byte for byte, what stands there in the record the shape was
learnt from, and if it has no escape, no control character and nothing that is not UTF-8: its
values are then all there is to judge, and :mod:`opendata_buffer.values.numbers` judges those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.values.from_texts import from_texts
from opendata_buffer.values.numbers import bare, doubles
from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.records import Records
from opendata_buffer.values.segments import Segments
from opendata_buffer.values.spans import Spans

__all__ = ["Shape", "learn"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_STRING = re.compile(rb'"[^"\\\x00-\x1f]*"')
_BARE = re.compile(rb"-?[0-9][0-9.eE+-]*|true|false|null")
IGNORED = pa.null()


@dataclass(slots=True)
class _Slot:
    """Where a value stands in a shape.

    Attributes:
        quote: Index of the quote that it begins with, or that comes before it.
        quoted: Whether it is a string.
        lead: Bytes between the quote before and the value, if it is bare.
        tail: Bytes between the value and the quote behind it or the end, if it is bare.
    """

    quote: int
    quoted: bool
    lead: int = 0
    tail: int = 0


@dataclass(slots=True)
class Shape:
    """Names and order of a record, for a set of columns.

    Attributes:
        quotes: How many quotes such a record has.
        between: What stands before the first value, between values, and behind the last.
        slots: Where the values stand.
        paths: For each value the names that lead to it.
        types: Of the columns that take the values; null for a value that none takes.
        rescued: Which values no column takes and a column is to keep.
    """

    quotes: int
    between: list[bytes]
    slots: list[_Slot]
    paths: list[tuple[str, ...]]
    types: list[pa.DataType]
    rescued: list[int]

    def cut(self, records: Records, wanted: Mask) -> tuple[Ints, Segments]:
        """The rows among the wanted that have this shape, and their segments.

        The segments are, in turn, what stands before a value and a value, then what stands behind
        the last value, and the spaces behind that.
        """
        rows = np.flatnonzero(wanted & (records.quote_count == self.quotes))
        edges = self._edges(records, rows)
        places = edges.ravel()
        if (places[1:] < places[:-1]).any():
            good = (edges[:, 1:] >= edges[:, :-1]).all(axis=1)
            rows, edges = rows[good], edges[good]
        segments = Segments(records.source, edges)
        same = segments.are(range(0, 2 * len(self.between), 2), self.between)
        if same is not None:
            rows, segments = rows[same], segments.filter(same)
        blank = segments.blank(2 * len(self.slots) + 1)
        if blank is not None:
            rows, segments = rows[blank], segments.filter(blank)
        return rows, segments

    def _edges(self, records: Records, rows: Ints) -> npt.NDArray[np.int32]:
        """Where the segments begin and end, if the rows have this shape."""
        first = records.first_quote[rows]
        alone = len(rows) * self.quotes == len(records.quotes)
        # Where nobody else has quotes they are a table, and its columns cost less than look-ups.
        table = records.quotes.reshape(len(rows), self.quotes) if alone else None

        def quote(number: int) -> Ints:
            places: Ints = records.quotes[first + number] if table is None else table[:, number]
            return places

        places = np.empty((2 * len(self.slots) + 3, len(rows)), np.int32)
        places[0] = before = records.begin[rows]
        last = len(self.slots) - 1
        limit = (records.end if self.slots[last].quoted else records.trimmed)[rows]
        for number, (slot, text) in enumerate(zip(self.slots, self.between, strict=False)):
            places[2 * number + 1] = before + len(text)
            if not slot.quoted and number == last:
                before = limit - slot.tail
            else:
                before = quote(slot.quote + 1) - slot.tail
            places[2 * number + 2] = before
        places[-2] = before + len(self.between[-1])
        places[-1] = limit
        return np.ascontiguousarray(places.T)

    def columns(
        self, segments: Segments, fields: Sequence[pa.Field], options: ValueOptions
    ) -> tuple[list[pa.Array], Mask]:
        """The columns of cut records, and which of these rows are doubtful.

        With a rescued column there is one array more: what it is for these records.
        """
        count = len(segments)
        doubtful = np.zeros(count, np.bool_)
        leaves: dict[tuple[str, ...], pa.Array] = {}
        # What stands in quotes and nobody wants has been judged already.
        wanted = [
            number
            for number, (slot, dtype) in enumerate(zip(self.slots, self.types, strict=True))
            if not (slot.quoted and pa.types.is_null(dtype)) or number in self.rescued
        ]
        cut = segments.texts([2 * number + 1 for number in wanted])
        texts = dict(zip(wanted, cut, strict=True))
        for number, text in texts.items():
            quoted, dtype = self.slots[number].quoted, self.types[number]
            if pa.types.is_null(dtype):
                if not quoted:
                    doubtful |= _no_scalar(segments.spans(2 * number + 1, text))
                continue
            if quoted:
                found = from_texts(text, dtype, options)
            else:
                found = bare(segments.spans(2 * number + 1, text), dtype)
            if found.doubtful is not None:
                doubtful |= found.doubtful
            leaves[self.paths[number]] = found.array
        arrays = [_assemble(leaves, (each.name,), each.type, count) for each in fields]
        if options.rescued_column:
            arrays.append(self._rescued(texts, count))
        return arrays, doubtful

    def _rescued(self, texts: dict[int, pa.StringArray], count: int) -> pa.StringArray:
        """What no column takes, as JSON objects with each value as it stands."""
        if not self.rescued:
            return pa.nulls(count, pa.string())
        parts: list[Any] = []
        before = "{"
        for number in self.rescued:
            quote = '"' if self.slots[number].quoted else ""
            parts += [f'{before}"{self.paths[number][0]}":{quote}', texts[number]]
            before = quote + ","
        return pc.binary_join_element_wise(*parts, before[:-1] + "}", "")


def _no_scalar(spans: Spans) -> Mask:
    """Which bare values that no column wants are no JSON either."""
    word = np.zeros(len(spans.begin), np.bool_)
    for text in (b"null", b"true", b"false"):
        word |= spans.are(text)
    found = doubles(spans, word, pa.float64()).doubtful
    return np.zeros(len(word), np.bool_) if found is None else found


def _assemble(
    leaves: dict[tuple[str, ...], pa.Array], path: tuple[str, ...], dtype: pa.DataType, count: int
) -> pa.Array:
    found = leaves.get(path)
    if found is not None:
        return found
    inside = any(each[: len(path)] == path for each in leaves)
    if not inside or not pa.types.is_struct(dtype):
        return pa.nulls(count, dtype)
    children = [_assemble(leaves, (*path, each.name), each.type, count) for each in dtype]
    return pa.StructArray.from_arrays(children, fields=list(dtype))


def learn(record: bytes, fields: Sequence[pa.Field], options: ValueOptions) -> Shape | None:
    """The shape of a record that is plain; None for one that is better read by itself.

    Args:
        record: One record without trailing spaces.
        fields: The columns.
        options: How values are read.
    """
    learner = _Learner(record, bool(options.rescued_column))
    types: dict[str, pa.DataType] = {each.name: each.type for each in reversed(fields)}
    try:
        learner.object(types, ())
        if learner.at != len(record):
            return None
    except _Odd:
        return None
    return learner.shape()


class _Odd(Exception):
    """Not a record to learn from."""


class _Learner:
    def __init__(self, record: bytes, rescue: bool) -> None:
        self._record = record
        self._rescue = rescue
        self._rescued: list[int] = []
        self._literal = b""
        self._between: list[bytes] = []
        self._slots: list[_Slot] = []
        self._paths: list[tuple[str, ...]] = []
        self._types: list[pa.DataType] = []
        self._ends: list[int] = []
        self._quotes = 0
        self.at = 0

    def shape(self) -> Shape | None:
        if not self._slots:
            return None
        self._between.append(self._literal)
        if len({*self._paths}) != len(self._paths):
            return None
        return Shape(
            self._quotes, self._between, self._slots, self._paths, self._types, self._rescued
        )

    def literal(self, text: bytes) -> None:
        self._literal += text
        self.at += len(text)
        self._quotes += text.count(b'"')
        if self._slots and not self._slots[-1].quoted and self._slots[-1].tail < 0:
            before, quote, _ = self._literal.partition(b'"')
            if quote or self.at == len(self._record):
                self._slots[-1].tail = len(before)

    def spaces(self) -> None:
        begin = self.at
        while self._record.startswith(b" ", begin):
            begin += 1
        self.literal(self._record[self.at : begin])

    def expect(self, text: bytes) -> None:
        if not self._record.startswith(text, self.at):
            raise _Odd
        self.literal(text)

    def object(self, types: dict[str, pa.DataType], path: tuple[str, ...]) -> None:
        self.spaces()
        self.expect(b"{")
        seen: set[str] = set()
        while True:
            self.spaces()
            found = _STRING.match(self._record, self.at)
            if found is None:
                raise _Odd
            name = found.group()[1:-1].decode()
            if name in seen:
                raise _Odd
            seen.add(name)
            self.literal(found.group())
            self.spaces()
            self.expect(b":")
            self.spaces()
            self.value(types.get(name), (*path, name))
            self.spaces()
            if self._record.startswith(b",", self.at):
                self.literal(b",")
                continue
            self.expect(b"}")
            return

    def value(self, dtype: pa.DataType | None, path: tuple[str, ...]) -> None:
        keep = self._rescue and dtype is None and len(path) == 1
        if self._record.startswith(b"{", self.at):
            if keep:
                raise _Odd  # An object is kept whole, not by its values.
            if dtype is None:
                self.object({}, path)
            elif pa.types.is_struct(dtype):
                self.object({each.name: each.type for each in reversed(list(dtype))}, path)
            else:
                raise _Odd
            return
        found = _STRING.match(self._record, self.at)
        if found is not None:
            if dtype is not None and not _takes_text(dtype):
                raise _Odd
            self.literal(b'"')
            self._slot(_Slot(self._quotes - 1, True), dtype, path, keep)
            self.at = found.end() - 1
            self.literal(b'"')
            return
        found = _BARE.match(self._record, self.at)
        if found is None:
            raise _Odd
        lead = len(self._literal) - self._literal.rindex(b'"') - 1
        self._slot(_Slot(self._quotes - 1, False, lead, -1), dtype, path, keep)
        self.at = found.end()

    def _slot(
        self, slot: _Slot, dtype: pa.DataType | None, path: tuple[str, ...], keep: bool
    ) -> None:
        if keep:
            self._rescued.append(len(self._slots))
        self._between.append(self._literal)
        self._literal = b""
        self._slots.append(slot)
        self._paths.append(path)
        self._types.append(IGNORED if dtype is None else dtype)


def _takes_text(dtype: pa.DataType) -> Any:
    types = pa.types
    return (
        types.is_string(dtype)
        or types.is_timestamp(dtype)
        or types.is_date(dtype)
        or types.is_decimal(dtype)
        or types.is_binary(dtype)
    )
