"""The work of a task on an executor: download ahead, decode, and cut into rows for Spark.

The rows are Arrow record batches, never Python rows. A task makes one :class:`RowBuilder`.

A task also adds the query's id to the info about the queue's consumer, because Spark does not pass
the id to the process that claims the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from buffer_source.options import PROGRAM, SourceOptions
from buffer_source.partitions import ONLY
from buffer_source.planner import PartitionBatch, TaskBatches
from buffer_source.schema import arrow_schema
from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer import rows
from opendata_buffer.consumer.batches import OWN
from opendata_buffer.consumer.fetch import (
    AdaptiveConcurrency,
    FetchHandle,
    PooledBatch,
    Records,
    fetch_many,
    fetch_stored,
    open_records,
    or_poison,
    within,
)
from opendata_buffer.errors import (
    BatchMissing,
    OpenDataBufferError,
    PoisonBatch,
)
from opendata_buffer.formats import MIB
from opendata_buffer.option_reader import briefly, in_options
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.consumer_note import amend_consumer_info, read_consumer_info
from opendata_buffer.runtime import Interval, Runtime, SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.values import ValueOptions

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


@briefly
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
        name: handle if name == ONLY else within(handle, name)
        for name in {each.partition for each in descriptors}
    }

    def fetch(batch: PartitionBatch) -> PooledBatch:
        return fetch_stored(handles[batch.partition], batch, retrying)

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
                records = open_records(
                    handles[batch.partition],
                    fetched,
                    array_bytes,
                    check_first=options.checks_whole_batch,
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


class RowBuilder(rows.RowBuilder):
    """Builds record batches of a schema of Spark; made once per task.

    Args:
        schema: The columns to deliver.
        values: How to read records into columns; None to deliver them as they are.
        **limits: Limits of a piece, as for the class below.
    """

    def __init__(
        self, schema: StructType, values: ValueOptions | None = None, **limits: Any
    ) -> None:
        arrow = arrow_schema(schema)
        own = {name: name.lower() for name in arrow.names}
        if values is not None:
            own = {name: OWN[name] for name in arrow.names if name in OWN}
        super().__init__(arrow, own, values, **limits)
