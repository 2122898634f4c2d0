"""Batch objects of a write: how they are named, sealed and stored, in a task or on the driver."""

from __future__ import annotations

from buffer_sink.blocks import Block
from buffer_sink.messages import UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_sink.topic_write import TopicWrite
from opendata_buffer import metrics
from opendata_buffer.formats.batch import seal_block
from opendata_buffer.formats.keys import Transaction, batch_key, later_ulid
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Put

__all__ = ["BatchObjects"]


class BatchObjects:
    """Stores the batches of one write. Threads may call it at once.

    Args:
        options: The sink's options.
        transaction: Identity of the write, if it has one.
        topic: The topic it goes to; None for a single queue.
        store: Where batches go.
        runtime: Clocks and names.
    """

    def __init__(
        self,
        options: SinkOptions,
        transaction: Transaction | None,
        topic: TopicWrite | None,
        *,
        store: Put,
        runtime: Runtime,
    ) -> None:
        self._options = options
        self._transaction = transaction
        self._topic = topic
        self._store = store
        self._runtime = runtime
        # Spark repeats a failed task too, but not in local mode, and with everything it did.
        self._retrying = queue_retry(runtime, options.queue)

    def name(self, partition: str | None, clock: int) -> str:
        """A new key.

        Args:
            partition: Name of the topic's partition; None for a single queue.
            clock: Of the batch's message in that partition.
        """
        # The name tells collectors how long the object may wait for the driver's append.
        ulid = later_ulid(self._runtime.ulid(), self._options.max_write_duration_ms)
        if partition is None or self._topic is None:
            return batch_key(self._options.queue.data_path_prefix, ulid, self._transaction)
        txn = self._topic.transaction(self._transaction)
        return self._topic.location(partition, ulid, txn, clock)

    def put(self, key: str, partition: str | None, clock: int, block: Block) -> UploadedBatch:
        """Seal a block and store it.

        Raises:
            StorageError: It failed for good, or for ``cas_deadline_ms``.
        """
        # Compression releases the interpreter lock, so on an upload thread it overlaps with the
        # next block's encoding and with the JVM.
        began = self._runtime.monotonic()
        options = self._options
        data = seal_block(block.pieces, block.records, options.compression, options.zstd_level)
        self._retrying(self._store.put, key, data)
        metrics.batches_flushed.add(1)
        metrics.entries_flushed.add(block.records)
        metrics.bytes_flushed.add(block.size)
        metrics.bytes_written.add(len(data))
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - began)
        return UploadedBatch(key, block.records, len(data), block.metadata, partition, clock)
