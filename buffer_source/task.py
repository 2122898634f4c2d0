"""What a task does on an executor: download ahead, decode, cut into record batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from buffer_source.options import SourceOptions
from buffer_source.rows import PIECE_BYTES, RowBuilder
from opendata_buffer.consumer.descriptors import BatchDescriptor, PooledBatch
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.read_ahead import Pace, fetch_many
from opendata_buffer.errors import BatchMissing
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import SystemRuntime

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
        PoisonBatch: A batch is unreadable or outside the data prefix; or it is missing, unless
            ``failOnDataLoss`` is off.
        InvalidInput: A STRING column was asked for and a record is not UTF-8.
    """
    builder = RowBuilder(schema)
    handle, pace = _handle(options)
    runtime = SystemRuntime()
    # Spark repeats a failed task too, but not in local mode, and with everything it did.
    patient = queue_retry(runtime, options.queue)

    def fetch(descriptor: BatchDescriptor) -> PooledBatch | None:
        try:
            batch: PooledBatch = patient(handle.fetch_pooled, descriptor)
            return batch
        except BatchMissing as error:
            if options.fail_on_data_loss:
                error.args = (
                    f"{error} A query passes it by with the option failOnDataLoss set to false.",
                )
                raise
            log.warning("data loss allowed: %s", error)
            return None

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
            if batch is not None:
                records = handle.records(batch, PIECE_BYTES)
                del batch  # or it would live beside the budget while the next is fetched
                yield from builder.pieces(records)
                del records


@lru_cache(maxsize=32)
def _handle(options: SourceOptions) -> tuple[FetchHandle, Pace]:
    """One handle, and so one set of connections, for all tasks of a worker process."""
    return FetchHandle.of(options.consumer), Pace()
