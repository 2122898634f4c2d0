"""Cut batches into pieces, and build Arrow record batches with columns from them.

A batch has records, and ranges of records with metadata and a time. A row has these columns::

    value, metadata, partition, sequence, index, ingestion_time,
    location, otel_signal, otel_encoding

Or the columns are the fields of the records, which :class:`.Decoder` reads. Then the other columns
have names with an underscore (:data:`.batches.OWN`).

A :class:`RowBuilder` has one builder for each column. A builder makes one array for each piece, and
may reuse arrays for later pieces. Small batches are built together: a call of Arrow's reader takes
as long as some hundred records.
"""

from __future__ import annotations

import datetime
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer import metrics
from opendata_buffer.errors import InvalidInput, MalformedRecord
from opendata_buffer.formats import MIB
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.values import DROPMALFORMED, FAILFAST, DecodedColumns, Decoder, ValueOptions

log = logging.getLogger(__name__)

PIECE_BYTES = 4 * MIB
"""Bytes of values (and of metadata) in one record batch, unless a single row has more.

Each record batch costs the worker and the JVM some fixed work, which a large one spreads over more
rows.
"""

TYPED_PIECE_BYTES = 2 * MIB
"""As :data:`PIECE_BYTES`, for records that are read into columns. Smaller, so that the intermediate
results of the decoder stay in a processor's cache."""

PIECE_ROWS = 256 * 1024  # Most rows of a record batch; bounds the columns other than values.

_DAY_MS = 24 * 60 * 60 * 1000
_EPOCH = datetime.date(1970, 1, 1)
# One day inside the years 1 to 9999. So no session time zone can move a time out of the range of
# datetime and Spark's SQL functions.
MIN_TIME_MS = (datetime.date(1, 1, 2) - _EPOCH).days * _DAY_MS
MAX_TIME_MS = (datetime.date(9999, 12, 31) - _EPOCH).days * _DAY_MS - 1


@dataclass(frozen=True, slots=True)
class Runs:
    """Metadata ranges of a batch as runs of rows: run ``i`` ends before row ``ends[i]``.

    Attributes:
        ends: The row after each run.
        values: The metadata of each run; None for rows that no range covers.
    """

    ends: list[int]
    values: list[Metadata | None]

    @classmethod
    def of(cls, ranges: Sequence[Metadata], count: int) -> Runs:
        """Cut the ranges to the existing rows.

        A range ends where the next one starts; the last range ends with the batch. A start past the
        end of the batch is legal. If ranges are out of order and overlap, the one that is later in
        the list wins.

        Args:
            ranges: The metadata ranges of the batch.
            count: Records in the batch.

        Returns:
            The runs, which cover all rows.
        """
        starts: list[int] = []
        values: list[Metadata | None] = []
        if not ranges or ranges[0].start_index > 0:
            starts.append(0)
            values.append(None)
        for each in ranges:
            # This range covers all earlier ranges that begin at or after its start.
            while starts and starts[-1] >= each.start_index:
                starts.pop()
                values.pop()
            starts.append(each.start_index)
            values.append(each)
        visible = sum(1 for start in starts if start < count)
        return cls([*starts[1:visible], count], values[:visible])

    def cut(self, start: int, stop: int) -> Runs:
        """Return the runs of rows [start, stop), counted from ``start``."""
        first = bisect_right(self.ends, start)
        last = bisect_right(self.ends, stop - 1)
        ends = [*(end - start for end in self.ends[first:last]), stop - start]
        return Runs(ends, self.values[first : last + 1])

    def fit(self, start: int, limit: int, most_bytes: int) -> int:
        """Find the largest end in (start, limit] within a limit on payload bytes.

        A payload counts once for each of its rows. A single row may exceed the limit.

        Args:
            start: The first row.
            limit: The row to stop at.
            most_bytes: Most payload bytes on the rows.

        Returns:
            The row after the last one that fits.
        """
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
        """Return one array with ``values[i]`` on every row of run ``i``."""
        encoded = pa.RunEndEncodedArray.from_arrays(
            pa.array(self.ends, pa.int32()), pa.array(values, dtype)
        )
        return pc.run_end_decode(encoded)


class Located(Protocol):
    """A batch, as far as the columns of its rows show it."""

    @property
    def sequence(self) -> int:
        """The batch's position in the queue."""

    @property
    def location(self) -> str:
        """The key of the batch object."""


class Records(Located, Protocol):
    """An opened batch; see :class:`.fetch.Records`."""

    @property
    def count(self) -> int:
        """The number of records."""

    @property
    def arrays(self) -> Iterator[pa.BinaryArray]:
        """The records, decoded one array after the other."""

    @property
    def metadata(self) -> Sequence[Metadata]:
        """The ranges of records."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one batch.

    Attributes:
        batch: The batch.
        values: The records of the rows.
        runs: The metadata of the rows.
        begin: The index of the first row in the batch.
        partition: The name of the batch's partition.
    """

    batch: Located
    values: pa.BinaryArray
    runs: Runs
    begin: int
    partition: str


Build = Callable[[Piece], pa.Array]
"""Builds one column: an array with one value for each row of a piece."""


class RowBuilder:
    """Builds record batches of one schema. Not thread-safe.

    Args:
        schema: The columns to build.
        own: The buffer's column for each column of the schema that comes from one. The other
            columns are fields of records.
        values: How to read records into columns; None to deliver them as they are.
        piece_bytes: Most bytes of values, and of metadata, in a piece; a single row may have more.
        piece_rows: Most rows in a piece.
        threads: Let several threads read the records of one record batch.

    Raises:
        InvalidInput: The fields of records cannot be read, as for :class:`.Decoder`.
    """

    def __init__(
        self,
        schema: pa.Schema,
        own: Mapping[str, str],
        values: ValueOptions | None = None,
        *,
        piece_bytes: int | None = None,
        piece_rows: int = PIECE_ROWS,
        threads: bool = False,
    ) -> None:
        self.schema = schema
        self._decoder = None
        self._mode = ""
        if values is not None:
            fields = [field for field in schema if field.name not in own]
            self._decoder = Decoder(pa.schema(fields), values)
            self._mode = values.mode
        self._builders = {
            name: COLUMN_BUILDERS[column](schema.field(name).type) for name, column in own.items()
        }
        self._reads_metadata = "metadata" in own.values()
        self._reads_values = values is not None or "value" in own.values()
        self.piece_bytes = piece_bytes or (PIECE_BYTES if values is None else TYPED_PIECE_BYTES)
        self._piece_rows = piece_rows
        self._threads = threads

    def pieces(
        self, batch: Records, partition: str = "", rows: range | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a batch as record batches, in order.

        Args:
            batch: The opened batch.
            partition: The name of its partition.
            rows: The rows to deliver; None for all.

        Returns:
            An iterator of record batches of the schema, without any if the batch has no rows.

        Raises:
            BatchUnreadable: A record array does not decode.
            InvalidInput: A record or its metadata is not UTF-8, and the column is a STRING.
            MalformedRecord: A record does not fit the schema, in mode FAILFAST.
        """
        # Unlike a loop, map() keeps no piece in memory while the caller works with the rows.
        return map(self._build_one, self.cut(batch, partition, rows))

    def cut(
        self, batch: Records, partition: str = "", rows: range | None = None
    ) -> Iterator[Piece]:
        """Cut a batch into pieces, in order.

        Args:
            batch: The opened batch.
            partition: The name of its partition.
            rows: The rows to deliver; None for all.

        Yields:
            The pieces, which have at least one row.

        Raises:
            BatchUnreadable: A record array does not decode.
        """
        runs = Runs.of(batch.metadata, batch.count)
        wanted = range(batch.count) if rows is None else rows
        first = 0  # The row of the batch where the array begins.
        for values in batch.arrays:
            if first >= wanted.stop:
                return  # Other tasks decode the rest.
            size = len(values)
            begin, count = max(0, wanted.start - first), min(size, wanted.stop - first)
            while begin < count:
                end = min(count, begin + self._piece_rows)
                if self._reads_metadata:
                    end = runs.fit(first + begin, first + end, self.piece_bytes) - first
                end = self._cut(values, begin, end)
                cut = runs.cut(first + begin, first + end)
                # In one expression, because a variable would keep this piece in memory until the
                # next one is made.
                yield Piece(batch, values.slice(begin, end - begin), cut, first + begin, partition)
                begin = end
            first += size
            del values  # Free its memory before the next array is decoded.

    def _build_one(self, piece: Piece) -> pa.RecordBatch:
        return self.build((piece,))

    def build(self, pieces: Sequence[Piece]) -> pa.RecordBatch:
        """Build one record batch.

        Args:
            pieces: At least one piece.

        Returns:
            The rows of the pieces, in order. With the mode DROPMALFORMED these are not all.

        Raises:
            InvalidInput: A record or its metadata is not UTF-8, and the column is a STRING.
            MalformedRecord: A record does not fit the schema, in mode FAILFAST.
        """
        columns = {
            name: _joined([build(piece) for piece in pieces])
            for name, build in self._builders.items()
        }
        if self._decoder is None:
            return pa.RecordBatch.from_arrays(
                [columns[name] for name in self.schema.names], schema=self.schema
            )
        values = _joined([piece.values for piece in pieces])
        decoded = self._decoder.decode(values, threads=self._threads)
        for field, array in zip(self._decoder.schema, decoded.arrays, strict=True):
            columns[field.name] = array
        rows = pa.RecordBatch.from_arrays(
            [columns[field.name] for field in self.schema], schema=self.schema
        )
        return self._without_malformed(rows, pieces, decoded)

    def _without_malformed(
        self, rows: pa.RecordBatch, pieces: Sequence[Piece], decoded: DecodedColumns
    ) -> pa.RecordBatch:
        """Return the rows to deliver; without malformed ones if ``mode`` is DROPMALFORMED."""
        malformed = decoded.malformed
        if malformed:
            first = min(malformed)
            piece, row = _find(pieces, first)
            batch, record = piece.batch, piece.values[row].as_py()
            assert self._decoder is not None, "it has decoded the records"
            if self._mode == FAILFAST:
                reason = self._decoder.explain(record, malformed[first])
                raise MalformedRecord(
                    batch.sequence, piece.begin + row, batch.location, reason, record
                )
            metrics.records_malformed.add(len(malformed))
            if self._mode == DROPMALFORMED:
                metrics.records_dropped.add(len(malformed))
                log.warning(
                    "%d malformed records left out; in batch %d the first is record %d, at %r: %s",
                    len(malformed),
                    batch.sequence,
                    piece.begin + row,
                    batch.location,
                    self._decoder.explain(record, malformed[first]),
                )
        return decoded.delivered(rows, self._mode)

    def _cut(self, values: pa.BinaryArray, begin: int, limit: int) -> int:
        """Return the largest end in (begin, limit] with at most ``piece_bytes`` of values.

        A single row may have more.
        """
        if not self._reads_values:
            return limit
        offsets: memoryview[int] = memoryview(values.buffers()[1]).cast("i")
        at = values.offset
        most = offsets[at + begin] + self.piece_bytes
        if offsets[at + limit] <= most:
            return limit
        end: int = bisect_right(offsets, most, at + begin, at + limit) - 1 - at
        return max(begin + 1, end)


def rows_of(batch: Any) -> pa.RecordBatchReader:
    """Return the rows of a delivered batch, with the default columns.

    Args:
        batch: The batch, whose ``values`` are a list or an Arrow array.

    Returns:
        The rows.
    """
    values = (
        batch.values if isinstance(batch.values, pa.Array) else pa.array(batch.values, pa.binary())
    )
    names = default_columns(partition=bool(batch.partition))
    schema = pa.schema([(name, COLUMN_TYPES[name]) for name in names])
    builder = RowBuilder(schema, {name: name for name in names})
    rows = [builder.build([piece]) for piece in _whole(batch, values)]
    return pa.RecordBatchReader.from_batches(schema, rows)


def table_of(
    batch: Any, schema: pa.Schema, own: Mapping[str, str], options: ValueOptions
) -> pa.Table:
    """Return the records of a delivered batch as rows with columns.

    Args:
        batch: The batch, whose ``values`` are an Arrow array.
        schema: Fields of records, and columns of the batch.
        own: As for :class:`RowBuilder`.
        options: How to read the records.

    Returns:
        The rows.

    Raises:
        InvalidInput: As for :class:`RowBuilder` and :meth:`RowBuilder.build`.
        MalformedRecord: A record does not fit the schema, in mode FAILFAST.
    """
    builder = RowBuilder(schema, own, options)
    rows = [builder.build([piece]) for piece in _whole(batch, batch.values)]
    return pa.Table.from_batches(rows, schema)


def _whole(batch: Any, values: pa.BinaryArray) -> list[Piece]:
    """Return the batch in one piece; none if it has no rows."""
    runs = Runs.of(batch.metadata, len(values))
    return [Piece(batch, values, runs, 0, batch.partition)] if len(values) else []


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _find(pieces: Sequence[Piece], row: int) -> tuple[Piece, int]:
    """Return the piece of a row, and the number of the row in it."""
    for piece in pieces:
        if row < len(piece.values):
            return piece, row
        row -= len(piece.values)
    raise AssertionError("the row is in none of the pieces")


class _Values:
    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype

    def __call__(self, piece: Piece) -> pa.Array:
        if piece.values.type == self._dtype:
            return piece.values
        try:
            return piece.values.cast(self._dtype)
        except pa.ArrowInvalid as error:
            records = enumerate(piece.values.to_pylist(), piece.begin)
            # Decoding that ignores invalid bytes changes exactly the records that have some.
            row = next(
                row for row, each in records if each.decode(errors="ignore").encode() != each
            )
            raise InvalidInput(
                f"record {row} of batch {piece.batch.sequence} at {piece.batch.location!r} is not "
                "UTF-8, and the schema wants value as STRING: read value as BINARY and decode it "
                "there"
            ) from error


class _Repeated:
    """Builds a column with one value per metadata range, or with one value for all rows.

    In the second case, later pieces share the array.
    """

    def __init__(
        self, dtype: pa.DataType, values_of: Callable[[Piece, pa.DataType], list[Any]]
    ) -> None:
        self._dtype = dtype
        self._values_of = values_of
        self._value: Any = None
        self._array: pa.Array | None = None

    def __call__(self, piece: Piece) -> pa.Array:
        values, count = self._values_of(piece, self._dtype), len(piece.values)
        if len(values) > 1:
            return piece.runs.expand(values, self._dtype)
        if self._array is None or self._value != values[0] or len(self._array) < count:
            self._value = values[0]
            self._array = pa.repeat(pa.scalar(values[0], self._dtype), count)
        return self._array.slice(0, count)


def _payloads(piece: Piece, dtype: pa.DataType) -> list[Any]:
    payloads = [None if each is None else each.payload for each in piece.runs.values]
    if not pa.types.is_string(dtype):
        return payloads
    try:
        return [None if each is None else each.decode() for each in payloads]
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"metadata of batch {piece.batch.sequence} at {piece.batch.location!r} is not "
            "UTF-8, and the schema wants it as a string: read metadata as binary"
        ) from error


def _times(piece: Piece, dtype: pa.DataType) -> list[Any]:
    """Return the times in the unit of the type; None for no time or one that Spark cannot hold."""
    unit = 1000 if dtype.unit == "us" else 1
    times = (None if each is None else each.ingestion_time_ms for each in piece.runs.values)
    return [
        None if ms is None or not MIN_TIME_MS <= ms <= MAX_TIME_MS else ms * unit for ms in times
    ]


OTEL_VERSION = 1
OTEL_SIGNALS = {1: "metrics", 2: "logs", 3: "traces"}
OTEL_ENCODINGS = {1: "otlp_protobuf"}


def _otel(names: dict[int, str], at: int) -> Callable[[pa.DataType], Build]:
    """Return the function that makes a column builder for one byte of the exporter's metadata.

    The bytes are version, signal, encoding and 0.
    """

    def named(piece: Piece, _: pa.DataType) -> list[Any]:
        payloads = (b"" if each is None else each.payload for each in piece.runs.values)
        return [
            names.get(each[at]) if len(each) >= 4 and each[0] == OTEL_VERSION else None
            for each in payloads
        ]

    return lambda dtype: _Repeated(dtype, named)


class _Indexes:
    def __init__(self, dtype: pa.DataType) -> None:
        self._dtype = dtype
        self._counter: pa.Array | None = None

    def __call__(self, piece: Piece) -> pa.Array:
        end = piece.begin + len(piece.values)
        if self._counter is None or len(self._counter) < end:
            # The counter grows by doubling, and is sliced, so that most batches need no counting.
            size = max(end, 2 * len(self._counter) if self._counter is not None else 1024)
            size = min(size, (1 << 31) - 1)
            ones = pa.repeat(pa.scalar(1, self._dtype), size)
            self._counter = pc.cumulative_sum(ones, start=pa.scalar(-1, self._dtype))
        return self._counter.slice(piece.begin, len(piece.values))


COLUMN_TYPES: dict[str, pa.DataType] = {
    "value": pa.binary(),
    "metadata": pa.binary(),
    "partition": pa.string(),
    "sequence": pa.int64(),
    "index": pa.int32(),
    "ingestion_time": pa.timestamp("us", "UTC"),
    "location": pa.string(),
    "otel_signal": pa.string(),
    "otel_encoding": pa.string(),
}
"""The columns of a buffer, with the types that they have by default."""


def default_columns(*, partition: bool) -> list[str]:
    """Return the columns that rows have if the caller names none.

    Args:
        partition: Whether the batches come from a topic.

    Returns:
        The names, in order.
    """
    names = ["value", "metadata", "sequence", "index", "ingestion_time"]
    return [*names[:2], "partition", *names[2:]] if partition else names


COLUMN_BUILDERS: dict[str, Callable[[pa.DataType], Build]] = {
    "value": _Values,
    "metadata": lambda dtype: _Repeated(dtype, _payloads),
    "partition": lambda dtype: _Repeated(dtype, lambda piece, _: [piece.partition]),
    "sequence": lambda dtype: _Repeated(dtype, lambda piece, _: [piece.batch.sequence]),
    "index": _Indexes,
    "ingestion_time": lambda dtype: _Repeated(dtype, _times),
    "location": lambda dtype: _Repeated(dtype, lambda piece, _: [piece.batch.location]),
    "otel_signal": _otel(OTEL_SIGNALS, 1),
    "otel_encoding": _otel(OTEL_ENCODINGS, 2),
}
"""Functions that make the builder of a column for one of its Arrow types, by name of the column."""
