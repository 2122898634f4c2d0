"""The work of a task on an executor: download ahead, decode, and cut into rows for Spark.

The rows are Arrow record batches, never Python rows. A task makes one :class:`RowBuilder`, which
has one builder for each requested column. A batch is cut into pieces. Each column builder makes one
array per piece, and may reuse arrays for later pieces.

A task also adds the query's id to the info about the queue's consumer, because Spark does not pass
the id to the process that claims the queue.
"""

from __future__ import annotations

import datetime
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from buffer_source.options import PROGRAM, SourceOptions
from buffer_source.partitions import ONLY
from buffer_source.planner import PartitionBatch, TaskBatches
from buffer_source.schema import OWN, arrow_schema, record_schema
from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.fetch import (
    AdaptiveConcurrency,
    FetchHandle,
    PooledBatch,
    Records,
    fetch_many,
    or_poison,
)
from opendata_buffer.errors import (
    BatchMissing,
    InvalidInput,
    MalformedRecord,
    OpenDataBufferError,
    PoisonBatch,
)
from opendata_buffer.formats import MIB
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.option_reader import in_options
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.consumer_note import amend_consumer_info, read_consumer_info
from opendata_buffer.runtime import Interval, Runtime, SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.values import DROPMALFORMED, FAILFAST, DecodedColumns, Decoder, ValueOptions

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 64 * MIB  # Stored bytes that a task may have downloaded but not decoded.
RECORD_INTERVAL_S = 60.0  # How often a process records the id of one query.


_recorded = dict[object, Interval]()  # By queue and query.


def record_query_id(config: QueueConfig, query: str, runtime: Runtime) -> None:
    """Add the id of a query that reads this queue to the consumer info, in the background.

    Does so at most once a minute, returns at once, and raises nothing.
    """
    queue = (config.store, config.manifest_path, query)
    if not _recorded.setdefault(queue, Interval(runtime, RECORD_INTERVAL_S)).is_due():
        return

    def record() -> None:
        try:
            store = open_store(config.store, config.store_options)
            info = read_consumer_info(store, config, runtime)
            # The last task of a fenced query may add its id to the info of the query's successor.
            # That is harmless, because the id is only displayed.
            if info is not None and info.program == PROGRAM and not info.query:
                amend_consumer_info(store, config, runtime, info.epoch, query=query)
        except OpenDataBufferError as error:
            log.debug("the query's id was not recorded beside the queue: %s", error)

    runtime.spawn(record, "opendata-buffer-query-id")


def read_partition(
    options: SourceOptions, schema: StructType, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task's batches in order, while later batches are being downloaded.

    Downloads run ahead within :data:`IN_FLIGHT_BYTES`; decoding does not. A worker holds that many
    stored bytes, one more batch (decompressed if it was compressed), and a few pieces of its rows.

    Args:
        options: The options of the read.
        schema: The columns to deliver.
        partition: The batches of the task.

    Yields:
        Record batches of the schema.

    Raises:
        PoisonBatch: A batch cannot be delivered, and the options do not allow to skip it.
        InvalidInput: As :meth:`.RowBuilder.pieces`.
        MalformedRecord: As :meth:`.RowBuilder.pieces`.
    """
    with in_options():
        # If the plan is empty, Spark calls this with an input partition of its own.
        descriptors = partition.batches if isinstance(partition, TaskBatches) else ()
        if descriptors and options.acknowledge and (query := _query_id()):
            record_query_id(_options_of(options, descriptors[0]).queue, query, SystemRuntime())
        builder = RowBuilder(schema, options.values)
        for batch, records in _readable(options, descriptors, builder.piece_bytes):
            try:
                yield from builder.pieces(records, batch.partition, batch.rows(records.count))
            except PoisonBatch as error:
                options.tolerates(error)  # Most faults appear here, so add the option to the error.
                raise
            del records  # Free its memory before the next batch is decoded.


def _readable(
    options: SourceOptions, descriptors: Sequence[PartitionBatch], array_bytes: int
) -> Iterator[tuple[PartitionBatch, Records]]:
    """Yield the batches that can be delivered, opened one after the other."""
    runtime = SystemRuntime()
    # Spark also repeats a failed task, but not in local mode, and it repeats all of its work.
    retrying = options.queue.retries(runtime)
    handle = _handle(options)
    handles = {
        name: handle if name == ONLY else handle.within(name)
        for name in {each.partition for each in descriptors}
    }

    def fetch(batch: PartitionBatch) -> PooledBatch:
        return handles[batch.partition].fetch_pooled(batch, retrying)

    def pass_by(batch: PartitionBatch, error: PoisonBatch) -> None:
        if isinstance(error, BatchMissing):
            log.warning("data loss allowed: %s", error)
            return
        own = _options_of(options, batch)
        report = retrying(
            quarantine,
            open_store(own.queue.store, own.queue.store_options),
            own.queue.data_path_prefix,
            batch,
            error,
            runtime=runtime,
            query=_query_id(),
        )
        if batch.part == 0:  # Only one of the tasks that share a batch counts it.
            metrics.batches_quarantined.add(1)
        log.warning("batch is in quarantine as %s and passed by: %s", report.id, error)

    fetches = fetch_many(
        or_poison(fetch),
        descriptors,
        max_in_flight_bytes=IN_FLIGHT_BYTES,
        runtime=runtime,
        adaptive=_adaptive_concurrency(options),
    )
    with closing(fetches):
        for batch in descriptors:
            fetched = next(fetches)
            try:
                if isinstance(fetched, PoisonBatch):
                    raise fetched
                records = handles[batch.partition].records(
                    fetched, array_bytes, check_first=options.checks_whole_batch
                )
            except PoisonBatch as error:
                if not options.tolerates(error):
                    raise
                pass_by(batch, error)
                continue
            del fetched  # Otherwise it stays in memory, outside the budget.
            yield batch, records
            del records


def _query_id() -> str:
    """Return the id of the streaming query this task belongs to; "" in a batch read."""
    context = TaskContext.get()
    return "" if context is None else context.getLocalProperty("sql.streaming.queryId") or ""


def _options_of(options: SourceOptions, batch: PartitionBatch) -> SourceOptions:
    """Return the query's options, with the queue of the batch."""
    return options if batch.partition == ONLY else options.of_partition(batch.partition)


@lru_cache(maxsize=32)
def _handle(options: SourceOptions) -> FetchHandle:
    """Return the fetch handle, shared by all tasks of a worker process.

    All partitions share one set of connections.
    """
    return FetchHandle.of(options.consumer, resettable=False)


@lru_cache(maxsize=32)
def _adaptive_concurrency(options: SourceOptions) -> AdaptiveConcurrency:
    """Return the concurrency that the tasks of a worker process adapt to the store."""
    return _handle(options).adaptive_concurrency()


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

    batch: Records
    values: pa.BinaryArray
    runs: Runs
    begin: int
    partition: str


Build = Callable[[Piece], pa.Array]
"""Builds one column: an array with one value for each row of a piece."""


class RowBuilder:
    """Builds record batches of one schema; made once per task.

    Args:
        schema: The columns to deliver.
        values: How to read records into columns; None to deliver them as they are.
        piece_bytes: Most bytes of values, and of metadata, in a piece; a single row may have more.
        piece_rows: Most rows in a piece.
    """

    def __init__(
        self,
        schema: StructType,
        values: ValueOptions | None = None,
        *,
        piece_bytes: int | None = None,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        self.schema = arrow_schema(schema)
        self._decoder = None if values is None else Decoder(record_schema(self.schema), values)
        self._mode = "" if values is None else values.mode
        own = {
            field.name: name
            for field in self.schema
            if (name := field.name.lower() if values is None else OWN.get(field.name, ""))
        }
        self._builders = {
            name: COLUMN_BUILDERS[own[name]](self.schema.field(name).type) for name in own
        }
        self._reads_metadata = "metadata" in own.values()
        self._reads_values = values is not None or "value" in own.values()
        self.piece_bytes = piece_bytes or (PIECE_BYTES if values is None else TYPED_PIECE_BYTES)
        self._piece_rows = piece_rows

    def pieces(
        self, batch: Records, partition: str = ONLY, rows: range | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a batch as record batches, in order.

        Args:
            batch: The opened batch.
            partition: The name of its partition.
            rows: The rows to deliver; None for all.

        Yields:
            Record batches of the schema; nothing if the batch has no rows.

        Raises:
            BatchUnreadable: A record array does not decode.
            InvalidInput: A record or its metadata is not UTF-8, and the column is a STRING.
            MalformedRecord: A record does not fit the schema, in mode FAILFAST.
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
                yield self._build(
                    Piece(batch, values.slice(begin, end - begin), cut, first + begin, partition)
                )
                begin = end
            first += size
            del values  # Free its memory before the next array is decoded.

    def _build(self, piece: Piece) -> pa.RecordBatch:
        columns = {name: build(piece) for name, build in self._builders.items()}
        if self._decoder is None:
            return pa.RecordBatch.from_arrays(list(columns.values()), schema=self.schema)
        decoded = self._decoder.decode(piece.values)
        for field, array in zip(self._decoder.schema, decoded.arrays, strict=True):
            columns[field.name] = array
        arrays = [columns[field.name] for field in self.schema]
        rows = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        return self._without_malformed(rows, piece, decoded)

    def _without_malformed(
        self, rows: pa.RecordBatch, piece: Piece, decoded: DecodedColumns
    ) -> pa.RecordBatch:
        """Return the rows to deliver; without malformed ones if ``mode`` is DROPMALFORMED."""
        malformed, batch = decoded.malformed, piece.batch
        if malformed:
            row = min(malformed)
            where = (batch.sequence, piece.begin + row, batch.location, malformed[row])
            if self._mode == FAILFAST:
                raise MalformedRecord(*where, piece.values[row].as_py())
            metrics.records_malformed.add(len(malformed))
            if self._mode == DROPMALFORMED:
                metrics.records_dropped.add(len(malformed))
                log.warning(
                    "%d malformed records left out; in batch %d the first is record %d, at %r: %s",
                    *(len(malformed), *where),
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
            "UTF-8, and the schema wants it as STRING: read metadata as BINARY"
        ) from error


def _times(piece: Piece, _: pa.DataType) -> list[Any]:
    """Return microseconds since the Unix epoch; None for no time or one that Spark cannot hold."""
    times = (None if each is None else each.ingestion_time_ms for each in piece.runs.values)
    return [
        None if ms is None or not MIN_TIME_MS <= ms <= MAX_TIME_MS else ms * 1000 for ms in times
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
