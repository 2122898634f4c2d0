"""The yardstick of the Spark suites: a Python source that hands over one prebuilt Arrow batch.

It hands over the same record batch again and again, which is the ceiling of Spark's Python path.

With the option ``read``, a directory, it also reads the files in it, as many bytes as its rows
have, into memory that it uses again, and copies them once. It decodes nothing. The difference to
the plain yardstick is the cost of reading and of one copy, which any source has to pay.

The module imports nothing of this library until its rows are read, so a query over it starts as
fast as Spark can start one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

TASKS = 2
LENGTH_BYTES = 4
"""Bytes of the length in front of each record of a batch object."""


@functools.cache
def prebuilt(schema: StructType, size: int, rows: int) -> pa.RecordBatch:
    """Build the first record batch that our source would make of ``rows`` records.

    A worker builds it once.

    Args:
        schema: The columns.
        size: Bytes of a record.
        rows: Number of records.

    Returns:
        The record batch.
    """
    from benchmarks.stores import records_of
    from buffer_source.task import RowBuilder
    from opendata_buffer.consumer.fetch import Records
    from opendata_buffer.formats.arrow import decode_arrow
    from opendata_buffer.formats.batch import encode_batch
    from opendata_buffer.formats.manifest import Metadata

    values = decode_arrow(encode_batch(records_of(size, rows)))
    metadata = (Metadata(0, 1_700_000_000_000, b"bench"),)
    batch = Records(rows, iter([values]), 0, "ingest/any.batch", metadata)
    return next(RowBuilder(schema).pieces(batch))


def sizes_read(paths: Sequence[str]) -> Iterator[int]:
    """Read each file into the same memory, copy it once, and give its size in bytes."""
    memory = copy = memoryview(bytearray())
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if len(memory) < size:
                memory = memoryview(bytearray(size))
                copy = memoryview(bytearray(size))
            assert file.readinto(memory[:size]) == size
        copy[:size] = memory[:size]
        yield size


@dataclass(frozen=True)
class Task(InputPartition):
    """One task of a micro-batch.

    Attributes:
        rows: Number of rows that it hands over.
        number: Number of the task, counted over all micro-batches of the query.
    """

    rows: int
    number: int


class Ceiling(DataSource):
    """The data source ``ceiling``.

    Options: ``batches`` (micro-batches of a query), ``rows`` (of each), ``size`` (bytes of a row),
    ``read`` (a directory, optional), and ``tasks`` (2 by default).
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "ceiling"

    def schema(self) -> StructType:
        """Return the columns of our source."""
        from buffer_source.schema import default_schema

        return default_schema()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader."""
        size, rows, batches = (int(self.options[name]) for name in ("size", "rows", "batches"))
        read, tasks = self.options.get("read", ""), int(self.options.get("tasks", TASKS))
        return CeilingReader(schema, size, rows, batches, read, tasks)


class CeilingReader(DataSourceStreamReader):
    """Reads the data source ``ceiling``.

    Args:
        schema: The columns.
        size: Bytes of a row.
        rows: Rows of a micro-batch.
        batches: Micro-batches of the query.
        read: Directory whose files are read and copied. Empty for none.
        tasks: Tasks of a micro-batch.
    """

    piece_bytes = 4 * 1024 * 1024
    """Bytes of a record batch of our source. A copy, because that module must not be imported."""

    def __init__(
        self,
        schema: StructType,
        size: int,
        rows: int,
        batches: int,
        read: str = "",
        tasks: int = TASKS,
    ) -> None:
        self._schema = schema
        self._size = size
        self._rows = rows
        self._batches = batches
        self._read = read
        self._tasks = tasks

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset before the first micro-batch."""
        return {"batch": 0}

    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, Any]:  # noqa: N802
        """Return the offset after the next micro-batch."""
        return {"batch": min(self._batches, start["batch"] + 1)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a micro-batch."""
        tasks = min(self._tasks, self._rows)
        first = start["batch"] * tasks
        return [Task(self._rows // tasks, first + number) for number in range(tasks)]

    def piece(self, rows: int) -> pa.RecordBatch:
        """Return the record batch that is handed over again and again, of at most ``rows`` rows."""
        return prebuilt(self._schema, self._size, rows)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Hand over the rows of one task."""
        if not isinstance(partition, Task):  # Spark's own, for a micro-batch without tasks
            return
        left = partition.rows
        # A little more than a piece of ours, so that the first piece made of it is a full one.
        rows = min(left, self.piece_bytes * 21 // 20 // self._size)
        batch = self.piece(rows)
        reads = self._reads(partition) if self._read else None
        unread = 0  # bytes of the last file whose rows were not handed over yet
        while left > 0:
            if reads is not None and unread <= 0:
                unread += next(reads)
            yield batch.slice(0, left)
            unread -= batch.num_rows * (self._size + LENGTH_BYTES)
            left -= batch.num_rows

    def _reads(self, task: Task) -> Iterator[int]:
        """Read files that no other task reads, one after the other."""
        found = (entry.path for entry in os.scandir(self._read))
        files = sorted(path for path in found if path.endswith(".batch"))
        size = os.stat(files[0]).st_size
        count = -(-task.rows * (self._size + LENGTH_BYTES) // size)
        first = task.number * count
        return sizes_read([files[(first + i) % len(files)] for i in range(count + 1)])
