"""What a task does on an executor: download ahead, decode, cut into record batches.

A task also adds the query's id to the note of the queue's consumer, for ``opendata-buffer
owner``: the process that claims the queue is not told which query it belongs to, and the tasks of
a micro-batch are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pyspark import TaskContext

from buffer_source.offsets import ONLY
from buffer_source.options import PROGRAM, SourceOptions
from buffer_source.planner import PartitionBatch
from buffer_source.rows import ARRAY_BYTES, RowBuilder
from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.consumer.fetch import AdaptiveConcurrency, FetchHandle, PooledBatch, Records
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import BatchMissing, OpenDataBufferError, PoisonBatch
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.consumer_info import add_query_id, read_consumer_info
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)

NOTE_INTERVAL_S = 60.0
"""Least time between two notes of one query by one process."""


class QueryNotes:
    """Adds queries to notes, in the background and at most once a minute."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._at: dict[tuple[str, str, str], float] = {}

    def add(self, config: QueueConfig, query: str) -> None:
        """Note that a task of this query reads this queue. Returns at once, and raises nothing."""
        key = config.store, config.manifest_path, query
        now = self._runtime.monotonic()
        if now - self._at.get(key, -NOTE_INTERVAL_S) < NOTE_INTERVAL_S:
            return
        self._at[key] = now

        def note() -> None:
            try:
                store = open_store(config.store, config.store_options)
                note_query(store, config, self._runtime, query)
            except OpenDataBufferError as error:
                log.debug("the query was not noted beside the queue: %s", error)

        self._runtime.spawn(note, "opendata-buffer-note")


def note_query(store: Store, config: QueueConfig, runtime: Runtime, query: str) -> None:
    """Add the query to a note of the source's that names no query yet.

    A last task of a query that was fenced could be named in its successor's note: nothing but
    the display depends on it.

    Raises:
        CorruptData, StorageError: The note could not be read.
    """
    holder = read_consumer_info(store, config, runtime)
    if holder is not None and holder.program == PROGRAM and not holder.query:
        add_query_id(store, config, runtime, holder.epoch, query)


def read_batches(
    options: SourceOptions, schema: StructType, descriptors: Sequence[PartitionBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows of some batches, in order, while later ones are still being downloaded.

    Downloads run ahead within their budget; decoding does not: a worker holds that many stored
    bytes, one batch more, decompressed if it was compressed, and :data:`~.rows.ARRAY_BYTES` of its
    records with a few pieces of their rows.

    Raises:
        PoisonBatch: A batch is missing, unreadable or outside the data prefix, and the options
            do not say to go on without it.
        InvalidInput: A STRING column was asked for and a record is not UTF-8.
        MalformedRecord: A record does not fit the schema, and mode is FAILFAST.
    """
    _note_query(options, descriptors)
    builder = RowBuilder(schema, options.values)
    for batch, records in _readable(options, descriptors):
        try:
            yield from builder.pieces(records, batch.partition, batch.rows(records.count))
        except PoisonBatch as error:
            options.goes_on_without(error)  # Most faults show here: the error names the option.
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

    def fetch(descriptor: BatchDescriptor) -> _Fetched:
        assert isinstance(descriptor, PartitionBatch)
        try:
            stored: PooledBatch = retrying(handles[descriptor.partition].fetch_pooled, descriptor)
            return _Fetched(descriptor, stored)
        except PoisonBatch as error:
            if not options.goes_on_without(error):
                raise
            return _Fetched(descriptor, error=error)

    def pass_by(fetched: _Fetched, error: PoisonBatch) -> None:
        if isinstance(error, BatchMissing):
            log.warning("data loss allowed: %s", error)
            return
        name = fetched.descriptor.partition
        own = options if name == ONLY else options.of_partition(name)
        report = retrying(
            quarantine,
            open_store(own.queue.store, own.queue.store_options),
            own.queue.data_path_prefix,
            fetched.descriptor if fetched.stored is None else fetched.stored,
            error,
            runtime=runtime,
            query=_query_id(),
            allow_foreign_locations=own.allow_foreign_locations,
        )
        if fetched.descriptor.part == 0:  # of several tasks that share it, one counts it
            metrics.batches_quarantined.add(1)
        log.warning("batch is in quarantine as %s and passed by: %s", report.id, error)

    stored = fetch_many(
        fetch,
        descriptors,
        concurrency=options.fetch_concurrency,
        max_in_flight_bytes=options.max_in_flight_bytes,
        runtime=runtime,
        adaptive=_pace(options),
    )
    with closing(stored):
        for fetched in stored:
            if fetched.stored is None:
                assert fetched.error is not None
                pass_by(fetched, fetched.error)
                continue
            batch = fetched.descriptor
            try:
                records = handles[batch.partition].records(
                    fetched.stored, ARRAY_BYTES, check_first=options.checks_first
                )
            except PoisonBatch as error:
                if not options.goes_on_without(error):
                    raise
                pass_by(fetched, error)
                continue
            del fetched  # or it would live beside the budget while the next is fetched
            yield batch, records
            del records


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A batch as stored, or why it could not be fetched and is to be passed by."""

    descriptor: PartitionBatch
    stored: PooledBatch | None = None
    error: PoisonBatch | None = None

    @property
    def nbytes(self) -> int:
        """What counts for the budget of downloads."""
        return 0 if self.stored is None else self.stored.nbytes


_notes = QueryNotes(SystemRuntime())


def _note_query(options: SourceOptions, descriptors: Sequence[PartitionBatch]) -> None:
    query = _query_id()
    if query and descriptors and options.acknowledge:
        name = descriptors[0].partition
        _notes.add((options if name == ONLY else options.of_partition(name)).queue, query)


def _query_id() -> str:
    """The id of the streaming query this task belongs to; empty in a batch read."""
    return _property("sql.streaming.queryId") or ""


def _property(name: str) -> str | None:
    """What the driver told this task; None outside of Spark, or where it told nothing."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


@lru_cache(maxsize=32)
def _handle(options: SourceOptions) -> FetchHandle:
    """Kept for all tasks of a worker process; all partitions share one set of connections."""
    return FetchHandle.of(options.consumer)


@lru_cache(maxsize=32)
def _pace(options: SourceOptions) -> AdaptiveConcurrency:
    """What the tasks of a worker process have learnt about the store."""
    return _handle(options).adaptive_concurrency()
