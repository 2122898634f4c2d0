"""CSV records in bulk: those without quotes, cut at their separators, many at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opendata_buffer.values.found import Found
from opendata_buffer.values.from_texts import from_texts
from opendata_buffer.values.numbers import decimals, doubles, longs
from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.spans import Bytes, Spans

__all__ = ["Lines"]

Mask = npt.NDArray[np.bool_]


class Lines:
    """Reads records that are their fields with separators between.

    Args:
        fields: The columns to fill, in the order of a record's fields.
        options: How.
    """

    def __init__(self, fields: Sequence[pa.Field], options: ValueOptions) -> None:
        self._fields = list(fields)
        self._options = options
        self._sep = options.sep.encode()
        # Where it stands, separators may be part of a field.
        self._odd = [ord(each) for each in (options.quote,) if each]
        self._null = options.null_value.encode()

    def columns(self, values: pa.BinaryArray) -> tuple[list[pa.Array], Mask]:
        """The columns of some records, and which of these rows are doubtful: read them exactly."""
        count, wanted = len(values), len(self._fields) - 1
        nothing = [pa.nulls(count, each.type) for each in self._fields]
        if len(self._sep) > 1 or any(each > 0x7F for each in self._odd):
            return nothing, np.ones(count, np.bool_)
        offsets = np.frombuffer(values.buffers()[1], np.int32)
        offsets = offsets[values.offset : values.offset + count + 1].astype(np.int64)
        raw = np.frombuffer(values.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        offsets -= offsets[0]
        begin, end = offsets[:-1], offsets[1:]
        doubtful = begin == end
        for odd in self._odd:
            found = raw == odd
            if found.any():
                places = np.flatnonzero(found)
                doubtful[np.searchsorted(begin, places, "right") - 1] = True
        separators = np.flatnonzero(raw == self._sep[0])
        edges = np.searchsorted(separators, offsets)
        doubtful |= np.diff(edges) != wanted
        rows = np.flatnonzero(~doubtful)
        if not len(rows):
            return nothing, doubtful
        source = Bytes(raw)
        places = separators[edges[rows][:, None] + np.arange(wanted)]
        begins = np.column_stack([begin[rows], places + 1])
        ends = np.column_stack([places, end[rows]])
        arrays = []
        wrong = np.zeros(len(rows), np.bool_)
        for number, each in enumerate(self._fields):
            first = np.ascontiguousarray(begins[:, number])
            spans = Spans(source, first, ends[:, number] - first)
            column = self._column(spans, each.type)
            if column.doubtful is not None:
                wrong |= column.doubtful
            arrays.append(column.array)
        doubtful[rows[wrong]] = True
        if len(rows) == count:
            return arrays, doubtful
        back = np.full(count, -1, np.int64)
        back[rows] = np.arange(len(rows))
        take = pa.array(back, mask=back < 0)
        return [each.take(take) for each in arrays], doubtful

    def _column(self, spans: Spans, dtype: pa.DataType) -> Found:
        types = pa.types
        null = spans.length == 0
        if self._null:
            if len(self._null) > 8:
                return Found(pa.nulls(len(null), dtype), np.ones(len(null), np.bool_))
            null |= spans.are(self._null)
        if types.is_boolean(dtype):
            true, false = spans.are(b"true"), spans.are(b"false")
            known = true | false
            return Found(pa.array(true, mask=~known), ~(known | null))
        if types.is_signed_integer(dtype):
            return longs(spans, null, dtype)
        if types.is_floating(dtype):
            return doubles(spans, null, dtype)
        if types.is_decimal(dtype):
            return decimals(spans, null, dtype)
        return from_texts(spans.texts(~null), dtype, self._options)
