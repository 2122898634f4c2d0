"""Fetching batches: stateless and picklable.

A :class:`FetchHandle` turns one descriptor into one batch and moves no cursor, so any number of
threads and processes may use it while one owner keeps the :class:`~.consumer.Consumer`
(OpenData RFC 0003). :func:`~.read_ahead.fetch_many` is a bounded read-ahead over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig, StoreOptions
from opendata_buffer.consumer.batches import (
    ArrowBatch,
    ConsumedBatch,
    PooledBatch,
    RawBatch,
    Records,
)
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.pace import Pace
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    CorruptBatch,
    CorruptData,
    ForeignLocation,
    InvalidInput,
    ObjectNotFound,
)
from opendata_buffer.formats.arrow import ReadBuffer, decode_arrow, open_arrow
from opendata_buffer.formats.batch import DEFAULT_MAX_BYTES, decode_batch, largest_object
from opendata_buffer.formats.keys import is_confined
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores import Blob, Get, GetInto
from opendata_buffer.stores.factory import open_store

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FetchHandle"]


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

    def pace(self) -> Pace:
        """What reading ahead of this store begins with; keep it where there are several reads."""
        return Pace.of(self._store)

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
            entries = decode_batch(raw.data, self._max_batch_bytes)
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
