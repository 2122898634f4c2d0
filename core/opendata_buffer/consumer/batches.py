"""What fetching a queue entry returns: a batch as stored, opened, or decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from opendata_buffer.formats.entries import Metadata

if TYPE_CHECKING:
    from opendata_buffer.formats.arrow import ReadBuffer
    from opendata_buffer.values import ValueOptions

__all__ = ["ArrowBatch", "ConsumedBatch", "PooledBatch", "RawBatch", "Records"]


@dataclass(frozen=True, slots=True)
class ConsumedBatch:
    """A decoded batch (OpenData RFC 0001, Consumer).

    Attributes:
        entries: The records, in ingestion order.
        sequence: Position in the queue; what ``ack`` takes.
        location: Key of the batch object.
        metadata: Ranges of records with their ingestion time and payload. A ``start_index``
            may lie beyond the last record: the format allows it.
    """

    entries: list[bytes]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return sum(map(len, self.entries))


@dataclass(frozen=True, slots=True)
class ArrowBatch:
    """A decoded batch whose records are one Arrow array; no Python object each.

    Attributes:
        values: The records, in ingestion order, as ``pa.binary()``.
        sequence: Position in the queue; what ``ack`` takes.
        location: Key of the batch object.
        metadata: As in :class:`ConsumedBatch`.
    """

    values: pa.BinaryArray
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array's buffers."""
        return int(self.values.nbytes)

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
        from opendata_buffer.consumer.table import records_to_table
        from opendata_buffer.values import ValueOptions

        return records_to_table(
            self.values,
            self.sequence,
            self.location,
            self.metadata,
            schema,
            options or ValueOptions(),
        )


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A batch object as it is stored: fetched and not decoded.

    Attributes:
        data: The object's bytes.
        sequence: Position in the queue.
        location: Key of the object.
        metadata: As in :class:`ConsumedBatch`.
    """

    data: bytes
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """An undecoded batch; its bytes may lie in a ReadBuffer, so that decoding copies nothing."""

    data: bytes | ReadBuffer
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Records:
    """A batch that was opened; its records are decoded as they are asked for, once.

    Attributes:
        count: Records in the batch.
        arrays: Arrays of type ``pa.binary()`` with the records in order.
        sequence: Position in the queue.
        location: Key of the batch object.
        metadata: Ranges of records with their ingestion time and payload.
    """

    count: int
    arrays: Iterator[pa.BinaryArray]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
