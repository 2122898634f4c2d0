"""Batches as consumers deliver them, and their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from opendata_buffer.arguments import checked
from opendata_buffer.errors import InvalidInput, MalformedRecord
from opendata_buffer.formats.manifest import Metadata

if TYPE_CHECKING:
    from opendata_buffer.consumer.position import Position
    from opendata_buffer.values import ValueOptions


class Record(NamedTuple):
    """One record of a batch.

    Attributes:
        value: Its bytes.
        metadata: The payload that its ``produce()`` call gave; empty without one.
        ingestion_time_ms: When it was produced, milliseconds since the Unix epoch, by the
            producer's clock; None where the writer recorded no time.
    """

    value: bytes
    metadata: bytes
    ingestion_time_ms: int | None


class HasRecords:
    """Its records one by one, each with the metadata and the time of its range."""

    __slots__ = ()

    entries: Sequence[bytes]
    metadata: tuple[Metadata, ...]

    def _record_values(self) -> Sequence[bytes]:
        return self.entries

    def records(self) -> Iterator[Record]:
        """Each :class:`Record` in ingestion order."""
        ranges = iter(sorted(self.metadata, key=lambda each: each.start_index))
        after = next(ranges, None)
        payload, time_ms = b"", None
        for index, value in enumerate(self._record_values()):
            while after is not None and after.start_index <= index:
                payload, time_ms = after.payload, after.ingestion_time_ms
                after = next(ranges, None)
            yield Record(value, payload, time_ms)


class DeliveredBatch(HasRecords):
    """What the batches of consumers have in common, beside their fields."""

    __slots__ = ()

    sequence: int
    partition: str
    _owner: Any

    @property
    def position(self) -> Position:
        """What to save with the records: the next consumer starts behind this batch.

        Raises:
            InvalidInput: No consumer delivered it, or it is acknowledged already.
        """
        position: Position = self._consumer().position_of(self)
        return position

    def ack(self) -> None:
        """Acknowledge it at the consumer that delivered it: see :meth:`.Consumer.ack`."""
        self._consumer().ack(self)

    def _consumer(self) -> Any:
        if self._owner is None:
            raise InvalidInput(
                f"batch {self.sequence} was fetched by a handle and not by a consumer, or sent to "
                "another process: call consumer.ack() or consumer.position_of() with its sequence"
            )
        return self._owner

    def __reduce__(self) -> tuple[Any, ...]:
        # A batch goes to other processes without its consumer.
        taken: Any = self
        return type(self), tuple(getattr(self, each.name) for each in fields(taken)[:-1])


@dataclass(frozen=True, slots=True)
class ConsumedBatch(DeliveredBatch):
    """A decoded batch (OpenData RFC 0001, Consumer).

    Attributes:
        entries: The records, in ingestion order.
        sequence: Position in the queue; what ``ack`` takes.
        location: Key of the batch object.
        metadata: Ranges of records with their ingestion time and payload. A ``start_index``
            may lie beyond the last record: the format allows it.
        partition: Of the topic; empty for a queue.
    """

    entries: list[bytes]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    partition: str = ""
    _owner: Any = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return sum(map(len, self.entries))

    def as_arrow(self) -> ArrowBatch:
        """The same batch with its records in an Arrow array."""
        values = pa.array(self.entries, pa.binary())
        rest = (self.sequence, self.location, self.metadata, self.partition, self._owner)
        return ArrowBatch(values, *rest)


@dataclass(frozen=True, slots=True)
class ArrowBatch(DeliveredBatch):
    """A decoded batch whose records are one Arrow array; no Python object each.

    Attributes:
        values: The records, in ingestion order, as ``pa.binary()``.
        sequence: Position in the queue; what ``ack`` takes.
        location: Key of the batch object.
        metadata, partition: As in :class:`ConsumedBatch`.
    """

    values: pa.BinaryArray
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    partition: str = ""
    _owner: Any = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the array's buffers."""
        return int(self.values.nbytes)

    def _record_values(self) -> Sequence[bytes]:
        values: list[bytes] = self.values.to_pylist()
        return values

    @checked
    def to_table(
        self, schema: pa.Schema | None = None, options: ValueOptions | None = None
    ) -> pa.Table:
        """The records as rows with columns: JSON objects, or CSV lines.

        Args:
            schema: Names and types of the fields to read. Also, where they are named, the columns
                ``_sequence``, ``_index``, ``_location``, ``_ingestion_time`` and ``_metadata``, and
                one for the text of malformed records. None: what the first 1,000 records have.
            options: How to read; JSON by default.

        Returns:
            One row for each record, in order; without malformed ones if the mode is DROPMALFORMED.

        Raises:
            InvalidInput: A type that records are not read into, or nothing to infer a schema from.
            MalformedRecord: A record does not fit the schema, and the mode is FAILFAST.
        """
        from opendata_buffer.values import (  # Arrow's readers: 60 ms of a query's start
            FAILFAST,
            Decoder,
            ValueOptions,
            infer,
        )  # fmt: skip

        options, values = options or ValueOptions(), self.values
        if schema is None:
            schema = infer(values[:_SAMPLE], options)
            if not schema.names:
                raise InvalidInput(
                    f"batch {self.sequence} has no record that shows which columns there are: name "
                    "them, to_table(pa.schema([('id', pa.int64())]))"
                )
        for each in schema:
            if each.name in _BATCH_COLUMNS and each.type not in _BATCH_COLUMNS[each.name]:
                types = " or ".join(map(str, _BATCH_COLUMNS[each.name]))
                raise InvalidInput(f"column {each.name!r} is of type {each.type}: make it {types}")
        fields = [each for each in schema if each.name not in _BATCH_COLUMNS]
        decoded = Decoder(pa.schema(fields), options).decode(values)
        if decoded.malformed and options.mode == FAILFAST:
            row = min(decoded.malformed)
            data = values[row].as_py()
            raise MalformedRecord(self.sequence, row, self.location, decoded.malformed[row], data)
        columns = {each.name: array for each, array in zip(fields, decoded.arrays, strict=True)}
        for each in schema:
            if each.name in _BATCH_COLUMNS:
                columns[each.name] = _batch_column(each, self)
        table = pa.table([columns[each.name] for each in schema], schema=schema)
        return decoded.delivered(table, options.mode)


_SAMPLE = 1000
"""Records that a schema is inferred from."""

_BATCH_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "_sequence": (pa.int64(),),
    "_index": (pa.int32(), pa.int64()),
    "_location": (pa.string(),),
    "_ingestion_time": (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
    "_metadata": (pa.binary(), pa.string()),
}


def _batch_column(field: pa.Field, batch: ArrowBatch) -> pa.Array:
    """One of the columns that come from the batch and not from its records."""
    count = len(batch.values)
    if field.name in ("_sequence", "_location"):
        value: Any = batch.sequence if field.name == "_sequence" else batch.location
        return pa.repeat(pa.scalar(value, field.type), count)
    if field.name == "_index":
        return pa.array(np.arange(count), field.type)
    found: list[Any] = [None] * count
    for each in batch.metadata:  # Each covers the records from its start to that of the next.
        begin = min(each.start_index, count)
        if field.name == "_metadata":
            value = each.payload
            if pa.types.is_string(field.type):
                value = each.payload.decode("utf-8", "replace")
        else:
            value = each.ingestion_time_ms * (1000 if field.type.unit == "us" else 1)
        found[begin:] = [value] * (count - begin)
    return pa.array(found, field.type)
