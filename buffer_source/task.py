"""What a task does on an executor: download ahead, decode, cut into record batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition

from buffer_source.bad_batches import Action
from buffer_source.options import SourceOptions
from buffer_source.rows import PIECE_BYTES, RowBuilder
from opendata_buffer import metrics
from opendata_buffer.consumer.descriptors import BatchDescriptor, PooledBatch, Records
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.read_ahead import Pace, fetch_many
from opendata_buffer.errors import PoisonBatch
from opendata_buffer.quarantine import quarantine
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.factory import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["BatchPartition", "read_batches"]

log = logging.getLogger(__name__)


class BatchPartition(InputPartition):
    """Batches of one task, in queue order; pickled into the task."""

    def __init__(self, descriptors: tuple[BatchDescriptor, ...]) -> None:
        super().__init__(descriptors)
        self.descriptors = descriptors

    def __repr__(self) -> str:
        if not self.descriptors:
            return "BatchPartition()"
        first, last = self.descriptors[0].sequence, self.descriptors[-1].sequence
        return f"BatchPartition({len(self.descriptors)} batches, {first} to {last})"


def read_batches(
    options: SourceOptions, schema: StructType, descriptors: Sequence[BatchDescriptor]
) -> Iterator[pa.RecordBatch]:
    """The rows of some batches, in order, while later ones are still being downloaded.

    Downloads run ahead within their budget; decoding does not: a worker holds that many stored
    bytes, one batch more, decompressed if it was compressed, and a few pieces of its rows.

    Raises:
        PoisonBatch: A batch is missing, unreadable or outside the data prefix, and the options
            do not say to go on without it.
        InvalidInput: A STRING column was asked for and a record is not UTF-8.
    """
    builder = RowBuilder(schema)
    for records in _readable(options, descriptors):
        yield from builder.pieces(records)
        del records  # or its memory is not free while the next one is decoded


def _readable(options: SourceOptions, descriptors: Sequence[BatchDescriptor]) -> Iterator[Records]:
    """The batches that can be delivered, opened one after the other."""
    handle, pace = _handle(options)
    policy = options.bad_batches
    runtime = SystemRuntime()
    # Spark repeats a failed task too, but not in local mode, and with everything it did.
    patient = queue_retry(runtime, options.queue)

    def fetch(descriptor: BatchDescriptor) -> PooledBatch | _Undelivered:
        try:
            batch: PooledBatch = patient(handle.fetch_pooled, descriptor)
            return batch
        except PoisonBatch as error:
            if policy.action(error) is Action.FAIL:
                raise
            return _Undelivered(descriptor, error)

    def pass_by(batch: BatchDescriptor | PooledBatch, error: PoisonBatch) -> None:
        if policy.action(error) is Action.PASS_BY:
            log.warning("data loss allowed: %s", error)
            return
        report = patient(
            quarantine,
            open_store(options.queue.store, options.queue.store_options),
            options.queue.data_path_prefix,
            batch,
            error,
            runtime=runtime,
            query=_query_id(),
            allow_foreign_locations=options.allow_foreign_locations,
        )
        metrics.batches_quarantined.add(1)
        log.warning("batch is in quarantine as %s and passed by: %s", report.id, error)

    stored = fetch_many(
        fetch,
        descriptors,
        concurrency=options.fetch_concurrency,
        max_in_flight_bytes=options.max_in_flight_bytes,
        runtime=runtime,
        pace=pace,
    )
    with closing(stored):
        for batch in stored:
            if isinstance(batch, _Undelivered):
                pass_by(batch.descriptor, batch.error)
                continue
            try:
                records = handle.records(batch, PIECE_BYTES, check_first=policy.checks_first)
            except PoisonBatch as error:
                if policy.action(error) is Action.FAIL:
                    raise
                pass_by(batch, error)
                continue
            del batch  # or it would live beside the budget while the next is fetched
            yield records
            del records


@dataclass(frozen=True, slots=True)
class _Undelivered:
    """A batch that could not be fetched and is to be passed by, at its place in the order."""

    descriptor: BatchDescriptor
    error: PoisonBatch
    nbytes: int = 0


def _query_id() -> str:
    """The id of the streaming query this task belongs to; empty in a batch read."""
    context = TaskContext.get()
    found = None if context is None else context.getLocalProperty("sql.streaming.queryId")
    return found or ""


@lru_cache(maxsize=32)
def _handle(options: SourceOptions) -> tuple[FetchHandle, Pace]:
    """One handle, and so one set of connections, for all tasks of a worker process."""
    return FetchHandle.of(options.consumer), Pace()
