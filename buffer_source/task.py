"""The work of a task on an executor: download ahead, decode, cut into the rows that Spark sees.

These are Arrow record batches, never Python rows. A task makes one :class:`RowBuilder`, and in it
one builder for each column that is wanted. A batch is cut into pieces; each builder makes one array
for each piece, and may keep arrays between pieces.

A task also adds the query's id to the info about the queue's consumer: Spark does not pass it to
the process that claims the queue.
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
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.consumer_note import amend_consumer_info, read_consumer_info
from opendata_buffer.runtime import Interval, Runtime, SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.values import DROPMALFORMED, FAILFAST, DecodedColumns, Decoder, ValueOptions

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 64 * MIB  # stored, that a task may have downloaded and not yet decoded
RECORD_INTERVAL_S = 60.0  # between two records of one query's id by one process


_recorded = dict[object, Interval]()  # by queue and query


def record_query_id(config: QueueConfig, query: str, runtime: Runtime) -> None:
    """Add the id of a query that reads this queue to the consumer info, in the background and at
    most once a minute. Returns at once, and raises nothing."""
    queue = (config.store, config.manifest_path, query)
    if not _recorded.setdefault(queue, Interval(runtime, RECORD_INTERVAL_S)).is_due():
        return

    def record() -> None:
        try:
            store = open_store(config.store, config.store_options)
            info = read_consumer_info(store, config, runtime)
            # The last task of a fenced query may name itself in its successor's info: nothing but
            # the display depends on it.
            if info is not None and info.program == PROGRAM and not info.query:
                amend_consumer_info(store, config, runtime, info.epoch, query=query)
        except OpenDataBufferError as error:
            log.debug("the query's id was not recorded beside the queue: %s", error)

    runtime.spawn(record, "opendata-buffer-query-id")


def read_partition(
    options: SourceOptions, schema: StructType, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of a task's batches, in order, while later ones are still being downloaded.

    Downloads run ahead within their budget; decoding does not: a worker holds that many stored
    bytes, one batch more, decompressed if it was compressed, and a few pieces of its rows. Raises
    PoisonBatch for a batch that cannot be delivered, unless the options say to go on without it;
    else as :meth:`.RowBuilder.pieces`.
    """
    # Spark makes up an input partition of its own where there is none to read.
    descriptors = partition.batches if isinstance(partition, TaskBatches) else ()
    if descriptors and options.acknowledge and (query := _query_id()):
        record_query_id(_options_of(options, descriptors[0]).queue, query, SystemRuntime())
    builder = RowBuilder(schema, options.values)
    for batch, records in _readable(options, descriptors, builder.piece_bytes):
        try:
            yield from builder.pieces(records, batch.partition, batch.rows(records.count))
        except PoisonBatch as error:
            options.tolerates(error)  # Most faults show here: the error names the option.
            raise
        del records  # or its memory is not free while the next one is decoded


def _readable(
    options: SourceOptions, descriptors: Sequence[PartitionBatch], array_bytes: int
) -> Iterator[tuple[PartitionBatch, Records]]:
    """The batches that can be delivered, opened one after the other."""
    runtime = SystemRuntime()
    # Spark repeats a failed task too, but not in local mode, and with everything it did.
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
        if batch.part == 0:  # of several tasks that share it, one counts it
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
            del fetched  # or it would live beside the budget while the next is fetched
            yield batch, records
            del records


def _query_id() -> str:
    """The id of the streaming query this task belongs to; empty in a batch read."""
    context = TaskContext.get()
    return "" if context is None else context.getLocalProperty("sql.streaming.queryId") or ""


def _options_of(options: SourceOptions, batch: PartitionBatch) -> SourceOptions:
    """What the query asked for, with the queue of the batch."""
    return options if batch.partition == ONLY else options.of_partition(batch.partition)


@lru_cache(maxsize=32)
def _handle(options: SourceOptions) -> FetchHandle:
    """Kept for all tasks of a worker process; all partitions share one set of connections."""
    return FetchHandle.of(options.consumer, resettable=False)


@lru_cache(maxsize=32)
def _adaptive_concurrency(options: SourceOptions) -> AdaptiveConcurrency:
    """What the tasks of a worker process found to be the best concurrency for the store."""
    return _handle(options).adaptive_concurrency()


PIECE_BYTES = 4 * MIB
"""Bytes of values (and of metadata) in one record batch, unless a single row has more: each costs
the worker and the JVM some work of its own, which large ones share among more rows."""

TYPED_PIECE_BYTES = 2 * MIB
"""The same where records are read into columns: what lies between the decoder's steps is then still
in a processor's cache."""

PIECE_ROWS = 256 * 1024  # in one record batch at most; bounds the columns that are not values

_DAY_MS = 24 * 60 * 60 * 1000
_EPOCH = datetime.date(1970, 1, 1)
# A day inside the years 1 to 9999, so that no session time zone moves a time out of what
# datetime and Spark's SQL functions can hold.
MIN_TIME_MS = (datetime.date(1, 1, 2) - _EPOCH).days * _DAY_MS
MAX_TIME_MS = (datetime.date(9999, 12, 31) - _EPOCH).days * _DAY_MS - 1


@dataclass(frozen=True, slots=True)
class Runs:
    """Metadata ranges of a batch as runs of rows: ``values[i]`` holds up to row ``ends[i]``."""

    ends: list[int]
    values: list[Metadata | None]

    @classmethod
    def of(cls, ranges: Sequence[Metadata], count: int) -> Runs:
        """Cut the ranges to the rows there are.

        A range reaches to where the next one starts, the last to the end. Starts beyond the end are
        legal; of ranges out of order the later in the list wins where they overlap.
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
        encoded = pa.RunEndEncodedArray.from_arrays(
            pa.array(self.ends, pa.int32()), pa.array(values, dtype)
        )
        return pc.run_end_decode(encoded)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one batch: their records, their metadata, the index of the first."""

    batch: Records
    values: pa.BinaryArray
    runs: Runs
    begin: int
    partition: str


Build = Callable[[Piece], pa.Array]
"""Builds one column: an array with one value for each row of a piece."""


class RowBuilder:
    """Builds record batches of one schema; made once in a task.

    Without ``values`` records are not read into columns. A piece has at most ``piece_rows``, and
    ``piece_bytes`` of values or metadata unless a single row has more.
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
        """The batch's ``rows`` (default: all) as record batches in order; none without records.

        BatchUnreadable for a record array that does not decode, InvalidInput for a record that is
        not UTF-8 where a STRING column was asked for, MalformedRecord for one that does not fit the
        schema in mode FAILFAST.
        """
        runs = Runs.of(batch.metadata, batch.count)
        wanted = range(batch.count) if rows is None else rows
        first = 0  # row of the batch that the array begins with
        for values in batch.arrays:
            if first >= wanted.stop:
                return  # the rest is another task's, and need not be decoded
            size = len(values)
            begin, count = max(0, wanted.start - first), min(size, wanted.stop - first)
            while begin < count:
                end = min(count, begin + self._piece_rows)
                if self._reads_metadata:
                    end = runs.fit(first + begin, first + end, self.piece_bytes) - first
                end = self._cut(values, begin, end)
                cut = runs.cut(first + begin, first + end)
                # In one expression: a piece in a variable would live until the next is made.
                yield self._build(
                    Piece(batch, values.slice(begin, end - begin), cut, first + begin, partition)
                )
                begin = end
            first += size
            del values  # or its memory is not free when the next one is decoded

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
        """The rows that are delivered: by ``mode`` without malformed ones."""
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
        """The largest end in (begin, limit] with at most ``piece_bytes`` of values."""
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
            # To ignore the bytes that are not UTF-8 changes a record that has some.
            row = next(
                row for row, each in records if each.decode(errors="ignore").encode() != each
            )
            raise InvalidInput(
                f"record {row} of batch {piece.batch.sequence} at {piece.batch.location!r} is not "
                "UTF-8, and the schema wants value as STRING: read value as BINARY and decode it "
                "there"
            ) from error


class _Repeated:
    """One value for each metadata range, or one for all rows, whose array next pieces share."""

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
    """Microseconds since the Unix epoch; None for no time or one Spark cannot hold."""
    times = (None if each is None else each.ingestion_time_ms for each in piece.runs.values)
    return [
        None if ms is None or not MIN_TIME_MS <= ms <= MAX_TIME_MS else ms * 1000 for ms in times
    ]


OTEL_VERSION = 1
OTEL_SIGNALS = {1: "metrics", 2: "logs", 3: "traces"}
OTEL_ENCODINGS = {1: "otlp_protobuf"}


def _otel(names: dict[int, str], at: int) -> Callable[[pa.DataType], Build]:
    """Names of one byte of the exporter's metadata: version, signal, encoding, 0."""

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
            # Grown by doubling and sliced, so that counting costs nothing per batch.
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
"""Makes the builder of a column for one of its Arrow types."""
