"""``df.write.format("opendata-buffer")``: where Spark calls in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from buffer_sink.options import SinkOptions
from buffer_sink.plan import Plan
from opendata_buffer.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["BufferBatchWriter", "batch_writer"]


class BufferBatchWriter(DataSourceArrowWriter):
    """Writes one DataFrame into a buffer: all of it becomes visible at once.

    Args:
        plan: The write.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __reduce__(self) -> tuple[type[BufferBatchWriter], tuple[Plan]]:
        # Spark pickles the writer that it plans a write with, once for the tasks and once more,
        # and not the one that it commits a micro-batch with. So this is where a write learns
        # what it goes to, by one read.
        self._plan = self._plan.locate()
        return BufferBatchWriter, (self._plan,)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Upload a task's rows; nothing is visible yet."""
        return self._plan.upload(iterator, self._plan.options.transaction)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the uploads of all tasks visible, all or none of them."""
        self._plan.append(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: uploads of a write that failed are the garbage collector's.

        Spark also calls this when ``commit`` raised, and then they may be in the queue.
        """


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> BufferBatchWriter:
    """The writer of one DataFrame.

    Args:
        options: Options of ``df.write``.
        schema: Columns of the DataFrame.
        overwrite: Whether to replace what is there (save mode overwrite).

    Raises:
        InvalidInput: An option, a column or the save mode cannot be used.
    """
    if overwrite:
        raise InvalidInput(
            "mode overwrite cannot be written to a buffer: a queue only grows. Use "
            "mode('append'); for an empty queue use another dataPathPrefix."
        )
    return BufferBatchWriter(Plan.make(SinkOptions.for_batch(options), schema))
