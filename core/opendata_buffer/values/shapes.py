"""JSON records that share a shape, in bulk: the same names in the same order, values of one kind.

What one program writes mostly looks like that. The places of the quotes then tell where each
value stands, so a whole piece is cut by a few operations over all records. A record is taken only
if what stands between its values is, byte for byte, what stands there in the record the shape was
learnt from, and if it has no escape, no control character and nothing that is not UTF-8: its
values are then all there is to judge, and :mod:`opendata_buffer.values.spans` judges those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.spans import Bytes, Spans, bare, doubles, from_texts

__all__ = ["Records", "Shape", "learn"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_STRING = re.compile(rb'"[^"\\\x00-\x1f]*"')
_BARE = re.compile(rb"-?[0-9][0-9.eE+-]*|true|false|null")
_QUOTE = 0x22
_SPACE = 0x20
_MOST_SPACES = 1000
_MOST_BYTES = 1 << 20
IGNORED = pa.null()


class Records:
    """Some records in a row, and where their quotes are.

    Args:
        values: The records, of type ``pa.binary()`` and without nulls.

    Attributes:
        plain: Which records may be cut at their quotes.
    """

    def __init__(self, values: pa.BinaryArray) -> None:
        offsets = np.frombuffer(values.buffers()[1], np.int32)
        offsets = offsets[values.offset : values.offset + len(values) + 1].astype(np.int64)
        data = values.buffers()[2]
        raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        raw = raw[offsets[0] : offsets[-1]]
        self.source = Bytes(raw)
        self.begin: Ints = offsets[:-1] - offsets[0]
        self.end: Ints = offsets[1:] - offsets[0]
        self.quotes: Ints = np.flatnonzero(raw == _QUOTE)
        edges = np.searchsorted(self.quotes, offsets - offsets[0])
        self.first_quote = edges[:-1]
        self.quote_count = np.diff(edges)
        self.plain: Mask = (self.quote_count > 0) & (self.end - self.begin <= _MOST_BYTES)
        for odd in (raw < _SPACE, raw == 0x5C):
            if odd.any():
                places = np.flatnonzero(odd)
                self.plain[np.searchsorted(self.begin, places, "right") - 1] = False
        self.end = self._without_spaces()

    def _without_spaces(self) -> Ints:
        end, rows = self.end.copy(), np.arange(len(self.end))
        for step in (8, 1):  # Eight at a time, then what is left of them.
            spaces = np.uint64(int.from_bytes(b" " * step, "little"))
            bits = np.uint64((1 << 8 * step) - 1)
            left = rows
            for _ in range(_MOST_SPACES // step):
                left = left[end[left] - step >= self.begin[left]]
                left = left[self.source.word(end[left] - step) & bits == spaces]
                if not len(left):
                    break
                end[left] -= step
        return end


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
    """

    quotes: int
    between: list[bytes]
    slots: list[_Slot]
    paths: list[tuple[str, ...]]
    types: list[pa.DataType]

    def cut(self, records: Records, wanted: Mask) -> tuple[Ints, list[tuple[Ints, Ints]]]:
        """The rows among the wanted that have this shape, and begin and length of each value."""
        rows = np.flatnonzero(wanted & (records.quote_count == self.quotes))
        rows, begins, ends = self._match(records, rows)
        return rows, [(b, e - b) for b, e in zip(begins, ends, strict=True)]

    def _match(self, records: Records, rows: Ints) -> tuple[Ints, list[Ints], list[Ints]]:
        first = records.first_quote[rows]

        def quote(number: int) -> Ints:
            places: Ints = records.quotes[first + number]
            return places

        begins: list[Ints] = []
        ends: list[Ints] = []
        good = np.ones(len(rows), np.bool_)
        before = records.begin[rows]
        limit = records.end[rows]
        for slot, text in zip(self.slots, self.between, strict=False):
            if slot.quoted:
                begin, end = quote(slot.quote) + 1, quote(slot.quote + 1)
            else:
                begin = quote(slot.quote) + 1 + slot.lead
                last = slot.quote + 1 == self.quotes
                end = (limit if last else quote(slot.quote + 1)) - slot.tail
                good &= end > begin
            good &= begin - before == len(text)
            good &= records.source.are(before, text)
            begins.append(begin)
            ends.append(end)
            before = end
        good &= limit - before == len(self.between[-1])
        good &= records.source.are(before, self.between[-1])
        if good.all():
            return rows, begins, ends
        return rows[good], [each[good] for each in begins], [each[good] for each in ends]

    def columns(
        self,
        records: Records,
        cut: Sequence[tuple[Ints, Ints]],
        fields: Sequence[pa.Field],
        options: ValueOptions,
    ) -> tuple[list[pa.Array], Mask]:
        """The columns of cut records, and which of these rows are doubtful."""
        count = len(cut[0][0])
        doubtful = np.zeros(count, np.bool_)
        leaves: dict[tuple[str, ...], pa.Array] = {}
        for slot, path, dtype, (begin, length) in zip(
            self.slots, self.paths, self.types, cut, strict=True
        ):
            spans = Spans(records.source, begin, length)
            if pa.types.is_null(dtype):
                if not slot.quoted:
                    doubtful |= _no_scalar(spans)
                continue
            found = from_texts(spans.texts(), dtype, options) if slot.quoted else bare(spans, dtype)
            if found.doubtful is not None:
                doubtful |= found.doubtful
            leaves[path] = found.array
        return [_assemble(leaves, (each.name,), each.type, count) for each in fields], doubtful


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
    def __init__(self, record: bytes, complete: bool) -> None:
        self._record = record
        self._complete = complete
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
        return Shape(self._quotes, self._between, self._slots, self._paths, self._types)

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
        if dtype is None and self._complete:
            raise _Odd  # What no column takes is to be kept, and that is done record by record.
        if self._record.startswith(b"{", self.at):
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
            self._slot(_Slot(self._quotes - 1, True), dtype, path)
            self.at = found.end() - 1
            self.literal(b'"')
            return
        found = _BARE.match(self._record, self.at)
        if found is None:
            raise _Odd
        lead = len(self._literal) - self._literal.rindex(b'"') - 1
        self._slot(_Slot(self._quotes - 1, False, lead, -1), dtype, path)
        self.at = found.end()

    def _slot(self, slot: _Slot, dtype: pa.DataType | None, path: tuple[str, ...]) -> None:
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
