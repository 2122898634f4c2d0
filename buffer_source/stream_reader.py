"""The streaming source as Spark calls it: JSON offsets in, JSON offsets and partitions out.

For each source of a query Spark makes one reader in a process of its own beside the driver,
which lives as long as the query runs, and another that it pickles into every task. A DataFrame
that is joined with itself is two sources, and neither learns which query it belongs to: the
second one fences the first, as another query would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark import __version__ as spark_version
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxFiles,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError as error:
    raise ImportError(
        f"streaming from a buffer needs Spark 4.2 or later and this is {spark_version}: earlier "
        "ones do not tell a Python source what was committed, nor when to stop"
    ) from error

from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.offsets import INITIAL, SourceOffset
from buffer_source.options import SourceOptions
from buffer_source.planner import TaskBatches
from buffer_source.schema import check_not_inferred, check_schema
from buffer_source.task import read_batches
from opendata_buffer.errors import DataLoss, Fenced, QueueReset
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class BufferStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streams a buffer, each batch once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check_stream()
        check_not_inferred(schema)
        check_schema(schema, options.values)
        self._options = options
        self._schema = schema
        self._micro_batches: MicroBatchStream | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tasks read; positions and the consumer stay with the driver.
        return {**self.__dict__, "_micro_batches": None}

    def initialOffset(self) -> dict[str, Any]:
        """A fixed sentinel: Spark asks twice and stores the answer nowhere."""
        return dict(INITIAL)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark's name for the limit, for its progress; all limits are applied in latestOffset."""
        options = self._options
        if options.max_batches is not None:
            return ReadMaxFiles(options.max_batches)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        if options.max_records is not None:
            return ReadMaxRows(options.max_records)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Read what is queued now and stop."""
        with _with_advice():
            self._stream().prepare_available_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch; ``start`` itself when nothing waits."""
        with _with_advice():
            position = SourceOffset.from_json(start)
            # Given back only where no limit is set, or by Trigger.Once, which has none.
            unlimited = isinstance(limit, ReadAllAvailable)
            end = self._stream().latest_offset(position, unlimited=unlimited)
        return start if end == position else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Backlog and lag, for the query's progress."""
        return self._stream().report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch; a replay gets the same ones."""
        with _with_advice():
            until = SourceOffset.from_json(end)
            if until is None:
                return []
            begin = SourceOffset.from_json(start)
            return self._stream().plan_input_partitions(begin, until)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch, decode and cut the batches of one task. Runs on an executor."""
        # Spark makes up an input partition of its own where there is none to read.
        batches = partition.batches if isinstance(partition, TaskBatches) else ()
        return read_batches(self._options, self._schema, batches)

    def commit(self, end: dict[str, Any]) -> None:
        """The batches before ``end`` may leave the queue."""
        with _with_advice():
            position = SourceOffset.from_json(end)
            if position is not None:
                self._stream().commit(position)

    def stop(self) -> None:
        """Stop the collector. Spark mostly ends the process instead."""
        if self._micro_batches is not None:
            self._micro_batches.stop()

    def _stream(self) -> MicroBatchStream:
        if self._micro_batches is None:
            queue = self._options.queue
            store = open_store(queue.store, queue.store_options)
            self._micro_batches = MicroBatchStream(self._options, store, SystemRuntime())
        return self._micro_batches


@contextmanager
def _with_advice() -> Iterator[None]:
    """Add to an error of the library what it means in a query."""
    try:
        yield
    except Fenced as error:
        error.args = (
            f"{error} Another streaming query or consumer reads this queue, or this query reads "
            "it twice: it loads the queue twice, or joins a DataFrame with itself, which Spark "
            "reads as two sources. Use one query for each queue and load() it once in it; that "
            "DataFrame may be used several times in a union. Join within foreachBatch, where a "
            "micro-batch can be joined with itself. To look at a queue that another query reads, "
            "set the option acknowledge to false.",
        )
        raise
    except (DataLoss, QueueReset) as error:
        error.args = (
            f"{error} To go on with what is queued now, set the option failOnDataLoss to false; "
            "to begin anew, give the query a new checkpointLocation.",
        )
        raise
