"""What both of Spark's writers share: a write planned on the driver, run in tasks, appended.

Spark makes a writer on the driver, pickles it to the tasks, and commits with another copy of
it, so a plan holds values only. What lives longer, stores and queue positions, is kept per
process: Spark reuses its Python workers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import TaskContext

from buffer_sink.blocks import Columns, check_schema
from buffer_sink.committer import WriteCommitter
from buffer_sink.messages import TaskUploads, WriteTask, collect
from buffer_sink.options import SinkOptions
from buffer_sink.partition import PartitionWriter
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.factory import open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

__all__ = ["Plan", "batch_id", "query_id", "task_property"]

_RUNTIME = SystemRuntime()


@dataclass(frozen=True, slots=True)
class Plan:
    """One write, as the driver planned it.

    Attributes:
        options: The sink's options.
        columns: Where the input columns are.
        made: When; no upload of the write is older.
    """

    options: SinkOptions
    columns: Columns
    made: Moment

    @classmethod
    def make(cls, options: SinkOptions, schema: StructType) -> Plan:
        """Plan a write now.

        Raises:
            InvalidInput: A column cannot be written.
        """
        return cls(options, check_schema(schema), Moment.now(_RUNTIME))

    def upload(
        self, rows: Iterator[pa.RecordBatch], transaction: Transaction | None
    ) -> TaskUploads:
        """In a task: upload its rows; nothing becomes visible."""
        context = TaskContext.get()
        task = WriteTask(
            partition=context.partitionId() if context is not None else 0,
            planned=self.made,
            transaction=transaction,
            query=query_id(),
        )
        queue = self.options.queue
        store = open_store(queue.store, queue.store_options)
        writer = PartitionWriter(self.options, self.columns, task, store=store, runtime=_RUNTIME)
        return writer.write(rows)

    def append(self, messages: Iterable[WriterCommitMessage | None]) -> None:
        """On the driver: make the uploads of all tasks visible, in one write of the manifest."""
        # Without the identity: it differs for each micro-batch of foreachBatch, and each
        # committer remembers a whole manifest.
        options = replace(self.options, app=None, version=None)
        try:
            _committer(options).append(collect(messages))
        except BaseException:
            # What this process remembers of the queue may be the reason, for example when the
            # queue was deleted on purpose. The error told it; a new start looks afresh.
            _committer.cache_clear()
            raise


@functools.lru_cache(maxsize=8)
def _committer(options: SinkOptions) -> WriteCommitter:
    store = open_store(options.queue.store, options.queue.store_options)
    return WriteCommitter(store, options, _RUNTIME)


def task_property(name: str) -> str | None:
    """A local property of the running Spark job; None outside of a task."""
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


def query_id() -> str | None:
    """Id of the streaming query that the task belongs to; None where Spark does not tell it.

    It is that of the checkpoint and survives restarts; the run id would not.
    """
    return task_property("sql.streaming.queryId")


def batch_id() -> int | None:
    """Spark's number of the micro-batch that the task belongs to; None where it has none."""
    found = task_property("streaming.sql.batchId")
    return None if found is None else int(found)
