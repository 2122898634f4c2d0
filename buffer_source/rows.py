"""From decoded batches to the rows Spark sees: Arrow record batches, never a Python row."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from buffer_source.columns import COLUMNS, Piece
from buffer_source.offsets import ONLY
from buffer_source.typed_rows import OWN, check_typed_schema, record_schema
from opendata_buffer import metrics
from opendata_buffer.errors import InvalidInput, MalformedRecord
from opendata_buffer.formats import MIB

if TYPE_CHECKING:
    from opendata_buffer.consumer.fetch import Records
    from opendata_buffer.values import Columns, Decoder, ValueOptions

__all__ = [
    "ARRAY_BYTES", "PIECE_BYTES", "TYPED_PIECE_BYTES", "RowBuilder", "arrow_schema",
    "check_schema", "default_schema",
]  # fmt: skip

log = logging.getLogger(__name__)

PIECE_BYTES = 4 * MIB
"""Bytes of values (and of metadata) in one record batch, unless a single row has more: each costs
the worker and the JVM some work of its own, which large ones share among more rows."""

TYPED_PIECE_BYTES = 2 * MIB
"""The same where records are read into columns: what lies between the decoder's steps is then still
in a processor's cache."""

ARRAY_BYTES = 16 * MIB
"""Bytes of values that are split into records at once, and then cut into record batches without a
copy. Arrow reserves memory for as many bytes as are left of a batch, and copies what it has into
less when it is done: of several arrays each would be copied twice."""

_HEAD = 64
"""Bytes of a malformed record that an error shows."""

PIECE_ROWS = 256 * 1024
"""Rows in one record batch at most; bounds the columns that are not values."""


def default_schema(include_location: bool = False, topic: bool = False) -> StructType:
    """The schema of a read without ``.schema(...)``; that of a topic tells partitions apart."""
    also = {"location": include_location, "partition": topic}
    return StructType(
        [
            StructField(name, column.types[0]())
            for name, column in COLUMNS.items()
            if column.by_default or also.get(name, False)
        ]
    )


def check_schema(schema: StructType, values: ValueOptions | None = None) -> None:
    """Accept any subset of the columns in any order; with ``values`` also fields of records.

    Raises:
        InvalidInput: An unknown column, a repeated one, one of another type, or NOT NULL for
            one that may be null.
    """
    if values is not None:
        check_typed_schema(schema, values, arrow_schema)
        return
    seen: set[str] = set()
    for field in schema.fields:
        name = field.name.lower()
        column = COLUMNS.get(name)
        if column is None:
            import difflib  # only where a name is wrong

            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidInput(
                f"schema has the column {field.name!r}, which an opendata-buffer does not have."
                f"{hint} Columns: {', '.join(COLUMNS)}. To read records into columns, set the "
                "option valueFormat to json or csv, or use from_json(value, schema) after loading."
            )
        if name in seen:
            raise InvalidInput(f"schema has the column {field.name!r} twice")
        seen.add(name)
        if not isinstance(field.dataType, column.types):
            types = " or ".join(each().simpleString().upper() for each in column.types)
            raise InvalidInput(
                f"schema wants column {field.name!r} as "
                f"{field.dataType.simpleString().upper()}: it is {types}. Cast it after loading."
            )
        if column.nullable and not field.nullable:
            raise InvalidInput(
                f"schema wants column {field.name!r} NOT NULL: records that were written without "
                "metadata have null there. Leave NOT NULL out, and drop such rows after loading."
            )
    if not seen:
        raise InvalidInput(f"schema has no column: use any of {', '.join(COLUMNS)}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema of the record batches that Spark takes; it compares, and not by name only."""
    try:
        return to_arrow_schema(schema, timezone="UTC")
    except TypeError:  # Spark 4.1, where it is UTC anyway
        return to_arrow_schema(schema)


class RowBuilder:
    """Builds record batches of one schema; made once in a task.

    Args:
        schema: A schema :func:`check_schema` accepts.
        values: How records are read into columns; None: not at all.
        piece_bytes: Bytes of values or metadata in a piece, unless a single row has more. Default:
            :data:`PIECE_BYTES`, or :data:`TYPED_PIECE_BYTES`.
        piece_rows: Rows in a piece at most.
    """

    def __init__(
        self,
        schema: StructType,
        values: ValueOptions | None = None,
        *,
        piece_bytes: int | None = None,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        self.schema = arrow_schema(schema)
        self._decoder: Decoder | None = None
        self._mode = "" if values is None else values.mode
        if values is not None:
            # It loads Arrow's compute functions, 40 ms; a query over bytes starts without them.
            from opendata_buffer.values import Decoder

            self._decoder = Decoder(record_schema(self.schema), values)
        own = {
            field.name: name
            for field in self.schema
            if (name := field.name.lower() if values is None else OWN.get(field.name, ""))
        }
        self._builders = {
            name: COLUMNS[own[name]].builder(self.schema.field(name).type) for name in own
        }
        self._reads_metadata = "metadata" in own.values()
        self._reads_values = values is not None or "value" in own.values()
        if piece_bytes is None:
            piece_bytes = PIECE_BYTES if values is None else TYPED_PIECE_BYTES
        self._piece_bytes = piece_bytes
        self._piece_rows = piece_rows

    def pieces(
        self, batch: Records, partition: str = ONLY, rows: range | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The batch as record batches in row order; none if it has no records.

        Args:
            batch: The batch, opened.
            partition: Of the source, that it is in.
            rows: Those wanted. Default: all.

        Raises:
            BatchUnreadable: A record array could not be decoded.
            InvalidInput: A STRING column was asked for and a record is not UTF-8.
            MalformedRecord: A record does not fit the schema, and mode is FAILFAST.
        """
        from buffer_source.runs import Runs  # not needed where a query is planned

        runs = Runs.of(batch.metadata, batch.count)
        wanted = range(batch.count) if rows is None else rows
        first = 0  # row of the batch that the array begins with
        for values in batch.arrays:
            if first >= wanted.stop:
                return  # the rest is another task's, and need not be decoded
            size = len(values)
            begin, count = max(0, wanted.start - first), min(size, wanted.stop - first)
            while begin < count:
                end = min(count, begin + self._piece_rows)
                if self._reads_metadata:
                    end = runs.fit(first + begin, first + end, self._piece_bytes) - first
                end = self._cut(values, begin, end)
                cut = runs.cut(first + begin, first + end)
                piece = Piece(
                    batch, values.slice(begin, end - begin), cut, first + begin, partition
                )
                built = self._build(piece)
                del piece
                yield built
                del built
                begin = end
            first += size
            del values  # or its memory is not free when the next one is decoded

    def _build(self, piece: Piece) -> pa.RecordBatch:
        columns = {name: builder.build(piece) for name, builder in self._builders.items()}
        if self._decoder is None:
            return pa.RecordBatch.from_arrays(list(columns.values()), schema=self.schema)
        decoded = self._decoder.decode(piece.values)
        for field, array in zip(self._decoder.schema, decoded.arrays, strict=True):
            columns[field.name] = array
        arrays = [columns[field.name] for field in self.schema]
        rows = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        return self._without_malformed(rows, piece, decoded)

    def _without_malformed(
        self, rows: pa.RecordBatch, piece: Piece, decoded: Columns
    ) -> pa.RecordBatch:
        """The rows that are delivered: all but those of headers, and as ``mode`` says.

        Raises:
            MalformedRecord: There is one, and mode is FAILFAST.
        """
        malformed, dropped = decoded.malformed, list(decoded.headers)
        if malformed:
            row = min(malformed)
            if self._mode == "FAILFAST":
                raise MalformedRecord(
                    piece.batch.sequence,
                    piece.begin + row,
                    piece.batch.location,
                    malformed[row],
                    piece.values[row].as_py()[:_HEAD],
                )
            metrics.records_malformed.add(len(malformed))
        if malformed and self._mode == "DROPMALFORMED":
            metrics.records_dropped.add(len(malformed))
            log.warning(
                "%d malformed records of batch %d at %r left out, the first is record %d: %s",
                len(malformed),
                piece.batch.sequence,
                piece.batch.location,
                piece.begin + row,
                malformed[row],
            )
            dropped += list(malformed)
        if not dropped:
            return rows
        kept = np.ones(rows.num_rows, np.bool_)
        kept[dropped] = False
        return rows.filter(pa.array(kept))

    def _cut(self, values: pa.BinaryArray, begin: int, limit: int) -> int:
        """The largest end in (begin, limit] with at most ``piece_bytes`` of values."""
        if not self._reads_values:
            return limit
        offsets: memoryview[int] = memoryview(values.buffers()[1]).cast("i")
        at = values.offset
        most = offsets[at + begin] + self._piece_bytes
        if offsets[at + limit] <= most:
            return limit
        end: int = bisect_right(offsets, most, at + begin, at + limit) - 1 - at
        return max(begin + 1, end)
