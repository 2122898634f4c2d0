"""One task's part of a write: encode its rows, upload them as batches, say where they are."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from buffer_sink.blocks import Block, BlockBuilder, Columns
from buffer_sink.messages import SinkCommit, Upload
from buffer_sink.options import SinkOptions
from buffer_sink.uploads import UploadWindow
from opendata_buffer import metrics
from opendata_buffer.formats.batch import seal_block
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Moment, Runtime
from opendata_buffer.stores import Put

__all__ = ["write_partition"]


def write_partition(
    rows: Iterable[pa.RecordBatch],
    *,
    columns: Columns,
    options: SinkOptions,
    transaction: Transaction | None,
    partition: int,
    planned: Moment,
    store: Put,
    runtime: Runtime,
) -> SinkCommit:
    """Write all rows of a partition.

    Nothing becomes visible: batches are in the queue only when the driver commits them. What a
    failed or a repeated task uploaded is an orphan, and the collector deletes it by its age.

    Memory: the block being filled, one waiting and ``upload_concurrency`` in upload, these with
    their sealed copy, each of ``target_batch_bytes``; and one of Spark's Arrow batches.

    Raises:
        InvalidInput: A row that cannot be written.
        StorageError: An upload failed for good, or for ``cas_deadline_ms``.
    """
    # Spark repeats a failed task too, but not in local mode, and with everything it did.
    patient = queue_retry(runtime, options.queue)
    uploads: list[Upload | None] = []

    def upload(index: int, key: str, block: Block) -> None:
        # Compression runs here too: it releases the interpreter lock, so it overlaps with the
        # next block's encoding and with the JVM.
        began = runtime.monotonic()
        data = seal_block(block.pieces, block.records, options.compression, options.zstd_level)
        patient(store.put, key, data)
        uploads[index] = Upload(key, block.records, len(data), block.metadata)
        metrics.batches_flushed.add(1)
        metrics.entries_flushed.add(block.records)
        metrics.bytes_flushed.add(block.size)
        metrics.bytes_written.add(len(data))
        metrics.flush_duration_seconds.record(runtime.monotonic() - began)

    builder = BlockBuilder(
        columns,
        partition=partition,
        target=options.target_batch_bytes,
        limit=options.max_batch_bytes,
        max_ranges=options.max_metadata_ranges,
    )
    with UploadWindow(options.upload_concurrency, runtime) as window:

        def start(block: Block) -> None:
            index = len(uploads)
            uploads.append(None)
            key = batch_key(options.queue.data_path_prefix, runtime.ulid(), transaction)
            window.submit(lambda: upload(index, key, block))

        for batch in rows:
            for block in builder.add(batch, runtime.now_ms()):
                start(block)
                del block  # or one more batch stays in memory until the next one is full
        last = builder.finish()
        if last is not None:
            start(last)
            del last
    return SinkCommit(
        partition=partition,
        transaction=transaction,
        planned=planned,
        uploads=tuple(each for each in uploads if each is not None),
    )
