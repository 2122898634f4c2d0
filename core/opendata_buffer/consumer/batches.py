"""The batches that consumers deliver, and their records."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

import pyarrow as pa

from opendata_buffer.arguments import checked, wrong_type
from opendata_buffer.errors import InvalidInput
from opendata_buffer.familiar_names import (
    OF_BATCHES,
    OF_RECORDS,
    FamiliarNames,
    missing_attribute,
)
from opendata_buffer.formats.manifest import Metadata

if TYPE_CHECKING:
    from opendata_buffer.consumer.position import Position
    from opendata_buffer.values import ValueOptions


class Record(NamedTuple):
    """One record of a batch.

    Attributes:
        value: The record's bytes.
        metadata: The payload that was passed to its ``produce()`` call; empty if none was passed.
        ingestion_time_ms: The time at which it was produced, in milliseconds since the Unix epoch,
            by the producer's clock. None if the writer recorded no time.
    """

    value: bytes
    metadata: bytes
    ingestion_time_ms: int | None


if not TYPE_CHECKING:  # A named tuple cannot derive from FamiliarNames.

    def _missing(record, name):
        raise missing_attribute(record, name, OF_RECORDS)

    Record.__getattr__ = _missing


class HasRecords(FamiliarNames, ABC):
    """A batch whose records can be read one by one, each with its range's metadata and time.

    ::

        for record in batch:
            write(record.value, record.metadata)
        batch.ack()

    ``len(batch)`` is the number of records. ``batch[0]`` is one of them, and ``batch[:10]`` a list.
    To read all records, iterate: an index looks through the batch's metadata each time.
    """

    __slots__ = ()

    _instead = OF_BATCHES

    values: Sequence[bytes]
    metadata: tuple[Metadata, ...]

    def _record_values(self) -> Sequence[bytes]:
        return self.values

    def _value_at(self, index: int) -> bytes:
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)

    def __bool__(self) -> bool:
        # Without this, a batch without records would be false, and would end a loop such as
        # `while batch := consumer.next_batch(timeout=5)`.
        return True

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    @overload
    def __getitem__(self, index: SupportsIndex) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Record | list[Record]:
        """Return one record, or the list of those that a slice names.

        Args:
            index: The number of a record, from the end if it is negative, or a slice.

        Returns:
            The record, or a list of records.

        Raises:
            IndexError: The batch has no record with this number.
            InvalidInput: The index is not a number or a slice.
        """
        if isinstance(index, slice):
            return list(self.records())[index]
        if not isinstance(index, SupportsIndex):
            raise wrong_type("the index of a record", index, "a number or a slice")
        count, at = len(self), operator.index(index)
        number = at + count if at < 0 else at
        if not 0 <= number < count:
            raise IndexError(f"a batch of {count} records has no record {at}")
        payload, time_ms, start = b"", None, -1
        for found in self.metadata:
            if start <= found.start_index <= number:
                payload, time_ms, start = found.payload, found.ingestion_time_ms, found.start_index
        return Record(self._value_at(number), payload, time_ms)

    @abstractmethod
    def ack(self) -> None:
        """Acknowledge the batch."""

    async def ack_async(self) -> None:
        """Acknowledge the batch as :meth:`ack` does, without blocking the event loop.

        If the call is cancelled, it waits until the acknowledgement has ended, and then raises
        ``CancelledError``. So the next call on the consumer does not run at the same time.

        Raises:
            OpenDataBufferError: As :meth:`ack`.
        """
        import asyncio  # Imported late: it takes 20 ms.

        call = asyncio.ensure_future(asyncio.to_thread(self.ack))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise

    def records(self) -> Iterator[Record]:
        """Yield each :class:`Record` in ingestion order."""
        ranges = iter(sorted(self.metadata, key=lambda each: each.start_index))
        after = next(ranges, None)
        payload, time_ms = b"", None
        for index, value in enumerate(self._record_values()):
            while after is not None and after.start_index <= index:
                payload, time_ms = after.payload, after.ingestion_time_ms
                after = next(ranges, None)
            yield Record(value, payload, time_ms)


class DeliveredBatch(HasRecords):
    """The part that all batches of consumers share, whatever form their records have."""

    __slots__ = ()

    sequence: int
    partition: str
    _owner: Any

    @property
    def position(self) -> Position:
        """The position to save with the records. The next consumer then starts after this batch.

        Raises:
            InvalidInput: The batch was not delivered by a consumer, or it is already acknowledged.
        """
        position: Position = self._consumer().position_of(self)
        return position

    def ack(self) -> None:
        """Acknowledge the batch at the consumer that delivered it; see :meth:`.Consumer.ack`.

        Raises:
            InvalidInput: The batch was not delivered by a consumer, or it is not the next in order.
        """
        self._consumer().ack(self)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export the batch as an Arrow stream, for ``pa.table(batch)`` and ``pl.DataFrame(batch)``.

        A row has the columns ``value``, ``metadata``, ``sequence``, ``index`` and
        ``ingestion_time``, and for a batch of a topic ``partition``.

        Args:
            requested_schema: A schema that the caller would like, as a capsule.

        Returns:
            A capsule of the Arrow PyCapsule interface.
        """
        from opendata_buffer.consumer.rows import rows_of  # Imported late, like Arrow's readers.

        return rows_of(self).__arrow_c_stream__(requested_schema)

    def _consumer(self) -> Any:
        if self._owner is None:
            raise InvalidInput(
                f"batch {self.sequence} was fetched by a handle and not by a consumer, or sent to "
                "another process: call consumer.ack() or consumer.position_of() with its sequence"
            )
        return self._owner

    def __reduce__(self) -> tuple[Any, ...]:
        # A consumer cannot be pickled, so a batch is sent to another process without it.
        taken: Any = self
        return type(self), tuple(getattr(self, each.name) for each in fields(taken)[:-1])


@dataclass(frozen=True, slots=True)
class ConsumedBatch(DeliveredBatch):
    """A decoded batch (OpenData RFC 0001, Consumer).

    Attributes:
        values: The records, in ingestion order. ``entries`` is the RFC's name for them.
        sequence: The batch's position in the queue. Pass it to ``ack``.
        location: The key of the batch object.
        metadata: Ranges of records with their ingestion time and payload. The format allows a
            ``start_index`` past the last record.
        partition: The partition of the topic; empty for a queue.
    """

    values: list[bytes]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    partition: str = ""
    _owner: Any = field(default=None, repr=False, compare=False)

    @property
    def entries(self) -> list[bytes]:
        """The records, under the name that they have in OpenData RFC 0001."""
        return self.values

    @property
    def nbytes(self) -> int:
        """The size of the records, in bytes."""
        return sum(map(len, self.values))

    def as_arrow(self) -> ArrowBatch:
        """Return the same batch with its records in an Arrow array."""
        values = pa.array(self.values, pa.binary())
        rest = (self.sequence, self.location, self.metadata, self.partition, self._owner)
        return ArrowBatch(values, *rest)


@dataclass(frozen=True, slots=True)
class ArrowBatch(DeliveredBatch):
    """A decoded batch whose records are one Arrow array, without a Python object for each.

    Attributes:
        values: The records, in ingestion order, as ``pa.binary()``.
        sequence: The batch's position in the queue. Pass it to ``ack``.
        location: The key of the batch object.
        metadata, partition: See :class:`ConsumedBatch`.
    """

    values: pa.BinaryArray
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    partition: str = ""
    _owner: Any = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """The size of the array's buffers, in bytes."""
        return int(self.values.nbytes)

    def _record_values(self) -> Sequence[bytes]:
        values: list[bytes] = self.values.to_pylist()
        return values

    def _value_at(self, index: int) -> bytes:
        value: bytes = self.values[index].as_py()
        return value

    @checked
    def to_table(
        self, schema: pa.Schema | None = None, options: ValueOptions | None = None
    ) -> pa.Table:
        """Return the records as rows with columns. Each record is a JSON object or a CSV line.

        Args:
            schema: The names and types of the fields to read. It may also name the columns
                ``_sequence``, ``_index``, ``_location``, ``_ingestion_time``, ``_metadata`` and
                ``_partition``, and one for the text of malformed records. None infers the schema
                from the first 1,000 records.
            options: How to read the records; JSON by default.

        Returns:
            One row for each record, in order. With the mode DROPMALFORMED, a malformed record
            has no row.

        Raises:
            InvalidInput: The schema has a type that records cannot be read into, or no schema was
                given and the records show no column. Or the metadata is to be read as text and is
                not UTF-8.
            MalformedRecord: A record does not fit the schema, and the mode is FAILFAST.
        """
        # Imported late: Arrow's readers take 60 ms.
        from opendata_buffer.consumer.rows import table_of
        from opendata_buffer.values import ValueOptions, infer

        options = options or ValueOptions()
        if schema is None:
            schema = infer(self.values[:_SAMPLE], options)
            if not schema.names:
                raise InvalidInput(
                    f"batch {self.sequence} has no record that shows which columns there are: name "
                    "them, to_table(pa.schema([('id', pa.int64())]))"
                )
        check_batch_columns(schema)
        own = {name: OWN[name] for name in schema.names if name in OWN}
        return table_of(self, schema, own, options)


OWN = {
    f"_{name}": name
    for name in ("sequence", "index", "ingestion_time", "metadata", "location", "partition")
}
"""The buffer's columns by the names that they have next to the fields of records."""

_SAMPLE = 1000
"""The number of records that a schema is inferred from."""

_BATCH_COLUMNS: dict[str, tuple[pa.DataType, ...]] = {
    "_sequence": (pa.int64(),),
    "_index": (pa.int32(), pa.int64()),
    "_location": (pa.string(),),
    "_ingestion_time": (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
    "_metadata": (pa.binary(), pa.string()),
    "_partition": (pa.string(),),
}


def check_batch_columns(schema: pa.Schema) -> None:
    """Check the types of the columns that come from the batch.

    Args:
        schema: Fields of records, and columns of the batch.

    Raises:
        InvalidInput: A column of the batch has another type than it can have.
    """
    for column in schema:
        types = _BATCH_COLUMNS.get(column.name)
        if types is not None and column.type not in types:
            use = " or ".join(map(str, types))
            raise InvalidInput(f"column {column.name!r} is of type {column.type}: make it {use}")
