"""What a task does on an executor: download ahead, decode, cut into record batches."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING

from buffer_source.ahead import ahead
from buffer_source.options import SourceOptions
from buffer_source.rows import RowBuilder
from opendata_buffer.descriptors import ArrowBatch, BatchDescriptor, RawBatch
from opendata_buffer.errors import BatchMissing, TransientStorageError
from opendata_buffer.fetch import FetchHandle, fetch_many
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import SystemRuntime

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["read_batches"]

log = logging.getLogger(__name__)


def read_batches(
    options: SourceOptions, schema: StructType, descriptors: Sequence[BatchDescriptor]
) -> Iterator[pa.RecordBatch]:
    """The rows of some batches, in order, while later ones are still being downloaded.

    Downloads run ahead within their budget, decoding by one batch: a worker holds that many
    stored bytes and two decoded batches, not the decoded form of everything in flight.

    Raises:
        PoisonBatch: A batch is unreadable or outside the data prefix; or it is missing, unless
            ``failOnDataLoss`` is off.
        InvalidInput: A STRING column was asked for and a record is not UTF-8.
    """
    builder = RowBuilder(schema)
    handle = _handle(options)
    runtime = SystemRuntime()
    # Spark repeats a failed task too, but not in local mode, and with everything it did.
    patient = full_jitter(
        runtime,
        base_ms=options.queue.backoff_base_ms,
        max_ms=options.queue.backoff_max_ms,
        deadline_ms=options.queue.cas_deadline_ms,
        retry_on=(TransientStorageError,),
    )

    def fetch(descriptor: BatchDescriptor) -> RawBatch | None:
        try:
            raw: RawBatch = patient(handle.fetch_raw, descriptor)
            return raw
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
    )
    decoded = _decoded(handle, stored)
    if len(descriptors) > 1:
        decoded = ahead(decoded, lambda batch: batch.nbytes, runtime)
    with closing(decoded):
        for batch in decoded:
            yield from builder.pieces(batch)
            del batch


def _decoded(
    handle: FetchHandle, stored: Generator[RawBatch | None, None, None]
) -> Generator[ArrowBatch, None, None]:
    with closing(stored):
        for raw in stored:
            if raw is None:
                continue
            batch = handle.decode_arrow(raw)
            del raw  # or two stored batches would live beside the budget
            yield batch
            del batch


@lru_cache(maxsize=32)
def _handle(options: SourceOptions) -> FetchHandle:
    """One handle, and so one set of connections, for all tasks of a worker process."""
    return FetchHandle.of(options.consumer)
