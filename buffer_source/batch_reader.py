"""The batch source: a snapshot of what is queued, taken without disturbing any consumer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from buffer_source.batch_partition import BatchPartition
from buffer_source.batches import PartitionBatch, tasks_of
from buffer_source.measures import Measures
from buffer_source.options import EARLIEST, LATEST, SourceOptions
from buffer_source.partitions import Partitions
from buffer_source.rows import check_schema
from buffer_source.starting import first_since
from buffer_source.task import read_batches
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.manifest import Manifest, QueueEntry
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.queue.queue import Queue
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["BufferBatchReader", "select"]


class BufferBatchReader(DataSourceReader):
    """Reads what is queued; claims no epoch and acknowledges nothing.

    A DataFrame is a snapshot: Spark plans it once, at its first action, and every later action
    reads the same batches. Load it again to see what was queued since. For the same reason no
    filter prunes batches here: Spark would plan with the filters of the first action, and use
    that plan for every other action and branch of the DataFrame. It filters the rows itself;
    ``startingOffsets`` and ``endingOffsets`` are what limits what is fetched.

    A consumer that acknowledges batches while the read runs lets the garbage collector delete
    them, ``gcGracePeriodMs`` later; the read then fails and names the batch.

    Args:
        options: Parsed options.
        schema: Columns wanted: any subset, in any order.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check_batch()
        check_schema(schema, options.values)
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Tasks over the queued batches.

        Raises:
            InvalidInput: There is no queue, or ``endingOffsets`` is beyond its end.
            DataLoss: ``startingOffsets`` is before its start, unless ``failOnDataLoss`` is off.
            QueueReset: A manifest is gone, unless ``failOnDataLoss`` is off.
        """
        options, runtime = self._options, SystemRuntime()
        store = open_store(options.queue.store, options.queue.store_options)
        partitions = Partitions(options, store, runtime, queue_retry(runtime, options.queue))

        def waiting(name: str) -> tuple[list[PartitionBatch], list[int]]:
            return _waiting(partitions.options_of(name), name, store, runtime)

        found = in_parallel(runtime, waiting, partitions.names())
        batches = [batch for part, _ in found for batch in part]
        sizes = [size for _, part in found for size in part]
        return [BatchPartition(task) for task in tasks_of(batches, sizes, options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch, decode and cut the batches of one task. Runs on an executor."""
        # Spark makes up a partition of its own where there is none to read.
        descriptors = partition.descriptors if isinstance(partition, BatchPartition) else ()
        return read_batches(self._options, self._schema, descriptors)


def _waiting(
    options: SourceOptions, name: str, store: Store, runtime: Runtime
) -> tuple[list[PartitionBatch], list[int]]:
    """What is wanted of one queue, and estimates of the stored bytes of each batch."""
    config = options.consumer
    manifest = Queue(store, config, runtime=runtime, role="reader").read()
    if manifest is None:
        claim = check_owner(store, config, runtime=runtime)
        if claim is not None and options.fail_on_data_loss:
            claim.check(None)  # lost, with all that waits in it (failure F4)
        if options.create_if_missing:  # a partition that nobody has written to yet
            return [], []
        raise InvalidInput(
            f"there is no queue with manifest {config.manifest_path!r} in {store.url}: check "
            "the path and the options dataPathPrefix and manifestPath"
        )
    batches = [
        PartitionBatch.within(name, BatchDescriptor.of(entry))
        for entry in select(manifest, options)
    ]
    measures = Measures(
        store,
        config.data_path_prefix,
        runtime=runtime,
        concurrency=options.fetch_concurrency,
        allow_foreign=options.allow_foreign_locations,
    )
    return batches, measures.estimates(batches, options.parallelism_asked)


def select(manifest: Manifest, options: SourceOptions) -> list[QueueEntry]:
    """The entries a batch read wants, without repeats and what is not committed.

    Raises:
        InvalidInput, DataLoss: The wanted positions are not in the queue.
    """
    first, end = manifest.first_sequence, manifest.next_sequence
    start, last = options.starting_offsets, options.ending_offsets
    assert not isinstance(start, tuple), "of_partition() picks one"
    assert not isinstance(last, tuple), "of_partition() picks one"
    begin = first if start == EARLIEST else int(start)
    until = end - 1 if last == LATEST else int(last)
    if options.fail_on_data_loss:
        if begin < first:
            raise DataLoss(
                options.queue.manifest_path,
                begin,
                first,
                "Read with startingOffsets 'earliest', or set failOnDataLoss to false.",
            )
        if until >= end or begin > end:
            raise InvalidInput(
                f"sequences {begin} to {until} were asked for and manifest "
                f"{options.queue.manifest_path!r} ends at {end - 1}: lower endingOffsets and "
                "startingOffsets, or set failOnDataLoss to false"
            )
    entries, since_ms = manifest.entries(), options.starting_timestamp_ms
    if since_ms is not None:
        begin = first_since(map(BatchDescriptor.of, entries), since_ms, end)

    def again(start: int, stop: int) -> list[tuple[int, str]]:
        return [(each.sequence, each.location) for each in entries[start - first : stop - first]]

    rule = ReadCommitted(options.queue.data_path_prefix, options.isolation)
    return [
        entries[sequence - first]
        for entry in entries
        # Offered first, whatever else is asked: the rule must see every entry.
        for sequence in rule.offer(entry.sequence, entry.location, again)
        if begin <= sequence <= until
    ]
