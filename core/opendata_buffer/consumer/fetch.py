"""Fetching batches: stateless and picklable.

A :class:`FetchHandle` turns one descriptor into one batch and moves no cursor, so any number of
threads and processes may use it while one owner keeps the :class:`~.consumer.Consumer`
(OpenData RFC 0003). :func:`~.read_ahead.fetch_many` is a bounded read-ahead over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa

from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig, StoreOptions
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    CorruptBatch,
    CorruptData,
    ForeignLocation,
    InvalidInput,
    MalformedRecord,
    ObjectNotFound,
)
from opendata_buffer.formats.arrow import ReadBuffer, decode_arrow, decode_records, open_arrow
from opendata_buffer.formats.batch import DEFAULT_MAX_BYTES, largest_object
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import is_confined
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Blob, Get, GetInto, Near
from opendata_buffer.stores.open import open_store
from opendata_buffer.values import DROPMALFORMED, FAILFAST, Decoder, ValueOptions, infer

__all__ = [
    "ArrowBatch",
    "BatchDescriptor",
    "ConsumedBatch",
    "FetchHandle",
    "LEAST_THREADS",
    "MOST_THREADS",
    "AdaptiveConcurrency",
    "PooledBatch",
    "RawBatch",
    "Records",
    "records_to_table",
]


NEAR_S, NEAR_BYTES_PER_S = 0.001, 1e9
"""A fetch that waited no longer than this came from a page cache, and not over a network."""

FAR, STRIKES = 4, 2
"""Hysteresis: only so many times that wait, so often in a row, is not just a busy machine."""


# ---- How long fetches wait for their store ----
#
# Whether threads have anything to hide, and how many.


LEAST_THREADS, MOST_THREADS = 16, 128
"""At once, where the caller does not say how many; the latter is what a store keeps connections
for."""

FORGETTING = 1.01


class AdaptiveConcurrency:
    """Whether fetches hardly wait for their store; may be kept from one read to the next.

    A store that says itself that it is near stays so. Of the others it is measured, and there
    nothing tells a slow answer from a machine with too much to do but how long it takes: a busy
    one passes for a store that is far, and is then read ahead of for nothing.

    Args:
        declared: The store says that it is near.

    Attributes:
        near: They do not wait; None while nothing is known.
        largest: Bytes of the largest result so far; None while nothing is known.
    """

    def __init__(self, *, declared: bool = False) -> None:
        self.near: bool | None = True if declared else None
        self.largest: int | None = None
        self._declared = declared
        self._strikes = 0
        self._shortest: float | None = None
        self._worked = 0.0
        self._decoded = 0.0

    @classmethod
    def of(cls, store: object) -> AdaptiveConcurrency:
        """That of a store: what it says of itself, if it says anything."""
        return cls(declared=isinstance(store, Near) and store.is_near)

    @property
    def threads(self) -> int:
        """How many fetches at once keep one processor busy, as far as known; 16 to 128.

        While one waits, the others work: that takes as many as its wait is longer than its work.
        The shortest wait counts. Longer ones are also waits for a processor, or for the store's
        bandwidth, and grow with the number of threads.
        """
        if self._shortest is None:
            return LEAST_THREADS
        worked = self._worked + self._decoded
        if self._shortest >= worked * MOST_THREADS:
            return MOST_THREADS
        return max(LEAST_THREADS, 1 + ceil(self._shortest / worked))

    def saw(self, size: int, waited: float, worked: float = 0.0) -> None:
        """A fetch of so many bytes waited and used the processor for so many seconds.

        A busy machine lets a fetch wait about as long as it works, however near its store is.
        """
        self.largest = max(self.largest or 0, size)
        if self._declared:
            return
        # It grows a little with each fetch, so that a store that gets slower is noticed.
        shortest = waited if self._shortest is None else self._shortest * FORGETTING
        self._shortest = min(waited, shortest)
        self._worked = _average(self._worked, worked)
        limit = max(NEAR_S + size / NEAR_BYTES_PER_S, worked)
        if waited > FAR * limit:
            self._strikes += 1
            if self._strikes >= STRIKES:
                self.near = False
            return
        self._strikes = 0
        if waited <= limit:
            self.near = True

    def saw_decoding(self, worked: float) -> None:
        """What was fetched took so many seconds of the processor more until it was handed out."""
        self._decoded = _average(self._decoded, worked)


def _average(so_far: float, value: float) -> float:
    """Of about the last ten."""
    return so_far + (value - so_far) / (10 if so_far else 1)


# ---- The records of one batch as a table with columns. ----


SAMPLE = 1000
_HEAD = 64
_OWN: dict[str, tuple[pa.DataType, ...]] = {
    "_sequence": (pa.int64(),),
    "_index": (pa.int32(), pa.int64()),
    "_location": (pa.string(),),
    "_ingestion_time": (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
    "_metadata": (pa.binary(), pa.string()),
}


def records_to_table(
    values: pa.BinaryArray,
    sequence: int,
    location: str,
    metadata: tuple[Metadata, ...],
    schema: pa.Schema | None,
    options: ValueOptions,
) -> pa.Table:
    """See :meth:`opendata_buffer.consumer.fetch.ArrowBatch.to_table`."""
    if schema is None:
        schema = infer(values[:SAMPLE], options)
        if not schema.names:
            raise InvalidInput(
                f"batch {sequence} has no record that shows which columns there are: name them, "
                "to_table(pa.schema([('id', pa.int64())]))"
            )
    for each in schema:
        if each.name in _OWN and each.type not in _OWN[each.name]:
            types = " or ".join(map(str, _OWN[each.name]))
            raise InvalidInput(f"column {each.name!r} is of type {each.type}: make it {types}")
    fields = [each for each in schema if each.name not in _OWN]
    decoded = Decoder(pa.schema(fields), options).decode(values)
    if decoded.malformed and options.mode == FAILFAST:
        row = min(decoded.malformed)
        head = values[row].as_py()[:_HEAD]
        raise MalformedRecord(sequence, row, location, decoded.malformed[row], head)
    columns = {each.name: array for each, array in zip(fields, decoded.arrays, strict=True)}
    for each in schema:
        if each.name in _OWN:
            columns[each.name] = _own(each, len(values), sequence, location, metadata)
    table = pa.table([columns[each.name] for each in schema], schema=schema)
    dropped = list(decoded.headers)
    if options.mode == DROPMALFORMED:
        dropped += decoded.malformed
    if not dropped:
        return table
    kept = np.ones(len(values), np.bool_)
    kept[dropped] = False
    return table.filter(pa.array(kept))


def _own(
    field: pa.Field, count: int, sequence: int, location: str, metadata: tuple[Metadata, ...]
) -> pa.Array:
    if field.name == "_sequence":
        return pa.repeat(pa.scalar(sequence, field.type), count)
    if field.name == "_location":
        return pa.repeat(pa.scalar(location, field.type), count)
    if field.name == "_index":
        return pa.array(np.arange(count), field.type)
    found: list[Any] = [None] * count
    for each in metadata:  # Each covers what is behind its start, until the next one does.
        begin = min(each.start_index, count)
        if field.name == "_metadata":
            value: Any = each.payload
            if pa.types.is_string(field.type):
                value = each.payload.decode("utf-8", "replace")
        else:
            value = each.ingestion_time_ms * (1000 if field.type.unit == "us" else 1)
        found[begin:] = [value] * (count - begin)
    return pa.array(found, field.type)


# ---- What fetching a queue entry returns: a batch as stored, opened, or decoded. ----


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


class FetchHandle:
    """Fetches and decodes batches. Thread-safe, stateless, cheap to copy.

    Pickles when its store can be reached from another process; there it is opened again, with
    the connections of that process.

    Args:
        store: Where the batches are: an open store, or its URL.
        options: How to reach a cloud; with a URL only.
        data_path_prefix: Locations must be below it (failure F23).
        max_batch_bytes: Largest record block decoded (failure F21).
        allow_foreign_locations: Fetch whatever a manifest names, if it is in the store.
        runtime: Clock of the duration metric.
    """

    def __init__(
        self,
        store: Get | str,
        options: StoreOptions | None = None,
        *,
        data_path_prefix: str,
        max_batch_bytes: int = DEFAULT_MAX_BYTES,
        allow_foreign_locations: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        self._reopen: tuple[str, StoreOptions | None] | None = None
        if isinstance(store, str):
            opened = open_store(store, options)
            # The store's own URL: a relative path means another place in another process.
            self._reopen = (opened.url, options)
            store = opened
        self._store = store
        self._prefix = data_path_prefix
        self._max_batch_bytes = max_batch_bytes
        self._allow_foreign = allow_foreign_locations
        self._runtime = runtime if runtime is not None else SystemRuntime()

    @classmethod
    def of(
        cls, config: ConsumerConfig, *, store: Get | None = None, runtime: Runtime | None = None
    ) -> FetchHandle:
        """The handle of a consumer's configuration; ``store`` instead of the one it names."""
        return cls(
            config.store if store is None else store,
            config.store_options if store is None else None,
            data_path_prefix=config.data_path_prefix,
            max_batch_bytes=config.max_batch_bytes,
            allow_foreign_locations=config.allow_foreign_locations,
            runtime=runtime,
        )

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_runtime"]
        if self._reopen is not None:
            del state["_store"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._runtime = SystemRuntime()
        if self._reopen is not None:
            self._store = open_store(*self._reopen)

    def clone(self) -> FetchHandle:
        """An independent handle on the same store."""
        other = object.__new__(FetchHandle)
        other.__dict__.update(self.__dict__)
        return other

    def within(self, data_path_prefix: str) -> FetchHandle:
        """A handle on another queue of the same store, with the same settings."""
        other = self.clone()
        other._prefix = data_path_prefix
        return other

    def pace(self) -> AdaptiveConcurrency:
        """What reading ahead of this store begins with; keep it where there are several reads."""
        return AdaptiveConcurrency.of(self._store)

    def fetch(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """Fetch and decode one batch.

        Raises:
            BatchMissing: The object is gone.
            BatchUnreadable: It does not decode, or is larger than ``max_batch_bytes``.
            ForeignLocation: The location is outside the data prefix.
            TransientStorageError, PermanentStorageError: The store did not answer; nothing is
                said about the batch.
        """
        started = self._runtime.monotonic()
        batch = self.decode(self._get_pooled(descriptor))
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        return batch

    def fetch_arrow(self, descriptor: BatchDescriptor) -> ArrowBatch:
        """As :meth:`fetch`, to an Arrow array without a Python object per record."""
        started = self._runtime.monotonic()
        batch = self.decode_arrow(self._get_pooled(descriptor))
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        return batch

    def fetch_raw(self, descriptor: BatchDescriptor) -> RawBatch:
        """As :meth:`fetch`, without decoding: see :meth:`decode`, :meth:`decode_arrow`."""
        started = self._runtime.monotonic()
        raw = self._get(descriptor)
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        return raw

    def fetch_pooled(self, descriptor: BatchDescriptor) -> PooledBatch:
        """As :meth:`fetch_raw`, into memory that :meth:`records` decodes without copying it."""
        started = self._runtime.monotonic()
        batch = self._get_pooled(descriptor)
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        return batch

    def decode(self, raw: RawBatch | PooledBatch) -> ConsumedBatch:
        """Decode what :meth:`fetch_raw` or :meth:`fetch_pooled` returned.

        Raises:
            BatchUnreadable: It does not decode, or is larger than ``max_batch_bytes``.
        """
        try:
            entries = decode_records(raw.data, self._max_batch_bytes)
        except CorruptBatch as error:
            raise BatchUnreadable(raw.sequence, raw.location, _plain(error)) from error
        _count(len(entries))
        return ConsumedBatch(entries, raw.sequence, raw.location, raw.metadata)

    def decode_arrow(self, raw: RawBatch | PooledBatch) -> ArrowBatch:
        """As :meth:`decode`, to an Arrow array."""
        try:
            values = decode_arrow(raw.data, self._max_batch_bytes)
        except CorruptBatch as error:
            raise BatchUnreadable(raw.sequence, raw.location, _plain(error)) from error
        _count(len(values))
        return ArrowBatch(values, raw.sequence, raw.location, raw.metadata)

    def records(
        self, pooled: PooledBatch, array_bytes: int, *, check_first: bool = False
    ) -> Records:
        """Open what :meth:`fetch_pooled` returned, to decode it array by array.

        Args:
            pooled: A batch.
            array_bytes: About the size of an array, if records are alike.
            check_first: Decode all of it once before the first array is handed out, so that a
                batch which is unreadable in the middle is not read in part.

        Raises:
            BatchUnreadable: As :meth:`decode`. Without ``check_first`` also by the arrays,
                maybe after good ones.
        """
        sequence, location = pooled.sequence, pooled.location
        try:
            block = open_arrow(pooled.data, self._max_batch_bytes)
            if check_first:
                for _ in block.pieces(array_bytes):
                    pass
        except CorruptBatch as error:
            raise BatchUnreadable(sequence, location, _plain(error)) from error
        count = block.footer.record_count

        def arrays() -> Iterator[pa.BinaryArray]:
            try:
                yield from block.pieces(array_bytes)
            except CorruptBatch as error:
                raise BatchUnreadable(sequence, location, _plain(error)) from error
            _count(count)

        return Records(count, arrays(), sequence, location, pooled.metadata)

    def _get(self, descriptor: BatchDescriptor) -> RawBatch:
        with self._reading(descriptor) as (location, limit):
            got = self._store.get(location, max_bytes=limit)
        assert isinstance(got, Blob)
        metrics.bytes_collected.add(len(got.data))
        return RawBatch(got.data, descriptor.sequence, location, descriptor.metadata)

    def _get_pooled(self, descriptor: BatchDescriptor) -> PooledBatch:
        data: bytes | ReadBuffer
        if isinstance(self._store, GetInto):
            data = ReadBuffer()
            with self._reading(descriptor) as (location, limit):
                self._store.get_into(location, data.allocate, max_bytes=limit)
            metrics.bytes_collected.add(len(data))
        else:
            data = self._get(descriptor).data
        return PooledBatch(data, descriptor.sequence, descriptor.location, descriptor.metadata)

    @contextmanager
    def _reading(self, descriptor: BatchDescriptor) -> Iterator[tuple[str, int]]:
        """Key and largest size of the batch's object; errors of reading it name the batch."""
        sequence, location = descriptor.sequence, descriptor.location
        # failure F23: whoever can write the manifest could otherwise have the consumer read, with
        # its rights, any object of the bucket.
        if not self._allow_foreign and not is_confined(location, self._prefix):
            raise ForeignLocation(
                sequence,
                location,
                f"it is not below the data prefix {self._prefix!r}; set "
                "allow_foreign_locations to read it",
            )
        try:
            yield location, largest_object(self._max_batch_bytes)
        except ObjectNotFound as error:
            raise BatchMissing(sequence, location, "its object does not exist") from error
        except InvalidInput as error:
            raise ForeignLocation(sequence, location, _plain(error)) from error
        except CorruptData as error:
            raise BatchUnreadable(sequence, location, _plain(error)) from error


def _plain(error: Exception) -> str:
    return str(error).rstrip(".")


def _count(records: int) -> None:
    metrics.batches_collected.add(1)
    metrics.entries_collected.add(records)
