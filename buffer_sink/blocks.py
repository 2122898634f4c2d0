"""From Spark's rows to a batch's parts: schema check, ranges of metadata, blocks of records."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.manifest import Metadata

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["Block", "BlockBuilder", "Columns", "check_one_queue", "check_schema"]

_FIX = (
    "write all columns as one JSON object with .option('valueFormat', 'json'), put the row into "
    "`value` first, df.selectExpr('to_json(struct(*)) AS value'), or select what a buffer takes: "
    "`value` and optionally `metadata`, each BINARY or STRING"
)
_TYPES = {
    "value": ("binary", "string"),
    "metadata": ("binary", "string"),
    "key": ("binary", "string"),
    "partition": ("string",),
}
_LENGTH_BYTES = 4  # of every record in a block


@dataclass(frozen=True, slots=True)
class Columns:
    """Positions of the input columns.

    Attributes:
        value: The record.
        metadata: What a range of records carries.
        key: What a topic's partition is chosen by; it is not stored.
        partition: The name of a topic's partition; it is not stored either.
    """

    value: int
    metadata: int | None
    key: int | None = None
    partition: int | None = None


def check_schema(schema: StructType) -> Columns:
    """Find the input columns by name, in any case as Spark resolves names.

    Raises:
        InvalidInput: ``value`` is missing, a type is wrong, or there is any other column.
    """
    found: dict[str, int] = {}
    for position, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in _TYPES:
            raise InvalidInput(
                f"column {field.name!r} ({field.dataType.simpleString()}) cannot be written to a "
                f"buffer: {_FIX}"
            )
        if name in found:
            raise InvalidInput(f"column {name!r} is there twice: drop or rename one")
        if field.dataType.typeName() not in _TYPES[name]:
            fix = f"cast it, or {_FIX}" if name in ("value", "metadata") else "cast it"
            raise InvalidInput(
                f"column {field.name!r} has type {field.dataType.simpleString()}, not "
                f"{' or '.join(_TYPES[name]).upper().replace(' OR ', ' or ')}: {fix}"
            )
        found[name] = position
    if "value" not in found:
        raise InvalidInput(f"column 'value' is missing: {_FIX}")
    return Columns(found["value"], found.get("metadata"), found.get("key"), found.get("partition"))


def check_one_queue(columns: Columns) -> None:
    """Refuse columns that only a topic has a use for.

    Raises:
        InvalidInput: There is one.
    """
    for name, position in (("key", columns.key), ("partition", columns.partition)):
        if position is not None:
            raise InvalidInput(
                f"column {name!r} cannot be written to a single queue, it chooses a partition of "
                f"a topic: write to a topic ('opendata-buffer topic create STORE --partitions N'), "
                f"drop the column, or {_FIX}"
            )


@dataclass(frozen=True, slots=True)
class Block:
    """The records of one batch object, encoded but not yet compressed.

    Attributes:
        pieces: The record block in pieces.
        records: How many records it holds.
        metadata: Its ranges.
    """

    pieces: tuple[bytes | memoryview, ...]
    records: int
    metadata: tuple[Metadata, ...]

    @property
    def size(self) -> int:
        """Bytes of the record block."""
        return sum(map(len, self.pieces))


class BlockBuilder:
    """Cuts a task's rows into blocks of at most ``target`` bytes.

    Only a single record larger than that makes a larger block, up to ``limit``.

    Args:
        columns: Where value and metadata are.
        where: Which rows these are; for messages.
        target: Block size in bytes.
        limit: Largest block in bytes.
        max_ranges: Runs of equal metadata that may be written.
    """

    def __init__(
        self, columns: Columns, *, where: str, target: int, limit: int, max_ranges: int
    ) -> None:
        self._columns = columns
        self._where = where
        self._target = target
        self._limit = limit
        self._max_ranges = max_ranges
        self._rows = 0
        self._ranges = 0
        self._clear()

    @property
    def size(self) -> int:
        """Bytes of the block begun last."""
        return self._size

    def _clear(self) -> None:
        self._pieces: list[bytes | memoryview] = []
        self._records = 0
        self._size = 0
        self._runs: list[Metadata] = []

    def add(self, rows: pa.RecordBatch, now_ms: int) -> Iterator[Block]:
        """Take in rows, giving back each block they fill.

        Args:
            rows: As Spark gives them.
            now_ms: Ingestion time of blocks that begin with these rows.

        Raises:
            InvalidInput: A value is null or too large, or metadata changes too often.
        """
        values = rows.column(self._columns.value)
        if values.null_count:
            row = self._rows + pc.index(pc.is_null(values), True).as_py()
            raise InvalidInput(
                f"value is null in row {row} of {self._where} (counted from 0): a "
                "buffer has no null. Filter such rows, df.where('value IS NOT NULL'), or give "
                "them a value."
            )
        metadata = None
        if self._columns.metadata is not None:
            # Null metadata is written as empty: a range ends only where another one begins.
            metadata = rows.column(self._columns.metadata).cast(pa.large_binary())
            metadata = metadata.fill_null(b"") if metadata.null_count else metadata
        ends = _ends(values)
        start = done = 0
        while start < len(values):
            stop = bisect_right(ends, done + self._target - self._size, start)
            if stop == start:
                if self._records:
                    yield self._close()
                    continue
                stop = start + 1
                self._check_size(ends[start] - done, start)
            self._append(values.slice(start, stop - start), ends[stop - 1] - done)
            self._append_runs(metadata, start, stop, now_ms)
            self._records += stop - start
            start, done = stop, ends[stop - 1]
        self._rows += len(values)

    def finish(self) -> Block | None:
        """The block begun last, and begin another; None when it has no rows."""
        return self._close() if self._records else None

    def _append(self, values: pa.Array, size: int) -> None:
        piece, _ = encode_arrow_block(values)
        self._pieces.append(piece)
        self._size += size

    def _append_runs(self, metadata: pa.Array | None, start: int, stop: int, now_ms: int) -> None:
        # All ranges of a block have the time of its first rows: within one, times never fall.
        time_ms = self._runs[0].ingestion_time_ms if self._runs else now_ms
        if metadata is None:
            if not self._runs:
                self._runs.append(Metadata(0, time_ms, b""))
            return
        runs = pc.run_end_encode(metadata.slice(start, stop - start))
        begin = self._records
        payloads = runs.values.to_pylist()
        for payload, end in zip(payloads, runs.run_ends.to_pylist(), strict=True):
            if not self._runs or self._runs[-1].payload != payload:
                self._runs.append(Metadata(begin, time_ms, payload))
                self._ranges += 1
                self._check_ranges()
            begin = self._records + end

    def _check_size(self, size: int, start: int) -> None:
        if size > self._limit:
            raise InvalidInput(
                f"value has {size - _LENGTH_BYTES} bytes in row {self._rows + start} of "
                f"{self._where} (counted from 0), more than maxBatchBytes {self._limit} "
                "allows: readers refuse such a batch. Make it smaller, or raise maxBatchBytes "
                "here and where the queue is read."
            )

    def _check_ranges(self) -> None:
        """Each range is kept in the manifest (failure F35)."""
        if self._ranges > self._max_ranges:
            raise InvalidInput(
                f"metadata changes more than {self._max_ranges} times in "
                f"{self._where}: every run of equal metadata is kept in the manifest, which "
                "each append rewrites. Sort by metadata, put it into value, or raise "
                "maxMetadataRanges."
            )

    def _close(self) -> Block:
        block = Block(tuple(self._pieces), self._records, tuple(self._runs))
        self._clear()
        return block


def _ends(values: pa.Array) -> memoryview:
    """Where each record ends in a block of these values, in bytes."""
    sizes = pc.add(pc.binary_length(values).cast(pa.int64()), _LENGTH_BYTES)
    return memoryview(pc.cumulative_sum(sizes).buffers()[1]).cast("q")[: len(values)]
