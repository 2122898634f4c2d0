"""The yardstick: a Python source that hands over one prebuilt Arrow batch again and again.

With ``different`` copies of it in turn, each in memory of its own, it shows what the yardstick owes
to a processor's caches: no source whose rows are not the same again and again has them there.

It loads nothing of ours before its rows are asked for, so that a query over it starts as soon as
Spark lets one start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["TASKS", "Ceiling", "CeilingReader"]

TASKS = 2


@functools.cache
def prebuilt(schema: StructType, size: int, rows: int) -> pa.RecordBatch:
    """The first piece that our source would make of such records; built once in a worker."""
    from benchmarks.queues import records_of
    from buffer_source.rows import RowBuilder
    from opendata_buffer.consumer.descriptors import Records
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


class Ceiling(DataSource):
    """So many micro-batches of ``rows`` rows of ``size`` bytes."""

    @classmethod
    def name(cls) -> str:
        return "ceiling"

    def schema(self) -> StructType:
        from buffer_source.rows import default_schema

        return default_schema()

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        size, rows, batches = (int(self.options[name]) for name in ("size", "rows", "batches"))
        different = int(self.options.get("different", 1))
        return CeilingReader(schema, size, rows, batches, different)


class CeilingReader(DataSourceStreamReader):
    def __init__(
        self, schema: StructType, size: int, rows: int, batches: int, different: int = 1
    ) -> None:
        self._schema = schema
        self._size = size
        self._rows = rows
        self._batches = batches
        self._different = different

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"batch": 0}

    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, Any]:  # noqa: N802
        return {"batch": min(self._batches, start["batch"] + 1)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        tasks = min(TASKS, self._rows)
        return [InputPartition(self._rows // tasks) for _ in range(tasks)]

    def piece(self, rows: int) -> pa.RecordBatch:
        """What is handed over again and again; at most so many rows."""
        return prebuilt(self._schema, self._size, rows)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left = partition.value
        if left <= 0:
            return
        # A little more than a piece of ours, so that the first piece made of it is a full one.
        rows = min(left, 2_200_000 // self._size)
        batches = [self.piece(rows)]
        if self._different > 1:
            batches = copies(self._schema, self._size, rows, self._different)
        for batch in cycle(batches):
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                return
