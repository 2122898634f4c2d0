"""The work of a task on an executor: download ahead, decode, cut into record batches.

A task also adds the query's id to the info about the queue's consumer: Spark does not pass it to
the process that claims the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING

from pyspark import TaskContext

from buffer_source.options import PROGRAM, SourceOptions
from buffer_source.partitions import ONLY
from buffer_source.planner import PartitionBatch, TaskBatches
from buffer_source.rows import ARRAY_BYTES, RowBuilder
from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.fetch import AdaptiveConcurrency, FetchHandle, PooledBatch, Records
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import BatchMissing, OpenDataBufferError, PoisonBatch
from opendata_buffer.formats import MIB
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.consumer_info import amend_consumer_info, read_consumer_info
from opendata_buffer.runtime import Runtime, SystemRuntime, queue_retry
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 64 * MIB  # stored, that a task may have downloaded and not yet decoded
RECORD_INTERVAL_S = 60.0  # between two records of one query's id by one process


class QueryIdRecorder:
    """Adds ids of queries to consumer infos, in the background and at most once a minute."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._at: dict[tuple[str, str, str], float] = {}

    def add(self, config: QueueConfig, query: str) -> None:
        """Record the query of a task that reads this queue. Returns at once, and raises nothing."""
        key = config.store, config.manifest_path, query
        now = self._runtime.monotonic()
        if now - self._at.get(key, -RECORD_INTERVAL_S) < RECORD_INTERVAL_S:
            return
        self._at[key] = now

        def record() -> None:
            try:
                store = open_store(config.store, config.store_options)
                info = read_consumer_info(store, config, self._runtime)
                # The last task of a fenced query may name itself in its successor's info: nothing
                # but the display depends on it.
                if info is not None and info.program == PROGRAM and not info.query:
                    amend_consumer_info(store, config, self._runtime, info.epoch, query=query)
            except OpenDataBufferError as error:
                log.debug("the query's id was not recorded beside the queue: %s", error)

        self._runtime.spawn(record, "opendata-buffer-query-id")


def read_partition(
    options: SourceOptions, schema: StructType, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The rows of a task's batches, in order, while later ones are still being downloaded.

    Downloads run ahead within their budget; decoding does not: a worker holds that many stored
    bytes, one batch more, decompressed if it was compressed, and :data:`~.rows.ARRAY_BYTES` of its
    records with a few pieces of their rows.

    Raises:
        PoisonBatch: A batch is missing, unreadable or outside the data prefix, and the options
            do not say to go on without it.
        InvalidInput, MalformedRecord: As :meth:`.RowBuilder.pieces`.
    """
    # Spark makes up an input partition of its own where there is none to read.
    descriptors = partition.batches if isinstance(partition, TaskBatches) else ()
    _record_query_id(options, descriptors)
    builder = RowBuilder(schema, options.values)
    for batch, records in _readable(options, descriptors):
        try:
            yield from builder.pieces(records, batch.partition, batch.rows(records.count))
        except PoisonBatch as error:
            options.tolerates(error)  # Most faults show here: the error names the option.
            raise
        del records  # or its memory is not free while the next one is decoded


def _readable(
    options: SourceOptions, descriptors: Sequence[PartitionBatch]
) -> Iterator[tuple[PartitionBatch, Records]]:
    """The batches that can be delivered, opened one after the other."""
    runtime = SystemRuntime()
    # Spark repeats a failed task too, but not in local mode, and with everything it did.
    retrying = queue_retry(runtime, options.queue)
    handle = _handle(options)
    handles = {
        name: handle if name == ONLY else handle.within(name)
        for name in {each.partition for each in descriptors}
    }

    def fetch(descriptor: BatchDescriptor) -> PooledBatch | PoisonBatch:
        assert isinstance(descriptor, PartitionBatch)
        try:
            return retrying(handles[descriptor.partition].fetch_pooled, descriptor)
        except PoisonBatch as error:
            if not options.tolerates(error):
                raise
            return error

    def pass_by(batch: PartitionBatch, stored: PooledBatch | None, error: PoisonBatch) -> None:
        if isinstance(error, BatchMissing):
            log.warning("data loss allowed: %s", error)
            return
        own = _options_of(options, batch)
        report = retrying(
            quarantine,
            open_store(own.queue.store, own.queue.store_options),
            own.queue.data_path_prefix,
            batch if stored is None else stored,
            error,
            runtime=runtime,
            query=_query_id(),
        )
        if batch.part == 0:  # of several tasks that share it, one counts it
            metrics.batches_quarantined.add(1)
        log.warning("batch is in quarantine as %s and passed by: %s", report.id, error)

    fetches = fetch_many(
        fetch,
        descriptors,
        max_in_flight_bytes=IN_FLIGHT_BYTES,
        runtime=runtime,
        size_of=lambda each: 0 if isinstance(each, PoisonBatch) else each.nbytes,
        adaptive=_adaptive_concurrency(options),
    )
    with closing(fetches):
        for batch in descriptors:
            fetched = next(fetches)
            if isinstance(fetched, PoisonBatch):
                pass_by(batch, None, fetched)
                continue
            try:
                records = handles[batch.partition].records(
                    fetched, ARRAY_BYTES, check_first=options.checks_whole_batch
                )
            except PoisonBatch as error:
                if not options.tolerates(error):
                    raise
                pass_by(batch, fetched, error)
                continue
            del fetched  # or it would live beside the budget while the next is fetched
            yield batch, records
            del records


_recorder = QueryIdRecorder(SystemRuntime())


def _record_query_id(options: SourceOptions, descriptors: Sequence[PartitionBatch]) -> None:
    query = _query_id()
    if query and descriptors and options.acknowledge:
        _recorder.add(_options_of(options, descriptors[0]).queue, query)


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
    return FetchHandle.of(options.consumer)


@lru_cache(maxsize=32)
def _adaptive_concurrency(options: SourceOptions) -> AdaptiveConcurrency:
    """What the tasks of a worker process found to be the best concurrency for the store."""
    return _handle(options).adaptive_concurrency()
