"""The columns of a read: for each its types, and the builder of its Arrow arrays.

A task makes one builder for each column that is wanted; it builds one array for each piece of
a batch, and may keep arrays between pieces.
"""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, TimestampType

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import Metadata

if TYPE_CHECKING:
    from opendata_buffer.consumer.fetch import Records

__all__ = ["COLUMNS", "Column", "ColumnBuilder", "MAX_TIME_MS", "MIN_TIME_MS", "Piece", "Runs"]


# ---- Metadata ranges of a batch as runs of rows. Pure. ----
#
# A range is a run length: it says something about every record from its start to the next one's.
# As runs, ranges become columns by decoding an Arrow run-end array, never a Python row.


@dataclass(frozen=True, slots=True)
class Runs:
    """``values[i]`` holds up to row ``ends[i]``, exclusive, and from where the run before ends."""

    ends: list[int]
    values: list[Metadata | None]

    @classmethod
    def of(cls, ranges: Sequence[Metadata], count: int) -> Runs:
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

    def cut(self, start: int, stop: int) -> Runs:
        """The runs of rows [start, stop), counted from ``start``."""
        first = bisect_right(self.ends, start)
        last = bisect_right(self.ends, stop - 1)
        ends = [*(end - start for end in self.ends[first:last]), stop - start]
        return Runs(ends, self.values[first : last + 1])

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
        import pyarrow.compute as pc  # 40 ms, and who plans a query makes no rows

        encoded = pa.RunEndEncodedArray.from_arrays(
            pa.array(self.ends, pa.int32()), pa.array(values, dtype)
        )
        return pc.run_end_decode(encoded)


_DAY_MS = 24 * 60 * 60 * 1000
_EPOCH = datetime.date(1970, 1, 1)
# A day inside the years 1 to 9999, so that no session time zone moves a time out of what
# datetime and Spark's SQL functions can hold.
MIN_TIME_MS = (datetime.date(1, 1, 2) - _EPOCH).days * _DAY_MS
MAX_TIME_MS = (datetime.date(9999, 12, 31) - _EPOCH).days * _DAY_MS - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive rows of one batch.

    Attributes:
        batch: The batch; its arrays are not touched.
        values: The records of the rows, of type ``pa.binary()``.
        runs: The metadata ranges of the rows, counted from the first.
        begin: Index in the batch of the first row.
        partition: Of the source, that the batch is in.
    """

    batch: Records
    values: pa.BinaryArray
    runs: Runs
    begin: int
    partition: str

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.values)


class ColumnBuilder(Protocol):
    """Builds one column."""

    def build(self, piece: Piece) -> pa.Array:
        """The column's array, one value for each row of the piece.

        Raises:
            InvalidInput: A STRING column was asked for and its bytes are not UTF-8.
        """
        ...


@dataclass(frozen=True, slots=True)
class Column:
    """What there is to know of a column before it is read.

    Attributes:
        types: Types that a user schema may ask for, the default first.
        builder: Makes a builder of one Arrow type.
        nullable: Whether rows may have none: those that no metadata range covers.
        by_default: Whether a read without ``.schema(...)`` has it.
    """

    types: tuple[type[DataType], ...]
    builder: Callable[[pa.DataType], ColumnBuilder]
    nullable: bool = False
    by_default: bool = True


class _Values:
    """The records themselves."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype

    def build(self, piece: Piece) -> pa.Array:
        if piece.values.type == self._dtype:
            return piece.values
        try:
            return piece.values.cast(self._dtype)
        except pa.ArrowInvalid as error:
            row = piece.begin + _first_invalid(piece.values, self._dtype)
            raise InvalidInput(
                f"record {row} of batch {piece.batch.sequence} at {piece.batch.location!r} is not "
                "UTF-8, and the schema wants value as STRING: read value as BINARY and decode it "
                "there"
            ) from error


class _Constant:
    """One value on every row; consecutive pieces with the same value share the array."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._value: Any = None
        self._array: pa.Array | None = None

    def repeat(self, value: Any, count: int) -> pa.Array:
        if self._array is None or self._value != value or len(self._array) < count:
            self._value = value
            self._array = pa.repeat(pa.scalar(value, self._dtype), count)
        return self._array.slice(0, count)


class _PerRange:
    """One value for each metadata range, expanded to its rows."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._constant = _Constant(dtype)

    def build(self, piece: Piece) -> pa.Array:
        values = self.values_of(piece)
        if len(values) == 1:
            return self._constant.repeat(values[0], piece.count)
        return piece.runs.expand(values, self._dtype)

    def values_of(self, piece: Piece) -> list[Any]:
        raise NotImplementedError


class _Payloads(_PerRange):
    """The metadata payload of each record."""

    def values_of(self, piece: Piece) -> list[Any]:
        payloads = [None if each is None else each.payload for each in piece.runs.values]
        if not pa.types.is_string(self._dtype):
            return payloads
        try:
            return [None if each is None else each.decode() for each in payloads]
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"metadata of batch {piece.batch.sequence} at {piece.batch.location!r} is not "
                "UTF-8, and the schema wants it as STRING: read metadata as BINARY"
            ) from error


class _Times(_PerRange):
    """The ingestion time of each record; null for one that Spark cannot hold."""

    def values_of(self, piece: Piece) -> list[Any]:
        return [_time_micros(each) for each in piece.runs.values]


class _Indexes:
    """Positions of records in their batch."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._counter: pa.Array | None = None

    def build(self, piece: Piece) -> pa.Array:
        end = piece.begin + piece.count
        if self._counter is None or len(self._counter) < end:
            # Grown by doubling and sliced, so that counting costs nothing per batch.
            size = max(end, 2 * len(self._counter) if self._counter is not None else 1024)
            size = min(size, (1 << 31) - 1)
            import pyarrow.compute as pc  # 40 ms, and who plans a query makes no rows

            ones = pa.repeat(pa.scalar(1, self._dtype), size)
            self._counter = pc.cumulative_sum(ones, start=pa.scalar(-1, self._dtype))
        return self._counter.slice(piece.begin, piece.count)


class _Sequences:
    """Positions of batches in the queue."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._constant = _Constant(dtype)

    def build(self, piece: Piece) -> pa.Array:
        return self._constant.repeat(piece.batch.sequence, piece.count)


class _Partitions:
    """Names of the partitions that batches are in."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._constant = _Constant(dtype)

    def build(self, piece: Piece) -> pa.Array:
        return self._constant.repeat(piece.partition, piece.count)


class _Locations:
    """Keys of the batch objects."""

    def __init__(self, dtype: pa.DataType) -> None:
        self._constant = _Constant(dtype)

    def build(self, piece: Piece) -> pa.Array:
        return self._constant.repeat(piece.batch.location, piece.count)


COLUMNS: dict[str, Column] = {
    "value": Column((BinaryType, StringType), _Values),
    "metadata": Column((BinaryType, StringType), _Payloads, nullable=True),
    # Of a topic; in a queue it is the same on every row.
    "partition": Column((StringType,), _Partitions, by_default=False),
    "sequence": Column((LongType,), _Sequences),
    "index": Column((IntegerType,), _Indexes),
    "ingestion_time": Column((TimestampType,), _Times, nullable=True),
    "location": Column((StringType,), _Locations, by_default=False),
    # The same as "index", which Python's `row.index` does not reach: a Row is a tuple, and
    # tuple.index is a method.
    "record_index": Column((IntegerType,), _Indexes, by_default=False),
}
"""The columns by name, in the order of a read without ``.schema(...)``."""


def _time_micros(metadata: Metadata | None) -> int | None:
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
