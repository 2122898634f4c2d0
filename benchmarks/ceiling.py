"""The yardstick: a Python source that hands over one prebuilt Arrow batch again and again.

It loads nothing of ours before its rows are asked for, so that a query over it starts as soon as
Spark lets one start.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
        return CeilingReader(schema, size, rows, batches)


class CeilingReader(DataSourceStreamReader):
    def __init__(self, schema: StructType, size: int, rows: int, batches: int) -> None:
        self._schema = schema
        self._size = size
        self._rows = rows
        self._batches = batches

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
        batch = self.piece(min(left, 2_200_000 // self._size))
        while left >= batch.num_rows:
            yield batch
            left -= batch.num_rows
        if left:
            yield batch.slice(0, left)
