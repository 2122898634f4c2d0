"""The batch source: a snapshot of the queued batches that does not disturb any consumer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from buffer_source.options import EARLIEST, LATEST, SourceOptions
from buffer_source.partitions import (
    SourcePartitions,
    position_of_reader,
    sequence_since,
    view_of,
)
from buffer_source.planner import BatchSizes, PartitionBatch, plan_tasks
from buffer_source.schema import check_schema
from buffer_source.task import read_partition
from opendata_buffer.consumer.isolation import ReadCommitted, Repeats
from opendata_buffer.consumer.read_only import committed_entries
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.option_reader import briefly, in_options
from opendata_buffer.queue.hints import removed_before
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import held_batches, skipped_ranges
from opendata_buffer.runtime import SystemRuntime, in_parallel
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)


class BufferBatchReader(DataSourceReader):
    """Reads all queued batches, or all that a log keeps.

    It does not claim an epoch, and does not acknowledge anything. With the option ``reader`` it
    begins where this reader of a log would continue, and does not move it.

    A DataFrame is a snapshot: Spark plans it once, and every later action reads the same batches.
    That is why filters do not prune batches here: a filter would come from the first action. If a
    consumer acknowledges batches meanwhile, they are deleted ``gcGracePeriodMs`` later. The read
    then fails and names one of them.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check_batch()
        check_schema(schema, options.values)
        self._options = options
        self._schema = schema

    @briefly
    @in_options()
    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks of a batch read.

        Returns:
            The tasks, which cover all requested batches.

        Raises:
            InvalidInput: The queue does not exist, or is not a log with the given reader. Or
                ``startingOffsets`` or ``endingOffsets`` is past its end, and ``failOnDataLoss`` is
                not false.
            DataLoss: The queue begins after ``startingOffsets``. Not raised if ``failOnDataLoss``
                is false.
            QueueReset: The manifest is gone. Not raised if ``failOnDataLoss`` is false.
        """
        options, runtime = self._options, SystemRuntime()
        store = open_store(options.queue.store, options.queue.store_options)
        retrying = options.queue.retries(runtime)
        partitions = SourcePartitions(options, store, runtime)
        removed: list[int] = []

        def queued(name: str) -> tuple[list[PartitionBatch], list[int]]:
            own = partitions.options_of(name)
            view = view_of(own, store, runtime)
            entries: list[BatchDescriptor] = []
            if isinstance(view, Manifest) and own.starts_at_oldest and view.first_sequence:
                skipped = skipped_ranges(store, own.queue, runtime)
                removed.append(held_batches(view.first_sequence, skipped))
            if view is not None and own.reader:
                begin = position_of_reader(own, view, store, runtime)
                own = replace(own, starting_offsets=begin)
            if view is not None:
                repeats = Repeats(store, own.consumer, runtime, "")
                repeats.load()
                entries = select(view, own, repeats)
            batches = [PartitionBatch.within(name, each) for each in entries]
            return batches, BatchSizes(store, own, runtime, retrying).estimates(batches)

        found = in_parallel(runtime, queued, partitions.names())
        if count := sum(removed):
            log.warning("%s", removed_before(count, store.url, options.queue, "this query"))
        batches = [batch for part, _ in found for batch in part]
        sizes = [size for _, part in found for size in part]
        return plan_tasks(batches, sizes, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch, decode and cut the batches of one task. Runs on an executor."""
        return read_partition(self._options, self._schema, partition)


def select(
    view: Manifest | LogView, options: SourceOptions, repeats: Repeats
) -> list[BatchDescriptor]:
    """Choose the entries of a batch read, without repeats and without uncommitted entries.

    For a log, this reads the requested range and two ranges next to it. The entries right before it
    help to recognise repeats. The entries after it are read as long as transactions are undecided.

    Args:
        view: The manifest, or everything that a log keeps.
        options: The source's options, of one partition.
        repeats: Recognises repeats.

    Returns:
        The entries, by sequence.

    Raises:
        InvalidInput: A position is past the end of the queue.
        DataLoss: The queue begins after the start of the range.
    """
    first, end = view.first_sequence, view.next_sequence
    start, last = options.starting_offsets, options.ending_offsets
    assert not isinstance(start, tuple), "of_partition() picks one"
    assert not isinstance(last, tuple), "of_partition() picks one"
    begin = first if start == EARLIEST else int(start)
    until = end if last in (None, LATEST) else int(last)
    if begin < first:
        hint = Hint(Action.READ_FROM_EARLIEST)
        options.report_data_loss(DataLoss(options.queue.manifest_path, begin, first, hint))
    if options.fail_on_data_loss and max(begin, until) > end:
        raise InvalidInput(
            f"startingOffsets {begin} and endingOffsets {until} were asked for and manifest "
            f"{options.queue.manifest_path!r} ends at {end - 1}: use at most {end} for both, or "
            "set failOnDataLoss to false"
        )
    if options.starting_timestamp_ms is not None:
        begin = sequence_since(view, options.starting_timestamp_ms)
    if options.ending_timestamp_ms is not None:
        until = sequence_since(view, options.ending_timestamp_ms)

    def lost(at: int, oldest: int) -> None:
        advice = "Another client took them off the manifest."
        options.report_data_loss(DataLoss(options.queue.manifest_path, at, oldest, advice))

    rule = ReadCommitted(options.queue.data_path_prefix, options.isolation)
    until = min(until, end)
    return [*committed_entries(view, begin, until, rule=rule, repeats=repeats, lost=lost)]
