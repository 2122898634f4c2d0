"""``df.writeStream.format("opendata-buffer")``: where Spark calls in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from buffer_sink.messages import TaskUploads
from buffer_sink.options import SinkOptions
from buffer_sink.plan import Plan, batch_id, query_id
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["BufferStreamWriter", "stream_writer"]


class BufferStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches into a buffer, each exactly once.

    Args:
        plan: The micro-batch.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __reduce__(self) -> tuple[type[BufferStreamWriter], tuple[Plan]]:
        # Spark pickles the writer that it plans a write with, once for the tasks and once more,
        # and not the one that it commits a micro-batch with. So this is where a write learns
        # what it goes to, by one read.
        self._plan = self._plan.locate()
        return BufferStreamWriter, (self._plan,)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet."""
        return self._plan.upload(iterator, _transaction(self._plan.options.app))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Make the uploads of all tasks visible, all or none of them, and once."""
        for message in messages:
            if isinstance(message, TaskUploads) and message.task.transaction is not None:
                found = message.task.transaction.batch
                if found != batchId:
                    raise InvalidInput(
                        f"tasks wrote batch {found} and Spark commits batch {batchId}: this "
                        "version of Spark is not supported by the sink"
                    )
        self._plan.append(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Does nothing.

        Spark also calls this when ``commit`` raised, and then the uploads may be in the queue:
        deleting them would lose records. Orphans are the garbage collector's.
        """


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> BufferStreamWriter:
    """The writer of one micro-batch.

    Args:
        options: Options of ``writeStream``.
        schema: Columns of the stream.
        overwrite: Whether each batch is to replace what is there (output mode complete).

    Raises:
        InvalidInput: An option, a column or the output mode cannot be used.
    """
    if overwrite:
        raise InvalidInput(
            "output mode complete cannot be written to a buffer: a queue only grows. Use "
            "outputMode('append'), with a watermark if the query aggregates."
        )
    return BufferStreamWriter(Plan.make(SinkOptions.for_stream(options), schema))


def _transaction(app: str | None) -> Transaction:
    app = app or query_id()
    batch = batch_id()
    if app is None or batch is None:
        raise InvalidInput(
            "the task does not know its query and batch: the streaming sink runs only in the "
            "tasks of a streaming query"
        )
    return Transaction(app, batch)
