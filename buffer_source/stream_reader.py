"""The streaming source as Spark calls it.

For each source of a query Spark makes one :class:`BufferStreamReader` in a process of its own next
to the driver, and pickles another into every task. The calls on the driver's side go to a
:class:`.MicroBatchStream`, the one in a task to :func:`.read_partition`. This module translates:
offsets from and to JSON, and errors of the library into advice for a query.

The process that runs it may have another copy of pyspark than the one that is imported here. So
it recognises Spark's classes by their names, and never compares versions of Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import make_dataclass
from importlib import import_module
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from buffer_source.malloc import reserve_less_memory
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.older_spark import Json, UntoldStart
from buffer_source.options import SourceOptions
from buffer_source.partitions import INITIAL, SourceOffset
from buffer_source.schema import check_not_inferred, check_schema
from opendata_buffer.errors import DataLoss
from opendata_buffer.hints import Action, Hint
from opendata_buffer.option_reader import briefly, in_options
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)

# Spark's runner recognises a limit by the name and the field of its class.
ReadAllAvailable = make_dataclass("ReadAllAvailable", [], frozen=True)
ReadMinRows = make_dataclass("ReadMinRows", [("min_rows", int)], frozen=True)
ReadMaxRows = make_dataclass("ReadMaxRows", [("max_rows", int)], frozen=True)
ReadMaxFiles = make_dataclass("ReadMaxFiles", [("max_files", int)], frozen=True)
ReadMaxBytes = make_dataclass("ReadMaxBytes", [("max_bytes", int)], frozen=True)


def know_engine(schema: StructType) -> None:
    """Tell the process that made ``schema`` that the reader supports Trigger.AvailableNow.

    That process checks whether the reader is an instance of its own class. Spark 4.0 and 4.1 do not
    have the class, and on Databricks it belongs to a copy of pyspark under another name.
    """
    for package in {"pyspark", type(schema).__module__.partition(".")[0]}:
        try:
            module = import_module(f"{package}.sql.streaming.datasource")
        except ImportError:
            continue
        module.SupportsTriggerAvailableNow.register(BufferStreamReader)


class BufferStreamReader(DataSourceStreamReader):
    """Streams a buffer and delivers each batch once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check_stream()
        check_not_inferred(schema)
        check_schema(schema, options.values)
        self._options = options
        self._schema = schema
        self._micro_batches: MicroBatchStream | None = None
        self._untold = UntoldStart()

    def __getstate__(self) -> dict[str, Any]:
        # Tasks only read; positions and the consumer stay with the driver.
        return {**self.__dict__, "_micro_batches": None}

    def initialOffset(self) -> dict[str, Any]:
        """Return a fixed sentinel: Spark asks twice, and does not store the answer."""
        return dict(INITIAL)

    def getDefaultReadLimit(self) -> Any:
        """Return Spark's name for the limit, which its progress shows; see latestOffset."""
        options = self._options
        kinds = (ReadMaxFiles, ReadMaxBytes, ReadMaxRows, ReadMinRows)
        limits = (options.max_batches, options.max_bytes, options.max_records, options.min_records)
        given = (kind(rows) for kind, rows in zip(kinds, limits, strict=True) if rows is not None)
        return next(given, ReadAllAvailable())

    @briefly
    def prepareForTriggerAvailableNow(self) -> None:
        """Read the batches that are queued now, and stop."""
        with _with_advice():
            self._stream().prepare_available_now()

    @briefly
    def latestOffset(self, start: Json | None = None, limit: object = None) -> Json:
        """Decide where the next micro-batch ends.

        Args:
            start: Where the micro-batch starts; None in Spark 4.0 and 4.1.
            limit: Spark's ``ReadAllAvailable`` to read everything.

        Returns:
            The end; ``start`` itself if nothing waits.

        Raises:
            OpenDataBufferError: As :meth:`.MicroBatchStream.latest_offset`.
        """
        with _with_advice():
            if start is not None:
                # Spark passes this only if no limit is set, or for Trigger.Once, without limits.
                return self._latest(start, unlimited=type(limit).__name__ == "ReadAllAvailable")
            if self._options.has_limits and not self._untold.is_used:
                log.warning(
                    "this Spark does not tell a Python source its trigger: with "
                    "Trigger.AvailableNow or Trigger.Once a run reads one micro-batch, not more "
                    "than the limits allow. Leave the limits out, or start the run again until "
                    "nothing is left"
                )
            return self._untold.latest(lambda start: self._latest(start, unlimited=False))

    def _latest(self, start: Json, *, unlimited: bool) -> Json:
        offset = SourceOffset.from_json(start)
        end = self._stream().latest_offset(offset, unlimited=unlimited)
        return start if end == offset else end.to_json()

    @briefly
    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return backlog and lag, for the query's progress."""
        with _with_advice():
            return self._stream().report()

    @briefly
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch; a replay gets the same ones."""
        with _with_advice():
            end_offset = SourceOffset.from_json(end)
            if end_offset is None:
                return []
            self._untold.planned(start, end)
            if start == end:
                # At a restart, Spark 4.0 and 4.1 first plan an empty micro-batch, even if its end
                # is not in the commit log. Opening the queue there would acknowledge unread
                # batches.
                return []
            return self._stream().plan_input_partitions(SourceOffset.from_json(start), end_offset)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch, decode and cut the batches of one task. Runs on an executor."""
        from buffer_source.task import read_partition  # Only executors need this.

        return read_partition(self._options, self._schema, partition)

    @briefly
    def commit(self, end: dict[str, Any]) -> None:
        """Let the batches before ``end`` leave the queue."""
        with _with_advice():
            end_offset = SourceOffset.from_json(end)
            if end_offset is not None:
                self._stream().commit(end_offset)

    def stop(self) -> None:
        """Stop the collector. Spark usually ends the process without this call."""
        if self._micro_batches is not None:
            self._micro_batches.stop()

    def _stream(self) -> MicroBatchStream:
        if self._micro_batches is None:
            reserve_less_memory()
            queue = self._options.queue
            store = open_store(queue.store, queue.store_options)
            self._micro_batches = MicroBatchStream(self._options, store, SystemRuntime())
        return self._micro_batches


@contextmanager
def _with_advice() -> Iterator[None]:
    """Show errors in terms of a query."""
    try:
        with in_options():
            yield
    except MemoryError as error:
        error.args = (
            "the memory of the process that plans the query is used up. Each batch that waits in "
            "the manifest takes 0.2 kB there, and each that one micro-batch reads 0.9 kB: set "
            "the option maxBatchesPerTrigger, or raise the limit, the setting "
            "spark.sql.planner.pythonExecution.memory",
        )
        raise
    except DataLoss as error:
        error.add(Hint(Action.ACCEPT_LOSS))
        raise
