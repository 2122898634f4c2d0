"""The batch source: a snapshot of what is queued, taken without disturbing its consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from buffer_source.filters import Predicate, push
from buffer_source.measures import Measures
from buffer_source.options import EARLIEST, LATEST, SourceOptions
from buffer_source.planner import pack
from buffer_source.rows import check_schema
from buffer_source.task import BatchPartition, read_batches
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.transactions import TransactionFilter
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.manifest import Manifest, QueueEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.factory import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["BufferBatchReader", "select"]


class BufferBatchReader(DataSourceReader):
    """Reads what is queued; claims no epoch and acknowledges nothing.

    A consumer that acknowledges batches while the read runs lets the garbage collector delete
    them, ``gcGracePeriodMs`` later; the read then fails and names the batch.

    Args:
        options: Parsed options.
        schema: Columns wanted: any subset, in any order.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check_batch()
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._predicates: list[Predicate] = []

    @property
    def pushFilters(self) -> _WelcomeFilters:
        """Take filters on ``sequence`` for good and those on ``ingestion_time`` as hints."""
        return _WelcomeFilters(self._push_filters)

    def _push_filters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._predicates, left = push(filters)
        return left

    def partitions(self) -> Sequence[InputPartition]:
        """Tasks over the queued batches that may match.

        Raises:
            InvalidInput: There is no queue, or ``endingOffsets`` is beyond its end.
            DataLoss: ``startingOffsets`` is before its start, unless ``failOnDataLoss`` is off.
        """
        options, runtime = self._options, SystemRuntime()
        config = options.consumer
        store = open_store(config.store, config.store_options)
        queue = Queue(store, config, runtime=runtime, role="reader")
        manifest = queue.read()
        if manifest is None:
            raise InvalidInput(
                f"there is no queue with manifest {config.manifest_path!r} in {store.url}: check "
                "the path and the options dataPathPrefix and manifestPath"
            )
        entries = select(manifest, options, self._predicates)
        batches = [BatchDescriptor.of(entry) for entry in entries]
        measures = Measures(
            store,
            config.data_path_prefix,
            runtime=runtime,
            concurrency=options.fetch_concurrency,
        )
        tasks = pack(
            batches, measures.estimates(batches), options.parallelism, options.min_partitions
        )
        return [BatchPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch, decode and cut the batches of one task. Runs on an executor."""
        # Spark makes up a partition of its own where there is none to read.
        descriptors = partition.descriptors if isinstance(partition, BatchPartition) else ()
        return read_batches(self._options, self._schema, descriptors)

    def __getstate__(self) -> dict[str, object]:
        # Predicates are closures and have done their work before a task runs.
        return {**self.__dict__, "_predicates": []}


class _WelcomeFilters:
    """``pushFilters`` for a reader that can also do without.

    Where pushing filters is off, which is Spark's default, Spark refuses to read at all from a
    reader that overrides ``pushFilters``; it tells by the method's ``__func__``. There it
    applies all filters itself, so being taken for a reader without the method is right.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, push_filters: Callable[[list[Filter]], Iterable[Filter]]) -> None:
        self._push_filters = push_filters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._push_filters(filters)


def select(
    manifest: Manifest, options: SourceOptions, predicates: Sequence[Predicate] = ()
) -> list[QueueEntry]:
    """The entries a batch read wants, repeats of a transaction left out.

    Raises:
        InvalidInput, DataLoss: The wanted positions are not in the queue.
    """
    first, end = manifest.first_sequence, manifest.next_sequence
    start, last = options.starting_offsets, options.ending_offsets
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
    transactions = TransactionFilter(options.queue.data_path_prefix)
    return [
        entry
        for entry in manifest.entries()
        # Offered first, whatever else is asked: the filter must see every entry.
        if transactions.offer(entry.sequence, entry.location)
        and begin <= entry.sequence <= until
        and all(predicate(entry) for predicate in predicates)
    ]
