"""The streaming source as Spark calls it: JSON offsets in, JSON offsets and partitions out.

For each source of a query Spark makes one reader in a process of its own beside the driver,
which lives as long as the query runs, and another that it pickles into every task. A DataFrame
that is joined with itself is two sources, and neither learns which query it belongs to: the
second one fences the first, as another query would.

Spark asks for what a reader can do, and so does the reader: no version is compared. The runner of
Spark 4.0 and 4.1 calls ``latestOffset()`` without a start and a limit (:class:`UntoldStart`). And
the runner may be of another copy of pyspark than the one that is imported here, so its classes
are known by their names.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.offsets import INITIAL, SourceOffset
from buffer_source.options import SKIP_LOSS, SourceOptions
from buffer_source.planner import TaskBatches
from buffer_source.schema import check_not_inferred, check_schema
from buffer_source.task import read_batches
from opendata_buffer.errors import DataLoss, Fenced, InvalidInput
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)

Json = dict[str, Any]

M_ARENA_MAX = -8
"""Of glibc's malloc.h: how many heaps a process may have."""


@dataclass(frozen=True)
class ReadAllAvailable:
    """No limit. This and the next three have the names and fields of Spark's own classes, by which
    its runner knows them."""


@dataclass(frozen=True)
class ReadMaxRows:
    """A limit of records."""

    max_rows: int


@dataclass(frozen=True)
class ReadMaxFiles:
    """A limit of batches."""

    max_files: int


@dataclass(frozen=True)
class ReadMaxBytes:
    """A limit of stored bytes."""

    max_bytes: int


class UntoldStart:
    """Where the next micro-batch starts, for a Spark that calls ``latestOffset()`` without it.

    It starts where the last planned one ended: Spark 4.0 and 4.1 plan each micro-batch before they
    ask for the end of the next one, and at a restart they first plan the last one that is on
    record. Until Spark has planned an end, it gets the same one again: what it wrote into its log
    is the answer that it heard last.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._start: Json = dict(INITIAL)
        self._end: Json | None = None

    def latest(self, end_of: Callable[[Json], Json]) -> Json:
        """The end of the next micro-batch; ``end_of`` finds it for a start."""
        self.is_used = True
        if self._end is None or self._end == self._start:
            self._end = end_of(self._start)
        return self._end

    def planned(self, start: Json, end: Json) -> None:
        """Spark plans a micro-batch.

        Raises:
            InvalidInput: Spark had another answer for its end: it may repeat batches or pass some
                by. This is seen before Spark logs that answer, since a restart plans first.
        """
        if self._end is not None and (start, end) != (self._start, self._end):
            raise InvalidInput(
                f"Spark plans a micro-batch from {start} to {end}, and this source had answered "
                f"{self._end} for the start {self._start}. Nothing was read. Spark 4.0, 4.1 and "
                "Databricks before 18.1 do not tell a source where to start: leave the setting "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled off, and start the query "
                "again"
            )
        self._start, self._end = end, None


def know_engine(schema: StructType) -> None:
    """Let the runner that made ``schema`` see that the reader supports Trigger.AvailableNow.

    It asks for an instance of its own class, which is another one than that of the pyspark here
    where Databricks runs a copy under another name, and which Spark 4.0 and 4.1 lack.
    """
    for package in {"pyspark", type(schema).__module__.partition(".")[0]}:
        try:
            module = import_module(f"{package}.sql.streaming.datasource")
        except ImportError:
            continue
        module.SupportsTriggerAvailableNow.register(BufferStreamReader)


class BufferStreamReader(DataSourceStreamReader):
    """Streams a buffer, each batch once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check_stream()
        check_not_inferred(schema)
        check_schema(schema, options.values)
        self._options = options
        self._schema = schema
        self._micro_batches: MicroBatchStream | None = None
        self._untold = UntoldStart()

    def __getstate__(self) -> dict[str, Any]:
        # Tasks read; positions and the consumer stay with the driver.
        return {**self.__dict__, "_micro_batches": None}

    def initialOffset(self) -> dict[str, Any]:
        """A fixed sentinel: Spark asks twice and stores the answer nowhere."""
        return dict(INITIAL)

    def getDefaultReadLimit(self) -> Any:
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

    def latestOffset(self, start: Json | None = None, limit: object = None) -> Json:
        """The end of the next micro-batch; ``start`` itself when nothing waits.

        Args:
            start: Where it starts; None by Spark 4.0 and 4.1.
            limit: Spark's :class:`ReadAllAvailable` where all is to be read; None by the same.
        """
        with _with_advice():
            if start is not None:
                # Given back only where no limit is set, or by Trigger.Once, which has none.
                return self._latest(start, unlimited=type(limit).__name__ == "ReadAllAvailable")
            if not self._untold.is_used:
                self._warn_of_limits()
            return self._untold.latest(lambda start: self._latest(start, unlimited=False))

    def _latest(self, start: Json, *, unlimited: bool) -> Json:
        position = SourceOffset.from_json(start)
        end = self._stream().latest_offset(position, unlimited=unlimited)
        return start if end == position else end.to_json()

    def _warn_of_limits(self) -> None:
        if not isinstance(self.getDefaultReadLimit(), ReadAllAvailable):
            log.warning(
                "this Spark does not tell a Python source its trigger: with Trigger.AvailableNow "
                "or Trigger.Once a run reads one micro-batch, not more than the limits allow. "
                "Leave the limits out, or start the run again until nothing is left"
            )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Backlog and lag, for the query's progress."""
        return self._stream().report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch; a replay gets the same ones."""
        with _with_advice():
            until = SourceOffset.from_json(end)
            if until is None:
                return []
            self._untold.planned(start, end)
            if start == end:
                # At a restart Spark 4.0 and 4.1 plan this first, also for an end that is not in the
                # commit log: to open the queue there would acknowledge what is still to be read.
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
            _reserve_less_memory()
            queue = self._options.queue
            store = open_store(queue.store, queue.store_options)
            self._micro_batches = MicroBatchStream(self._options, store, SystemRuntime())
        return self._micro_batches


def _reserve_less_memory() -> None:
    """Let threads share one heap where the address space is limited (PYSPARK_PLANNER_MEMORY_MB).

    glibc reserves up to 128 MiB of it for the heap of each thread, and 8 MiB for its stack.
    """
    try:
        resource, ctypes = import_module("resource"), import_module("ctypes")
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            threading.stack_size(1 << 20)
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except (ImportError, AttributeError):
        pass  # another C library, or no Unix


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
    except MemoryError as error:
        error.args = (
            "the memory of the process that plans the query is used up. Each batch that waits in "
            "the manifest takes 0.2 kB there, and each that one micro-batch reads 0.9 kB: set "
            "the option maxBatchesPerTrigger, or raise the limit, the setting "
            "spark.sql.planner.pythonExecution.memory",
        )
        raise
    except DataLoss as error:
        error.args = (f"{error} {SKIP_LOSS}",)
        raise
