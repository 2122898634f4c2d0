"""The yardstick: a Python source that hands over one prebuilt Arrow batch again and again.

With ``different`` copies of it in turn, each in memory of its own, it shows what the yardstick owes
to a processor's caches: no source whose rows are not the same again and again has them there.

With ``read``, a directory, it also reads the files in it, as many bytes as its rows have, to memory
that it uses again; with ``copied`` it copies what was read once. Nothing is decoded: what is then
missing of the yardstick's speed is what reading takes, and what one copy takes, from any source.

It loads nothing of ours before its rows are asked for, so that a query over it starts as soon as
Spark lets one start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
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


@functools.cache
def copies(schema: StructType, size: int, rows: int, count: int) -> list[pa.RecordBatch]:
    """So many of :func:`prebuilt`, each in memory of its own."""
    import pyarrow as pa

    batch = prebuilt(schema, size, rows)
    stored = [pa.py_buffer(bytearray(batch.serialize())) for _ in range(count)]
    return [pa.ipc.read_record_batch(each, batch.schema) for each in stored]


def sizes_read(paths: Sequence[str], copied: bool) -> Iterator[int]:
    """Read each file, to the same memory; gives its size."""
    memory = copy = memoryview(bytearray())
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if len(memory) < size:
                memory = memoryview(bytearray(size))
                copy = memoryview(bytearray(size if copied else 0))
            assert file.readinto(memory[:size]) == size
        if copied:
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
        different = int(self.options.get("different", 1))
        read, copied = self.options.get("read", ""), "copied" in self.options
        tasks = int(self.options.get("tasks", TASKS))
        return CeilingReader(schema, size, rows, batches, different, read, copied, tasks)


class CeilingReader(DataSourceStreamReader):
    piece_bytes = 4 * 1024 * 1024
    """Of a piece of ours; without loading it."""

    def __init__(
        self,
        schema: StructType,
        size: int,
        rows: int,
        batches: int,
        different: int = 1,
        read: str = "",
        copied: bool = False,
        tasks: int = TASKS,
    ) -> None:
        self._schema = schema
        self._size = size
        self._rows = rows
        self._batches = batches
        self._different = different
        self._read = read
        self._copied = copied
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
        batches = [self.piece(rows)]
        if self._different > 1:
            batches = copies(self._schema, self._size, rows, self._different)
        reads = self._reads(partition) if self._read else None
        unread = 0  # bytes of the last file whose rows were not handed over yet
        for batch in cycle(batches):
            if reads is not None and unread <= 0:
                unread += next(reads)
            yield batch.slice(0, left)
            unread -= batch.num_rows * (self._size + RECORD_LENGTH)
            left -= batch.num_rows
            if left <= 0:
                return

    def _reads(self, task: Task) -> Iterator[int]:
        """Reads files of the task's own, one after the other."""
        found = (entry.path for entry in os.scandir(self._read))
        files = sorted(path for path in found if path.endswith(".batch"))
        size = os.stat(files[0]).st_size
        count = -(-task.rows * (self._size + RECORD_LENGTH) // size)
        first = task.number * count
        return sizes_read([files[(first + i) % len(files)] for i in range(count + 1)], self._copied)
