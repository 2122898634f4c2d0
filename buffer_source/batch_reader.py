"""The batch source: a snapshot of what is queued, taken without disturbing any consumer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from buffer_source.micro_batch_stream import SourcePartitions
from buffer_source.options import EARLIEST, LATEST, SourceOptions
from buffer_source.planner import BatchSizes, PartitionBatch, TaskBatches, plan_tasks
from buffer_source.queue_cursor import first_since, manifest_of
from buffer_source.schema import check_schema
from buffer_source.task import read_batches
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest, QueueEntry
from opendata_buffer.queue.repeats import Repeats
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class BufferBatchReader(DataSourceReader):
    """Reads what is queued; claims no epoch and acknowledges nothing.

    A DataFrame is a snapshot: Spark plans it once, at its first action, and every later action
    reads the same batches. For that reason no filter prunes batches here: Spark would use the plan
    with the filters of the first action for every other action and branch of the DataFrame.

    A consumer that acknowledges batches while the read runs lets the garbage collector delete
    them, ``gcGracePeriodMs`` later; the read then fails and names the batch.
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
        retrying = queue_retry(runtime, options.queue)
        partitions = SourcePartitions(options, store, runtime, retrying)

        def queued(name: str) -> tuple[list[PartitionBatch], list[int]]:
            own = partitions.options_of(name)
            manifest = manifest_of(own, store, runtime)
            entries = [] if manifest is None else select(manifest, own)
            if manifest is not None:
                repeats = Repeats(store, own.consumer, runtime, "")
                repeats.load()
                # Also those that are not wanted: one that is may repeat them.
                later = {e.sequence for e in manifest.entries() if repeats.first_of(e) is not None}
                entries = [each for each in entries if each.sequence not in later]
            batches = [PartitionBatch.within(name, BatchDescriptor.of(each)) for each in entries]
            return batches, BatchSizes(store, own, runtime, retrying).estimates(batches)

        found = in_parallel(runtime, queued, partitions.names())
        batches = [batch for part, _ in found for batch in part]
        sizes = [size for _, part in found for size in part]
        return plan_tasks(batches, sizes, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch, decode and cut the batches of one task. Runs on an executor."""
        # Spark makes up an input partition of its own where there is none to read.
        batches = partition.batches if isinstance(partition, TaskBatches) else ()
        return read_batches(self._options, self._schema, batches)


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
    until = end if last in (None, LATEST) else int(last)
    if begin < first:
        advice = "Read with startingOffsets 'earliest', or set failOnDataLoss to false."
        options.report_data_loss(DataLoss(options.queue.manifest_path, begin, first, advice))
    if options.fail_on_data_loss and max(begin, until) > end:
        raise InvalidInput(
            f"startingOffsets {begin} and endingOffsets {until} were asked for and manifest "
            f"{options.queue.manifest_path!r} ends at {end - 1}: use at most {end} for both, or "
            "set failOnDataLoss to false"
        )
    entries, since_ms = manifest.entries(), options.starting_timestamp_ms
    if since_ms is not None:
        begin = first_since([*map(BatchDescriptor.of, entries)], since_ms, end)

    def held_back(start: int, stop: int) -> list[tuple[int, str]]:
        return [(each.sequence, each.location) for each in entries[start - first : stop - first]]

    rule = ReadCommitted(options.queue.data_path_prefix, options.isolation)
    return [
        entries[sequence - first]
        for entry in entries
        # Every entry is offered, also one that is not wanted: the rule must see all of them.
        for sequence in rule.offer(entry.sequence, entry.location, held_back)
        if begin <= sequence < until
    ]
