"""From decoded batches to the rows Spark sees: Arrow record batches, never a Python row.

Metadata ranges are run lengths, so they become columns by decoding an Arrow run-end array.
"""

from __future__ import annotations

import datetime
import difflib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from opendata_buffer.consumer.descriptors import Records
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import Metadata

__all__ = ["PIECE_BYTES", "RowBuilder", "check_schema", "default_schema", "time_micros"]

PIECE_BYTES = 1024 * 1024
"""Bytes of values (and of metadata) in one record batch, unless a single row has more."""

PIECE_ROWS = 256 * 1024
"""Rows in one record batch at most; bounds the columns that are not values."""

_DAY_MS = 24 * 60 * 60 * 1000
_EPOCH = datetime.date(1970, 1, 1)
# A day inside the years 1 to 9999, so that no session time zone moves a time out of what
# datetime and Spark's SQL functions can hold.
MIN_TIME_MS = (datetime.date(1, 1, 2) - _EPOCH).days * _DAY_MS
MAX_TIME_MS = (datetime.date(9999, 12, 31) - _EPOCH).days * _DAY_MS - 1

_COLUMNS: dict[str, tuple[type[DataType], ...]] = {
    "value": (BinaryType, StringType),
    "metadata": (BinaryType, StringType),
    "sequence": (LongType,),
    "index": (IntegerType,),
    "ingestion_time": (TimestampType,),
    "location": (StringType,),
}
"""Column names and the types a user schema may ask for, the default first."""

_NULLABLE = ("metadata", "ingestion_time")
"""Rows that no metadata range covers have neither."""


def default_schema(include_location: bool = False) -> StructType:
    """The schema of a read without ``.schema(...)``."""
    names = [name for name in _COLUMNS if include_location or name != "location"]
    return StructType([StructField(name, _COLUMNS[name][0]()) for name in names])


def check_schema(schema: StructType) -> None:
    """Accept any subset of the columns in any order.

    Raises:
        InvalidInput: An unknown column, a repeated one, one of another type, or NOT NULL for
            one that may be null.
    """
    seen: set[str] = set()
    for field in schema.fields:
        name = field.name.lower()
        accepted = _COLUMNS.get(name)
        if accepted is None:
            near = difflib.get_close_matches(name, _COLUMNS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidInput(
                f"schema has the column {field.name!r}, which an opendata-buffer does not have."
                f"{hint} Columns: {', '.join(_COLUMNS)}. Read records with "
                "from_json(value, schema) after loading."
            )
        if name in seen:
            raise InvalidInput(f"schema has the column {field.name!r} twice")
        seen.add(name)
        if not isinstance(field.dataType, accepted):
            types = " or ".join(each().simpleString().upper() for each in accepted)
            raise InvalidInput(
                f"schema wants column {field.name!r} as "
                f"{field.dataType.simpleString().upper()}: it is {types}. Cast it after loading."
            )
        if name in _NULLABLE and not field.nullable:
            raise InvalidInput(
                f"schema wants column {field.name!r} NOT NULL: records that were written without "
                "metadata have null there. Leave NOT NULL out, and drop such rows after loading."
            )
    if not seen:
        raise InvalidInput(f"schema has no column: use any of {', '.join(_COLUMNS)}")


@dataclass(frozen=True, slots=True)
class _Runs:
    """Metadata ranges as runs of rows: ``values[i]`` holds up to row ``ends[i]``, exclusive."""

    ends: list[int]
    values: list[Metadata | None]

    @classmethod
    def of(cls, ranges: Sequence[Metadata], count: int) -> _Runs:
        """Cut the ranges to the rows there are.

        A range reaches to where the next one starts, the last to the end. Rows before the
        first range, and all rows without one, have none. Starts beyond the end are legal and
        cover nothing; of ranges out of order the later in the list wins where they overlap.
        """
        starts: list[int] = []
        values: list[Metadata | None] = []
        if not ranges or ranges[0].start_index > 0:
            starts.append(0)
            values.append(None)
        for each in ranges:
            # Ranges that begin at or after this one are covered by it from here on.
            while starts and starts[-1] >= each.start_index:
                starts.pop()
                values.pop()
            starts.append(each.start_index)
            values.append(each)
        visible = sum(1 for start in starts if start < count)
        return cls([*starts[1:visible], count], values[:visible])

    def cut(self, start: int, stop: int) -> _Runs:
        """The runs of rows [start, stop), counted from ``start``."""
        first = bisect_right(self.ends, start)
        last = bisect_right(self.ends, stop - 1)
        ends = [*(end - start for end in self.ends[first:last]), stop - start]
        return _Runs(ends, self.values[first : last + 1])

    def fit(self, start: int, limit: int, most_bytes: int) -> int:
        """The largest end in (start, limit] with at most so many bytes of payload on its rows."""
        end, left = start, most_bytes
        for run in range(bisect_right(self.ends, start), len(self.ends)):
            value = self.values[run]
            size = 0 if value is None else len(value.payload)
            stop = min(limit, self.ends[run])
            if size * (stop - end) > left:
                return max(start + 1, end + left // size)
            left -= size * (stop - end)
            end = stop
            if end == limit:
                break
        return end

    def expand(self, values: list[Any], dtype: pa.DataType) -> pa.Array:
        """One array with ``values[i]`` on every row of run ``i``."""
        encoded = pa.RunEndEncodedArray.from_arrays(
            pa.array(self.ends, pa.int32()), pa.array(values, dtype)
        )
        return pc.run_end_decode(encoded)


class RowBuilder:
    """Builds record batches of one schema; made once in a task.

    Args:
        schema: A schema :func:`check_schema` accepts.
        piece_bytes: Bytes of values or metadata in a piece, unless a single row has more.
        piece_rows: Rows in a piece at most.
    """

    def __init__(
        self, schema: StructType, *, piece_bytes: int = PIECE_BYTES, piece_rows: int = PIECE_ROWS
    ) -> None:
        # Spark compares with this schema, and not by name only.
        try:
            self.schema = to_arrow_schema(schema, timezone="UTC")
        except TypeError:  # Spark 4.1, where it is UTC anyway
            self.schema = to_arrow_schema(schema)
        self._names = [name.lower() for name in self.schema.names]
        self._piece_bytes = piece_bytes
        self._piece_rows = piece_rows
        self._counter: pa.Array | None = None
        self._constants: dict[str, tuple[Any, pa.Array]] = {}

    def pieces(self, batch: Records) -> Iterator[pa.RecordBatch]:
        """The batch as record batches in row order; none if it has no records.

        Raises:
            BatchUnreadable: A record array could not be decoded.
            InvalidInput: A STRING column was asked for and a record is not UTF-8.
        """
        runs = _Runs.of(batch.metadata, batch.count)
        first = 0  # row of the batch that the array begins with
        for values in batch.arrays:
            begin, count = 0, len(values)
            while begin < count:
                end = min(count, begin + self._piece_rows)
                if "metadata" in self._names:
                    end = runs.fit(first + begin, first + end, self._piece_bytes) - first
                end = self._cut(values, begin, end)
                yield self._piece(batch, values.slice(begin, end - begin), runs, first + begin)
                begin = end
            first += count
            del values  # or its memory is not free when the next one is decoded

    def _cut(self, values: pa.BinaryArray, begin: int, limit: int) -> int:
        """The largest end in (begin, limit] with at most ``piece_bytes`` of values."""
        if "value" not in self._names:
            return limit
        offsets: memoryview[int] = memoryview(values.buffers()[1]).cast("i")
        at = values.offset
        most = offsets[at + begin] + self._piece_bytes
        if offsets[at + limit] <= most:
            return limit
        end: int = bisect_right(offsets, most, at + begin, at + limit) - 1 - at
        return max(begin + 1, end)

    def _piece(
        self, batch: Records, values: pa.BinaryArray, runs: _Runs, begin: int
    ) -> pa.RecordBatch:
        count = len(values)
        runs = runs.cut(begin, begin + count)
        columns = []
        for name, field in zip(self._names, self.schema, strict=True):
            match name:
                case "value":
                    columns.append(self._values(batch, values, begin, field.type))
                case "metadata":
                    columns.append(self._metadata(batch, runs, field.type))
                case "sequence":
                    columns.append(self._constant(name, batch.sequence, field.type, count))
                case "index":
                    columns.append(self._indexes(begin, begin + count))
                case "ingestion_time":
                    times = [time_micros(each) for each in runs.values]
                    columns.append(self._expand(name, runs, times, field.type))
                case _:
                    columns.append(self._constant(name, batch.location, field.type, count))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _values(
        self, batch: Records, values: pa.BinaryArray, begin: int, dtype: pa.DataType
    ) -> pa.Array:
        if values.type == dtype:
            return values
        try:
            return values.cast(dtype)
        except pa.ArrowInvalid as error:
            row = begin + _first_invalid(values, dtype)
            raise InvalidInput(
                f"record {row} of batch {batch.sequence} at {batch.location!r} is not UTF-8, and "
                "the schema wants value as STRING: read value as BINARY and decode it there"
            ) from error

    def _metadata(self, batch: Records, runs: _Runs, dtype: pa.DataType) -> pa.Array:
        payloads = [None if each is None else each.payload for each in runs.values]
        if not pa.types.is_string(dtype):
            return self._expand("metadata", runs, payloads, dtype)
        try:
            texts = [None if each is None else each.decode() for each in payloads]
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"metadata of batch {batch.sequence} at {batch.location!r} is not UTF-8, and the "
                "schema wants it as STRING: read metadata as BINARY"
            ) from error
        return self._expand("metadata", runs, texts, dtype)

    def _expand(self, column: str, runs: _Runs, values: list[Any], dtype: pa.DataType) -> pa.Array:
        if len(values) == 1:
            return self._constant(column, values[0], dtype, runs.ends[0])
        return runs.expand(values, dtype)

    def _constant(self, column: str, value: Any, dtype: pa.DataType, length: int) -> pa.Array:
        """``value`` on every row; pieces of one batch share the array."""
        known = self._constants.get(column)
        if known is None or known[0] != value or len(known[1]) < length:
            known = self._constants[column] = (value, pa.repeat(pa.scalar(value, dtype), length))
        return known[1].slice(0, length)

    def _indexes(self, begin: int, end: int) -> pa.Array:
        if self._counter is None or len(self._counter) < end:
            # Grown by doubling and sliced, so that counting costs nothing per batch.
            size = max(end, 2 * len(self._counter) if self._counter is not None else 1024)
            size = min(size, (1 << 31) - 1)
            ones = pa.repeat(pa.scalar(1, pa.int32()), size)
            self._counter = pc.cumulative_sum(ones, start=pa.scalar(-1, pa.int32()))
        return self._counter.slice(begin, end - begin)


def time_micros(metadata: Metadata | None) -> int | None:
    """Microseconds since the Unix epoch, or None for no time or one Spark cannot hold."""
    if metadata is None or not MIN_TIME_MS <= metadata.ingestion_time_ms <= MAX_TIME_MS:
        return None
    return metadata.ingestion_time_ms * 1000


def _first_invalid(values: pa.Array, dtype: pa.DataType) -> int:
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            values.slice(low, middle - low).cast(dtype)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
