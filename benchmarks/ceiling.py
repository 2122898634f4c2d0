"""The yardstick: a Python source that hands over one prebuilt Arrow batch again and again.

With ``read``, a directory, it also reads the files in it, as many bytes as its rows have, to memory
that it uses again, and copies what was read once. Nothing is decoded: what is then missing of the
yardstick's speed is what reading and one copy take, from any source.

It loads nothing of ours before its rows are asked for, so that a query over it starts as soon as
Spark lets one start.
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
RECORD_LENGTH = 4  # bytes of a record's length in an object


@functools.cache
def prebuilt(schema: StructType, size: int, rows: int) -> pa.RecordBatch:
    """The first piece that our source would make of such records; built once in a worker."""
    from benchmarks.queues import records_of
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
    """Read each file to the same memory, and copy it once; gives its size."""
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
    """What one task hands over.

    Attributes:
        rows: So many rows.
        number: Which task of the query this is, its micro-batches counted through.
    """

    rows: int
    number: int


class Ceiling(DataSource):
    """So many micro-batches of ``rows`` rows of ``size`` bytes."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> StructType:
        from buffer_source.schema import default_schema

        return default_schema()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        size, rows, batches = (int(self.options[name]) for name in ("size", "rows", "batches"))
        read, tasks = self.options.get("read", ""), int(self.options.get("tasks", TASKS))
        return CeilingReader(schema, size, rows, batches, read, tasks)


class CeilingReader(DataSourceStreamReader):
    piece_bytes = 4 * 1024 * 1024
    """Of a piece of ours; without loading it."""

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
        return {"batch": 0}

    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, Any]:  # noqa: N802
        return {"batch": min(self._batches, start["batch"] + 1)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        tasks = min(self._tasks, self._rows)
        first = start["batch"] * tasks
        return [Task(self._rows // tasks, first + number) for number in range(tasks)]

    def piece(self, rows: int) -> pa.RecordBatch:
        """What is handed over again and again; at most so many rows."""
        return prebuilt(self._schema, self._size, rows)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Task):  # Spark makes up one of its own where there is none
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
            unread -= batch.num_rows * (self._size + RECORD_LENGTH)
            left -= batch.num_rows

    def _reads(self, task: Task) -> Iterator[int]:
        """Reads files of the task's own, one after the other."""
        found = (entry.path for entry in os.scandir(self._read))
        files = sorted(path for path in found if path.endswith(".batch"))
        size = os.stat(files[0]).st_size
        count = -(-task.rows * (self._size + RECORD_LENGTH) // size)
        first = task.number * count
        return sizes_read([files[(first + i) % len(files)] for i in range(count + 1)])
