"""Fetching batches: stateless and picklable.

A :class:`FetchHandle` turns one descriptor into one batch and moves no cursor, so any number of
threads and processes may use it while one owner keeps the :class:`~.consumer.Consumer`
(OpenData RFC 0003). :func:`~.read_ahead.fetch_many` is a bounded read-ahead over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Generic, TypeVar

import pyarrow as pa

from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig, StoreOptions
from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    CorruptData,
    ForeignLocation,
    InvalidInput,
    ObjectNotFound,
)
from opendata_buffer.formats.arrow import ReadBuffer, decode_arrow, decode_records, open_arrow
from opendata_buffer.formats.batch import DEFAULT_MAX_BYTES, is_confined, key_fault, largest_object
from opendata_buffer.formats.manifest import BatchDescriptor, Metadata
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Files, Get, read_bytes
from opendata_buffer.stores.open import open_store

NEAR_S, NEAR_BYTES_PER_S = 0.001, 1e9
"""A fetch that waited no longer than this came from a page cache, and not over a network."""

FAR, STRIKES = 4, 2
"""A store is far after ``STRIKES`` waits in a row of more than ``FAR`` times that. A busy machine
makes single waits long, too."""

LEAST_THREADS, MOST_THREADS = 16, 128
"""Fetches at once where the caller gives no number; a store keeps connections for the latter."""

FORGETTING = 1.01
"""How much the shortest wait known grows with each fetch."""


class AdaptiveConcurrency:
    """Whether fetches wait for their store, and how many at once hide the wait.

    May be kept from one read to the next. A store that is ``declared`` near stays so; of the others
    the waits are measured.
    """

    def __init__(self, *, declared: bool = False) -> None:
        self.near: bool | None = True if declared else None
        """Fetches hardly wait; None while nothing is known."""
        self.largest: int | None = None
        """Bytes of the largest result so far; None while nothing is known."""
        self._declared = declared
        self._strikes = 0
        self._shortest: float | None = None
        self._worked = 0.0
        self._decoded = 0.0

    @classmethod
    def of(cls, store: object) -> AdaptiveConcurrency:
        """For a new read of this store."""
        return cls(declared=isinstance(store, Files))

    @property
    def threads(self) -> int:
        """How many fetches at once keep one processor busy, as far as known; 16 to 128.

        That is the ratio of a fetch's wait to its work. The shortest wait counts: longer ones are
        also waits for a processor or the store's bandwidth, and grow with the number of threads.
        """
        if self._shortest is None:
            return LEAST_THREADS
        worked = self._worked + self._decoded
        if self._shortest >= worked * MOST_THREADS:
            return MOST_THREADS
        return max(LEAST_THREADS, 1 + ceil(self._shortest / worked))

    def fetched(self, size: int, waited: float, worked: float = 0.0) -> None:
        """Note a fetch of so many bytes that waited and used the processor for so many seconds."""
        self.largest = max(self.largest or 0, size)
        if self._declared:
            return
        # It grows a little with each fetch, so that a store that gets slower is noticed.
        shortest = waited if self._shortest is None else self._shortest * FORGETTING
        self._shortest = min(waited, shortest)
        self._worked = _average(self._worked, worked)
        # A busy machine lets a fetch wait about as long as it works, however near its store is.
        limit = max(NEAR_S + size / NEAR_BYTES_PER_S, worked)
        if waited > FAR * limit:
            self._strikes += 1
            if self._strikes >= STRIKES:
                self.near = False
            return
        self._strikes = 0
        if waited <= limit:
            self.near = True

    def decoded(self, worked: float) -> None:
        """Note how many seconds of the processor the decoding of a fetched batch took."""
        self._decoded = _average(self._decoded, worked)


def _average(so_far: float, value: float) -> float:
    """The moving average over about the last ten values."""
    return so_far + (value - so_far) / (10 if so_far else 1)


Decoded = TypeVar("Decoded")


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """A batch object as it is stored: fetched and not decoded.

    Its bytes may lie in a ReadBuffer, so that decoding copies nothing.
    """

    data: bytes | ReadBuffer
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return len(self.data)


RawBatch = PooledBatch
"""The name that it had as a public class."""


@dataclass(frozen=True, slots=True)
class Records:
    """A batch that was opened; ``arrays`` of ``pa.binary()`` are decoded one by one, once."""

    count: int
    arrays: Iterator[pa.BinaryArray]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]


@dataclass(frozen=True, slots=True)
class Fetch(Generic[Decoded]):
    """A function that fetches a batch in two steps, of which :func:`.fetch_many` runs the first
    ahead: ``handle.fetch_pooled`` reads the batch as it is stored, ``decode`` makes the result.
    """

    handle: FetchHandle
    decode: Callable[[PooledBatch], Decoded]

    def __call__(self, descriptor: BatchDescriptor) -> Decoded:
        """Fetch and decode one batch.

        Raises:
            BatchMissing: The object is gone.
            BatchUnreadable: It does not decode, or is larger than ``max_batch_bytes``.
            ForeignLocation: The location is outside the data prefix.
            StorageError: The store did not answer; the batch may be good.
        """
        return self.decode(self.handle.fetch_pooled(descriptor))


class FetchHandle:
    """Fetches and decodes batches. Thread-safe, stateless, cheap to copy.

    Pickles when its store can be reached from another process; there it is opened again, with
    the connections of that process.

    Args:
        store: Where the batches are: an open store, or its URL.
        options: How to reach a cloud; with a URL only.
        data_path_prefix: Locations must be below it (failure F23).
        max_batch_bytes: Largest record block decoded (failure F21).
        runtime: Clock of the duration metric.
    """

    def __init__(
        self,
        store: Get | str,
        options: StoreOptions | None = None,
        *,
        data_path_prefix: str,
        max_batch_bytes: int = DEFAULT_MAX_BYTES,
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

    def adaptive_concurrency(self) -> AdaptiveConcurrency:
        """What reading ahead of this store begins with; keep it where there are several reads."""
        return AdaptiveConcurrency.of(self._store)

    @property
    def fetch(self) -> Fetch[ConsumedBatch]:
        """``fetch(descriptor)`` fetches and decodes one batch: see :meth:`Fetch.__call__`."""
        return Fetch(self, self.decode)

    @property
    def fetch_arrow(self) -> Fetch[ArrowBatch]:
        """As :attr:`fetch`, to an Arrow array without a Python object per record."""
        return Fetch(self, self.decode_arrow)

    def fetch_pooled(self, descriptor: BatchDescriptor) -> PooledBatch:
        """As :attr:`fetch`, without decoding: see :meth:`decode`, :meth:`decode_arrow`."""
        started = self._runtime.monotonic()
        data: bytes | ReadBuffer
        with self._reading(descriptor) as (location, limit):
            if isinstance(self._store, Files):
                data = ReadBuffer()
                self._store.get_into(location, data.allocate, max_bytes=limit)
            else:
                data = read_bytes(self._store, location, limit)
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        metrics.bytes_collected.add(len(data))
        return PooledBatch(data, descriptor.sequence, location, descriptor.metadata)

    fetch_raw = fetch_pooled  # its name in version 0.1

    def decode(self, raw: PooledBatch) -> ConsumedBatch:
        """Decode the result of :meth:`fetch_pooled`.

        Raises:
            BatchUnreadable: It does not decode, or is larger than ``max_batch_bytes``.
        """
        with _unreadable(raw):
            entries = decode_records(raw.data, self._max_batch_bytes)
        _count(len(entries))
        return ConsumedBatch(entries, raw.sequence, raw.location, raw.metadata)

    def decode_arrow(self, raw: PooledBatch) -> ArrowBatch:
        """As :meth:`decode`, to an Arrow array."""
        with _unreadable(raw):
            values = decode_arrow(raw.data, self._max_batch_bytes)
        _count(len(values))
        return ArrowBatch(values, raw.sequence, raw.location, raw.metadata)

    def records(
        self, pooled: PooledBatch, array_bytes: int, *, check_first: bool = False
    ) -> Records:
        """Open the result of :meth:`fetch_pooled`, to decode it in arrays of ``array_bytes``.

        With ``check_first`` all of it is decoded once before the first array is handed out. Without
        it the arrays may raise ``BatchUnreadable`` after good ones.
        """
        with _unreadable(pooled):
            block = open_arrow(pooled.data, self._max_batch_bytes)
            if check_first:
                for _ in block.pieces(array_bytes):
                    pass
        count = block.footer.record_count

        def arrays() -> Iterator[pa.BinaryArray]:
            with _unreadable(pooled):
                yield from block.pieces(array_bytes)
            _count(count)

        return Records(count, arrays(), pooled.sequence, pooled.location, pooled.metadata)

    @contextmanager
    def _reading(self, descriptor: BatchDescriptor) -> Iterator[tuple[str, int]]:
        """Key and largest size of the batch's object; errors of reading it name the batch."""
        sequence, location = descriptor.sequence, descriptor.location
        # Otherwise a manifest that another program wrote could make the consumer read, with its own
        # rights, any object of the bucket (failure F23).
        if not is_confined(location, self._prefix):
            why = f"it is not below the data prefix {self._prefix!r}"
            if fault := key_fault(location):
                why = f"no object can have this name: {fault}"
            raise ForeignLocation(sequence, location, why)
        try:
            with _unreadable(descriptor):
                yield location, largest_object(self._max_batch_bytes)
        except ObjectNotFound as error:
            raise BatchMissing(sequence, location, "its object does not exist") from error
        except InvalidInput as error:
            raise ForeignLocation(sequence, location, _plain(error)) from error


@contextmanager
def _unreadable(batch: BatchDescriptor | PooledBatch) -> Iterator[None]:
    """Errors of its bytes name the batch."""
    try:
        yield
    except CorruptData as error:
        raise BatchUnreadable(batch.sequence, batch.location, _plain(error)) from error


def _plain(error: Exception) -> str:
    return str(error).rstrip(".")


def _count(records: int) -> None:
    metrics.batches_collected.add(1)
    metrics.entries_collected.add(records)
