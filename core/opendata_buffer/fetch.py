"""Fetching batches: stateless, picklable, many at once and still in order.

A :class:`FetchHandle` turns one descriptor into one batch and moves no cursor, so any number of
threads and processes may use it while one owner keeps the :class:`~.consumer.Consumer`
(RFC 0003). :func:`fetch_many` is a bounded read-ahead over it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig, StoreOptions
from opendata_buffer.descriptors import ArrowBatch, BatchDescriptor, ConsumedBatch, RawBatch
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    CorruptBatch,
    CorruptData,
    ForeignLocation,
    InvalidInput,
    ObjectNotFound,
)
from opendata_buffer.formats.arrow import decode_arrow
from opendata_buffer.formats.batch import DEFAULT_MAX_BYTES, decode_batch, largest_object
from opendata_buffer.formats.keys import is_confined
from opendata_buffer.runtime import Runtime, SystemRuntime, Task
from opendata_buffer.stores import Blob, Get
from opendata_buffer.stores.factory import open_store

__all__ = ["FetchHandle", "fetch_many"]

T = TypeVar("T")

DEFAULT_CONCURRENCY = 16
DEFAULT_MAX_IN_FLIGHT_BYTES = 256 * 1024 * 1024

NEAR_BYTES = 4 * 1024 * 1024
"""Read-ahead over a near store: more would only push what was read out of the CPU's caches."""

NEAR_S, NEAR_BYTES_PER_S = 0.001, 1e9
"""A store is near when a read took no longer than this: a disk's page cache, not a network."""


class FetchHandle:
    """Fetches and decodes batches. Thread-safe, stateless, cheap to copy.

    Pickles when its store can be reached from another process; there it is opened again, with
    the connections of that process.

    Args:
        store: Where the batches are: an open store, or its URL.
        options: How to reach an S3 store; with a URL only.
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
        batch = self.decode(self._get(descriptor))
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        return batch

    def fetch_arrow(self, descriptor: BatchDescriptor) -> ArrowBatch:
        """As :meth:`fetch`, to an Arrow array without a Python object per record."""
        started = self._runtime.monotonic()
        batch = self.decode_arrow(self._get(descriptor))
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        return batch

    def fetch_raw(self, descriptor: BatchDescriptor) -> RawBatch:
        """As :meth:`fetch`, without decoding: see :meth:`decode`, :meth:`decode_arrow`."""
        started = self._runtime.monotonic()
        raw = self._get(descriptor)
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        return raw

    def decode(self, raw: RawBatch) -> ConsumedBatch:
        """Decode what :meth:`fetch_raw` returned.

        Raises:
            BatchUnreadable: It does not decode, or is larger than ``max_batch_bytes``.
        """
        try:
            entries = decode_batch(raw.data, self._max_batch_bytes)
        except CorruptBatch as error:
            raise BatchUnreadable(raw.sequence, raw.location, _plain(error)) from error
        _count(len(entries))
        return ConsumedBatch(entries, raw.sequence, raw.location, raw.metadata)

    def decode_arrow(self, raw: RawBatch) -> ArrowBatch:
        """As :meth:`decode`, to an Arrow array."""
        try:
            values = decode_arrow(raw.data, self._max_batch_bytes)
        except CorruptBatch as error:
            raise BatchUnreadable(raw.sequence, raw.location, _plain(error)) from error
        _count(len(values))
        return ArrowBatch(values, raw.sequence, raw.location, raw.metadata)

    def _get(self, descriptor: BatchDescriptor) -> RawBatch:
        sequence, location = descriptor.sequence, descriptor.location
        # F23: whoever can write the manifest could otherwise have the consumer read, with its
        # rights, any object of the bucket.
        if not self._allow_foreign and not is_confined(location, self._prefix):
            raise ForeignLocation(
                sequence,
                location,
                f"it is no batch below the data prefix {self._prefix!r}; set "
                "allow_foreign_locations to read it",
            )
        try:
            got = self._store.get(location, max_bytes=largest_object(self._max_batch_bytes))
        except ObjectNotFound as error:
            raise BatchMissing(sequence, location, "its object does not exist") from error
        except InvalidInput as error:
            raise ForeignLocation(sequence, location, _plain(error)) from error
        except CorruptData as error:
            raise BatchUnreadable(sequence, location, _plain(error)) from error
        assert isinstance(got, Blob)
        metrics.bytes_collected.add(len(got.data))
        return RawBatch(got.data, sequence, location, descriptor.metadata)


def _plain(error: Exception) -> str:
    return str(error).rstrip(".")


def _count(records: int) -> None:
    metrics.batches_collected.add(1)
    metrics.entries_collected.add(records)


def fetch_many(
    fetch: Callable[[BatchDescriptor], T],
    descriptors: Iterable[BatchDescriptor],
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
    runtime: Runtime | None = None,
    size_of: Callable[[T], int] | None = None,
) -> Generator[T, None, None]:
    """Fetch ahead, in parallel, and yield the results in the order of the descriptors.

    The bytes in flight are those of fetches under way and of results nobody took yet. A fetch
    begins while they are below the limit, and always when there are none: its own size is the
    descriptor's, or where that is unknown the largest result so far. Until a first result says
    how large results are, a descriptor without a size is fetched alone. Once a fetch was as
    quick as a read from memory, the limit is 4 MiB if it was more.

    An error is raised at its place in the order, after everything before it; no fetch begins
    after it. Closing the iterator, or dropping it, ends the threads.

    Args:
        fetch: One fetch, such as :meth:`FetchHandle.fetch`. Called from several threads.
        descriptors: What to fetch.
        concurrency: Threads, at most; started as there is work for them. Default 16.
        max_in_flight_bytes: Default 256 MiB.
        runtime: Threads and clock.
        size_of: Bytes of a result. Default: its ``nbytes``, else the descriptor's size.

    Raises:
        InvalidInput: ``concurrency`` or ``max_in_flight_bytes`` is not positive.
    """
    for name, value in (("concurrency", concurrency), ("max_in_flight_bytes", max_in_flight_bytes)):
        if value < 1:
            raise InvalidInput(f"{name} is {value!r}: use a whole number of at least 1")
    items = tuple(descriptors)
    if len(items) == 1:
        # A thread to wait for at once would be pure cost, and most micro-batches are this small.
        return (fetch(each) for each in items)
    ahead = _ReadAhead(
        fetch,
        items,
        min(concurrency, len(items)),
        max_in_flight_bytes,
        runtime if runtime is not None else SystemRuntime(),
        size_of,
    )
    return ahead.results()


@dataclass(slots=True)
class _Done(Generic[T]):
    """The end of one fetch: its result or what it raised."""

    cost: int
    result: T | None = None
    error: BaseException | None = None


class _ReadAhead(Generic[T]):
    def __init__(
        self,
        fetch: Callable[[BatchDescriptor], T],
        items: tuple[BatchDescriptor, ...],
        concurrency: int,
        limit: int,
        runtime: Runtime,
        size_of: Callable[[T], int] | None,
    ) -> None:
        self._fetch = fetch
        self._items = items
        self._concurrency = concurrency
        self._limit = limit
        self._runtime = runtime
        self._size_of = size_of
        self._changed = runtime.condition()
        self._next = 0  # first item nobody fetches yet
        self._open = 0  # items fetched or being fetched, and not taken
        self._bytes = 0  # what those weigh
        self._largest: int | None = None
        self._done: dict[int, _Done[T]] = {}
        self._threads: list[Task] = []
        self._idle = 0  # threads that wait for room
        self._near = False
        self._stopped = False

    def results(self) -> Generator[T, None, None]:
        try:
            for index in range(len(self._items)):
                done = self._take(index)
                if done.error is not None:
                    raise done.error
                yield done.result  # type: ignore[misc]  # T may include None
                del done  # or the caller's last result lives while it waits for the next
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def _take(self, index: int) -> _Done[T]:
        with self._changed:
            self._staff()
            while index not in self._done:
                self._changed.wait()
                self._staff()
            done = self._done.pop(index)
            self._open -= 1
            self._bytes -= done.cost
            self._changed.notify_all()
            self._staff()
            return done

    def _staff(self) -> None:
        """Start threads while there is something to fetch that no idle one will."""
        while not self._idle and len(self._threads) < self._concurrency and self._has_room():
            work = partial(self._work, *self._begin())
            self._threads.append(self._runtime.spawn(work, "opendata-buffer-fetch"))

    def _work(self, index: int, cost: int) -> None:
        while True:
            done = self._run(index, cost)
            with self._changed:
                self._bytes += done.cost - cost
                self._done[index] = done
                if done.error is not None:
                    # Items are begun in order: all before this one are under way or done.
                    self._stopped = True
                else:
                    self._largest = max(self._largest or 0, done.cost)
                del done
                self._changed.notify_all()
                self._idle += 1
                while not self._has_room():
                    if self._stopped or self._next >= len(self._items):
                        return
                    self._changed.wait()
                self._idle -= 1
                index, cost = self._begin()

    def _begin(self) -> tuple[int, int]:
        index, cost = self._next, self._cost()
        self._next += 1
        self._open += 1
        self._bytes += cost
        return index, cost

    def _run(self, index: int, cost: int) -> _Done[T]:
        item = self._items[index]
        started = self._runtime.monotonic()
        try:
            result = self._fetch(item)
            taken = self._runtime.monotonic() - started
            if self._size_of is not None:
                size = self._size_of(result)
            else:
                size = getattr(result, "nbytes", item.size or 0)
        except BaseException as error:
            return _Done(cost, error=error)
        if taken <= NEAR_S + size / NEAR_BYTES_PER_S:
            self._near = True
        return _Done(size, result)

    def _has_room(self) -> bool:
        if self._stopped or self._next >= len(self._items):
            return False
        limit = min(self._limit, NEAR_BYTES) if self._near else self._limit
        return self._open == 0 or self._bytes + self._cost() <= limit

    def _cost(self) -> int:
        size = self._items[self._next].size
        if size is not None:
            return size
        return self._limit if self._largest is None else self._largest
