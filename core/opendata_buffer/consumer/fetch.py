"""Fetch batches: one by a :class:`FetchHandle`, or many ahead within a limit of bytes.

A handle is stateless and picklable. It turns one descriptor into one batch and moves no cursor. So
any number of threads and processes may use it while one owner keeps the
:class:`~.consumer.Consumer` (OpenData RFC 0003).

:func:`fetch_many` fetches ahead of the caller in threads, to hide the time that a fetch waits for
its store. If fetches do not wait (a directory whose files are in the page cache), the caller's
thread fetches one batch after the other. Only reading runs ahead, not decoding, for two reasons.
Records as Python objects take several times the memory of the stored batch, so sixteen threads that
decode would exceed any limit. And decoding threads would wait for the interpreter's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import ceil
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from opendata_buffer import errors, metrics
from opendata_buffer.arguments import checked
from opendata_buffer.config import ConsumerConfig, StoreOptions
from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
from opendata_buffer.formats.arrow import ReadBuffer, decode_arrow, decode_records, open_arrow
from opendata_buffer.formats.batch import DEFAULT_MAX_BYTES, is_confined, key_fault, largest_object
from opendata_buffer.formats.manifest import BatchDescriptor, Metadata
from opendata_buffer.hints import Action, Hint, QueueName
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.missing import Missing, look_for_missing
from opendata_buffer.runtime import Retries, Runtime, SystemRuntime, Task
from opendata_buffer.stores.base import Get, ZeroCopy, read_bytes
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)

NEAR_S, NEAR_BYTES_PER_S = 0.001, 1e9
"""A fetch that waited at most this long was served from a page cache and not over a network."""

FAR, STRIKES = 4, 2
"""The factor and the count that make a store far: ``STRIKES`` waits in a row, each longer than
``FAR`` times that limit. One long wait is not enough, because a busy machine causes those too."""

LEAST_THREADS, MOST_THREADS = 16, 128
"""Fetches at once if the caller gives no number. A store keeps ``MOST_THREADS`` connections."""

FORGETTING = 1.01
"""The factor by which the shortest known wait grows with each fetch."""


class AdaptiveConcurrency:
    """Measurements of how long fetches wait for their store, and how many at once hide the wait.

    Keep them from one read to the next.

    Args:
        store: The store to fetch from. A store of local files is near; for others the waits are
            measured.
    """

    def __init__(self, store: object = None) -> None:
        self._declared = isinstance(store, ZeroCopy)
        self.near: bool | None = True if self._declared else None
        """Whether fetches hardly wait; None while nothing is known."""
        self.largest: int | None = None
        """Size of the largest result so far, in bytes; None while nothing is known."""
        self._strikes = 0
        self._shortest: float | None = None
        self._worked = 0.0
        self._decoded = 0.0

    @property
    def threads(self) -> int:
        """How many fetches at once keep one processor busy, as far as known: 16 to 128.

        This is the ratio of a fetch's wait to its work. The shortest wait counts. Longer waits
        include waiting for a processor or for the store's bandwidth, and grow with the number of
        threads.
        """
        if self._shortest is None:
            return LEAST_THREADS
        worked = self._worked + self._decoded
        if self._shortest >= worked * MOST_THREADS:
            return MOST_THREADS
        return max(LEAST_THREADS, 1 + ceil(self._shortest / worked))

    def fetched(self, size: int, waited: float, worked: float = 0.0) -> None:
        """Record how long one fetch waited and worked.

        Args:
            size: Size of the result, in bytes.
            waited: Seconds that the fetch waited for the store.
            worked: Seconds of processor time that the fetch used.
        """
        self.largest = max(self.largest or 0, size)
        if self._declared:
            return
        # The shortest wait grows a little with each fetch, so that a store that gets slower is
        # noticed.
        shortest = waited if self._shortest is None else self._shortest * FORGETTING
        self._shortest = min(waited, shortest)
        self._worked = _average(self._worked, worked)
        # On a busy machine even a fetch from a near store waits about as long as it works, because
        # it waits for a processor.
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
        """Record how long the decoding of one fetched batch took.

        Args:
            worked: Seconds of processor time.
        """
        self._decoded = _average(self._decoded, worked)


def _average(so_far: float, value: float) -> float:
    """Return the moving average over about the last ten values."""
    return so_far + (value - so_far) / (10 if so_far else 1)


Decoded = TypeVar("Decoded")


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """A batch object as it is stored, not decoded: its bytes, or a large file to be read later."""

    data: bytes | ReadBuffer
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]

    @property
    def nbytes(self) -> int:
        """The size of the object, in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Records:
    """An opened batch. ``arrays`` of ``pa.binary()`` are decoded one by one, and only once."""

    count: int
    arrays: Iterator[pa.BinaryArray]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]


@dataclass(frozen=True, slots=True)
class Fetch(Generic[Decoded]):
    """A function that fetches a batch in two steps.

    ``FetchHandle._fetch_pooled`` reads the batch as it is stored, and ``decode`` makes the
    result. :func:`.fetch_many` runs only the first step ahead.
    """

    handle: FetchHandle
    decode: Callable[[PooledBatch], Decoded]

    def __call__(self, descriptor: BatchDescriptor) -> Decoded:
        """Fetch and decode one batch.

        Args:
            descriptor: The batch to fetch.

        Returns:
            The decoded batch.

        Raises:
            BatchMissing: The object is gone.
            BatchUnreadable: The object does not decode, or is larger than ``max_batch_bytes``.
            ForeignLocation: The location is outside the data prefix.
            StorageError: The store did not answer; the batch may be good.
        """
        return self.decode(self.handle._fetch_pooled(descriptor))


class FetchHandle:
    """A reader of batch objects that fetches and decodes. Thread-safe, stateless, cheap to copy.

    It can be pickled if another process can reach its store. That process opens the store again,
    with connections of its own.

    Args:
        store: The store of the batches: an open store, or its URL.
        options: How to reach a cloud; only used with a URL.
        data_path_prefix: The prefix that all locations must lie below (failure F23).
        max_batch_bytes: Size in bytes of the largest record block to decode (failure F21).
        runtime: Clock of the duration metric.
    """

    @checked
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
            # Keep the store's own URL: a relative path leads elsewhere in a process with another
            # directory.
            self._reopen = (opened.url, options)
            store = opened
        self._store = store
        self._prefix = data_path_prefix
        self._partition = ""
        self._max_batch_bytes = max_batch_bytes
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._queue: QueueName | None = None
        """The queue, for the hints of errors; None if it is not known."""
        self._reads_as: ConsumerConfig | None = None
        """The configuration of the named reader of a log, for the hints of errors; None for
        others."""
        self._resettable = True
        self._missing: Missing | None = None

    @classmethod
    @checked
    def of(
        cls,
        config: ConsumerConfig,
        *,
        store: Get | None = None,
        runtime: Runtime | None = None,
        resettable: bool = True,
    ) -> FetchHandle:
        """Create a handle for a consumer's configuration.

        Args:
            config: The consumer's configuration.
            store: A store to use instead of the one that ``config`` names.
            runtime: Clock of the duration metric.
            resettable: Let errors advise to reset the reader; see :func:`.open_queue`.

        Returns:
            The handle. Its errors know the queue.
        """
        made = cls(
            config.store if store is None else store,
            config.store_options if store is None else None,
            data_path_prefix=config.data_path_prefix,
            max_batch_bytes=config.max_batch_bytes,
            runtime=runtime,
        )
        made._queue = queue_name(str(getattr(made._store, "url", config.store)), config)
        made._reads_as = config if config.reader else None
        made._resettable = resettable
        return made

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
        """Return an independent handle on the same store."""
        other = object.__new__(FetchHandle)
        other.__dict__.update(self.__dict__)
        return other

    def _within(self, partition: str) -> FetchHandle:
        """Create a handle with the same store and settings for one partition of a topic.

        Args:
            partition: The name of the partition, which is its data prefix.

        Returns:
            The handle. Its batches and errors name the partition.
        """
        other = self.clone()
        other._prefix = other._partition = partition
        if self._queue is not None:
            other._queue = self._queue.within(partition)
        if self._reads_as is not None:
            other._reads_as = replace(self._reads_as, data_path_prefix=partition, manifest_path="")
        return other

    def adaptive_concurrency(self) -> AdaptiveConcurrency:
        """Return new measurements for this store. Share them between several reads of it."""
        return AdaptiveConcurrency(self._store)

    @property
    def fetch(self) -> Fetch[ConsumedBatch]:
        """A function that fetches and decodes one batch; see :meth:`Fetch.__call__`."""
        return Fetch(self, self._decode)

    @property
    def fetch_arrow(self) -> Fetch[ArrowBatch]:
        """Like :attr:`fetch`, but with the records in an Arrow array, without Python objects."""
        return Fetch(self, self._decode_arrow)

    def _fetch_pooled(
        self, descriptor: BatchDescriptor, retrying: Retries | None = None
    ) -> PooledBatch:
        """Fetch one batch without decoding it; see :meth:`_decode` and :meth:`_decode_arrow`.

        A large local file is only opened here, and read while it is decoded.

        Args:
            descriptor: The batch to fetch.
            retrying: The policy of retries, also for the later reads of a large file; None for a
                single attempt.

        Returns:
            The stored bytes with the descriptor's fields.

        Raises:
            BatchMissing: The object is gone.
            BatchUnreadable: The object is larger than ``max_batch_bytes`` allows.
            ForeignLocation: The location is outside the data prefix.
            StorageError: The store did not answer; the batch may be good.
        """
        started = self._runtime.monotonic()
        sequence, location = descriptor.sequence, descriptor.location
        # Without this check, a manifest that another program wrote could make the consumer read any
        # object of the bucket with the consumer's rights (failure F23).
        if not is_confined(location, self._prefix):
            why = f"it is not below the data prefix {self._prefix!r}"
            if fault := key_fault(location):
                why = f"no object can have this name: {fault}"
            raise self._poison(errors.ForeignLocation, descriptor, why)
        limit = largest_object(self._max_batch_bytes)
        call: Callable[..., Any] = retrying or (lambda function, *args: function(*args))
        data: bytes | ReadBuffer
        try:
            with self._unreadable(descriptor):
                if isinstance(self._store, ZeroCopy):
                    read = partial(self._store.get_into, location, max_bytes=limit)
                    data = ReadBuffer(partial(call, read))
                else:
                    data = call(read_bytes, self._store, location, limit)
        except errors.InvalidInput as error:
            why = _plain(error)
            raise self._poison(errors.ForeignLocation, descriptor, why) from error
        metrics.fetch_duration_seconds.record(self._runtime.monotonic() - started)
        metrics.bytes_collected.add(len(data))
        return PooledBatch(data, sequence, location, descriptor.metadata)

    def _decode(self, raw: PooledBatch) -> ConsumedBatch:
        """Decode the result of :meth:`_fetch_pooled`.

        Args:
            raw: The fetched batch.

        Returns:
            The batch with its records as ``bytes``.

        Raises:
            BatchUnreadable: The object does not decode, or is larger than ``max_batch_bytes``.
        """
        with self._unreadable(raw):
            entries = decode_records(raw.data, self._max_batch_bytes)
        _count(len(entries))
        return ConsumedBatch(entries, raw.sequence, raw.location, raw.metadata, self._partition)

    def _decode_arrow(self, raw: PooledBatch) -> ArrowBatch:
        """Decode the result of :meth:`_fetch_pooled` to an Arrow array.

        Args:
            raw: The fetched batch.

        Returns:
            The batch with its records in an Arrow array.

        Raises:
            BatchUnreadable: As :meth:`_decode`.
        """
        with self._unreadable(raw):
            values = decode_arrow(raw.data, self._max_batch_bytes)
        _count(len(values))
        return ArrowBatch(values, raw.sequence, raw.location, raw.metadata, self._partition)

    def _records(
        self, pooled: PooledBatch, array_bytes: int, *, check_first: bool = False
    ) -> Records:
        """Open the result of :meth:`_fetch_pooled`, to decode it in several arrays.

        Args:
            pooled: The fetched batch.
            array_bytes: The size of an array, in bytes of records.
            check_first: Decode all of the batch once before the first array is handed out. Without
                it the arrays may raise ``BatchUnreadable`` after good ones.

        Returns:
            The number of records, and an iterator that decodes them into Arrow arrays.

        Raises:
            BatchUnreadable: The object does not decode, or is larger than ``max_batch_bytes``.
        """
        with self._unreadable(pooled):
            block = open_arrow(pooled.data, self._max_batch_bytes)
            if check_first:
                for _ in block.pieces(array_bytes):
                    pass
        count = block.footer.record_count

        def arrays() -> Iterator[pa.BinaryArray]:
            with self._unreadable(pooled):
                yield from block.pieces(array_bytes)
            _count(count)

        return Records(count, arrays(), pooled.sequence, pooled.location, pooled.metadata)

    @contextmanager
    def _unreadable(self, batch: BatchDescriptor | PooledBatch) -> Iterator[None]:
        """Turn an error about the batch's bytes or object into one that names the batch."""
        try:
            yield
        except errors.CorruptData as error:
            raise self._poison(errors.BatchUnreadable, batch, _plain(error)) from error
        except errors.ObjectNotFound as error:
            why, after = "its object does not exist", batch.sequence + 1
            if (missing := self._find_missing(batch.sequence)) is not None and missing.count > 1:
                why, after = f"{why}: {missing}", missing.end
            raise self._poison(errors.BatchMissing, batch, why, after) from error

    def _poison(
        self,
        kind: type[errors.PoisonBatch],
        batch: BatchDescriptor | PooledBatch,
        why: str,
        after: int | None = None,
    ) -> errors.PoisonBatch:
        """Return the error about a batch that cannot be delivered.

        For a named reader, its hint is the command that continues at ``after``.

        Args:
            kind: The class of the error.
            batch: The batch.
            why: The reason.
            after: The sequence to continue at. Default: the one after the batch.
        """
        hint = None
        if self._reads_as is not None:
            hint = Hint(Action.SKIP_BATCH_OF_LOG, sequence=batch.sequence)
            if self._resettable:
                after = batch.sequence + 1 if after is None else after
                readers = (self._reads_as.reader,)
                hint = Hint(Action.RESET_PAST_BATCH, sequence=after, readers=readers)
        error = kind(batch.sequence, batch.location, why, self._partition, hint)
        return error if self._queue is None else error.at(self._queue)

    def _find_missing(self, sequence: int) -> Missing | None:
        """Return which batches of a log are gone from this one on; None if that is not known.

        The answer is for an error. It is kept, because a reader that skips missing batches asks for
        each of them.
        """
        config, known = self._reads_as, self._missing
        if config is None:
            return None
        if known is not None and known.first <= sequence < known.end:
            return replace(known, first=sequence, count=known.end - sequence)
        store: Any = self._store
        try:
            self._missing = look_for_missing(store, config, self._runtime, sequence)
        except errors.OpenDataBufferError as error:
            log.info("how many batches are missing from %d on is not known: %s", sequence, error)
            return None
        return self._missing


# Spark's source uses these. They are not methods, because users of a handle do not need them.


def within(handle: FetchHandle, partition: str) -> FetchHandle:
    """Create a handle with the same store and settings for one partition of a topic.

    Args:
        handle: The handle of the topic.
        partition: The name of the partition.

    Returns:
        The handle of the partition.
    """
    return handle._within(partition)


def fetch_stored(
    handle: FetchHandle, descriptor: BatchDescriptor, retrying: Retries | None = None
) -> PooledBatch:
    """Fetch one batch without decoding it.

    Args:
        handle: The handle.
        descriptor: The batch to fetch.
        retrying: The policy of retries; None for a single attempt.

    Returns:
        The stored bytes with the descriptor's fields.
    """
    return handle._fetch_pooled(descriptor, retrying)


def open_records(
    handle: FetchHandle, pooled: PooledBatch, array_bytes: int, *, check_first: bool = False
) -> Records:
    """Open the result of :func:`fetch_stored`, to decode it in several arrays.

    Args:
        handle: The handle.
        pooled: The fetched batch.
        array_bytes: The size of an array, in bytes of records.
        check_first: Decode all of the batch once before the first array is handed out.

    Returns:
        The number of records, and an iterator that decodes them into Arrow arrays.
    """
    return handle._records(pooled, array_bytes, check_first=check_first)


def _plain(error: errors.OpenDataBufferError) -> str:
    return error.problem.rstrip(".")


def _count(records: int) -> None:
    metrics.batches_collected.add(1)
    metrics.entries_collected.add(records)


T = TypeVar("T")
R = TypeVar("R")


def or_poison(call: Callable[[T], R]) -> Callable[[T | errors.PoisonBatch], R | errors.PoisonBatch]:
    """Wrap a call so that it returns the error if a batch cannot be delivered.

    So a fetch ahead continues with the next batch. The result of such a call may be the argument of
    another wrapped call, which then returns the same error.
    """

    def attempt(what: T | errors.PoisonBatch) -> R | errors.PoisonBatch:
        try:
            return what if isinstance(what, errors.PoisonBatch) else call(what)
        except errors.PoisonBatch as error:
            return error

    return attempt


class Item(Protocol):
    """One thing to fetch: a batch's descriptor, or several descriptors together."""

    @property
    def size(self) -> int | None:
        """The size of the result in bytes; None if not known."""


Wanted = TypeVar("Wanted", bound=Item)

DEFAULT_MAX_IN_FLIGHT_BYTES = 256 * 1024 * 1024


@checked
def fetch_many(
    fetch: Callable[[Wanted], T],
    descriptors: Iterable[Wanted],
    *,
    concurrency: int | None = None,
    max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
    runtime: Runtime | None = None,
    size_of: Callable[[T], int] | None = None,
    adaptive: AdaptiveConcurrency | None = None,
) -> Generator[T, None, None]:
    """Fetch ahead, in parallel, and yield the results in the order of the descriptors.

    ::

        fetch = consumer.fetch_handle().fetch
        for batch in fetch_many(fetch, consumer.next_descriptors(1_000)):
            write(batch.records())
        consumer.ack_through(batch.sequence)

    The bytes in flight are those of running fetches and of results that were not taken yet. A fetch
    begins while the total, with its own size, is within the limit, and always if nothing is in
    flight. Its own size is the descriptor's or, if that is not known, that of the largest result so
    far. Before the first result of this read, or of an earlier one with the same ``adaptive``, the
    size of a descriptor without one cannot be estimated, so it is fetched alone. If fetches do not
    wait for the store, the caller's thread fetches and nothing is in flight.

    With :attr:`.FetchHandle.fetch` and :attr:`.FetchHandle.fetch_arrow` only the reading runs
    ahead. Batches in flight are kept as they are stored, and the caller's thread decodes each one
    when it takes it. So the memory of one decoded batch comes on top of the limit.

    An error is raised at its place in the order, after all earlier results. No fetch begins after
    it. Close the iterator, or drop it, to end the threads.

    Args:
        fetch: A function that fetches one item, such as :attr:`.FetchHandle.fetch`. It is called
            from several threads.
        descriptors: The items to fetch.
        concurrency: Maximum number of threads, at least 1. A thread is started only when there is
            work for it. Default: 16 to 128, by the ratio of a fetch's wait to its work.
        max_in_flight_bytes: Maximum bytes in flight, at least 1. Default 256 MiB.
        runtime: Threads and clock.
        size_of: Returns the size of a result in bytes. Default: its ``nbytes``, else the
            descriptor's size.
        adaptive: Measurements of earlier calls about the store. Default: for a
            :class:`.FetchHandle` whether its store is known to be near; for another function
            nothing.

    Returns:
        An iterator of the results. It raises an error of ``fetch`` at its place in the order.

    Raises:
        InvalidInput: ``concurrency`` or ``max_in_flight_bytes`` is less than 1.
    """
    read: Callable[[Any], Any] = fetch
    decode: Callable[[Any], Any] | None = None
    if isinstance(fetch, Fetch):
        adaptive = adaptive or fetch.handle.adaptive_concurrency()
        if size_of is None:  # size_of measures decoded batches
            read, decode = fetch.handle._fetch_pooled, fetch.decode
    for name, value in (("concurrency", concurrency), ("max_in_flight_bytes", max_in_flight_bytes)):
        if value is not None and value < 1:
            raise errors.InvalidInput(f"{name} is {value!r}: use a whole number of at least 1")
    return ReadAhead(
        read,
        tuple(descriptors),
        lambda _, result: result if decode is None else decode(result),
        runtime or SystemRuntime(),
        adaptive or AdaptiveConcurrency(),
        concurrency,
        max_in_flight_bytes,
        size_of,
    ).results()


@dataclass(slots=True)
class _Done(Generic[R]):
    """The end of one fetch, either its result or the exception that it raised."""

    cost: int
    result: R | None = None
    error: BaseException | None = None

    def taken(self) -> R:
        """Return the result and release it."""
        result, self.result = self.result, None
        return result  # type: ignore[return-value]  # R may include None


@dataclass(eq=False)
class ReadAhead(Generic[Wanted, R, T]):
    """The engine of :func:`fetch_many`, which takes reading and decoding as two functions.

    ``read`` runs ahead in several threads, and ``limit`` bounds the bytes of its results. The
    caller's thread calls ``decode``.
    """

    read: Callable[[Wanted], R]
    items: Sequence[Wanted]
    decode: Callable[[Wanted, R], T]
    runtime: Runtime
    adaptive: AdaptiveConcurrency
    concurrency: int | None = None
    limit: int = DEFAULT_MAX_IN_FLIGHT_BYTES
    size_of: Callable[[R], int] | None = None

    def __post_init__(self) -> None:
        self._changed = self.runtime.condition()
        self._next = 0  # first item whose fetch has not begun
        self._open = 0  # items fetched or being fetched, and not taken
        self._bytes = 0  # of those items
        self._done: dict[int, _Done[R]] = {}
        self._threads: list[Task] = []
        self._working = 0  # threads that have not ended
        self._idle = 0  # those of them that wait for room
        # Start with the size from earlier calls. A task of a topic has few batches of each
        # partition, too few to list them for their sizes. Without this it would fetch the first of
        # each partition alone.
        self._largest = self.adaptive.largest
        self._stopped = False

    def results(self) -> Generator[T, None, None]:
        """Yield the decoded items in order. Call it once."""
        if len(self.items) == 1:
            # A single item needs no thread, because the caller would wait for it at once. Most
            # micro-batches are this small.
            yield self.decode(self.items[0], self.read(self.items[0]))
            return
        try:
            for index in range(len(self.items)):
                done = self._take(index)
                if done.error is not None:
                    raise done.error
                worked = self.runtime.cpu_time()
                # Decode in one expression, so that the stored batch is freed before the caller gets
                # the decoded one.
                result = self.decode(self.items[index], done.taken())
                self.adaptive.decoded(self.runtime.cpu_time() - worked)
                yield result
                del result  # or it stays in memory while the caller waits for the next
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            # One of these threads may collect a dropped generator as garbage, at any point of its
            # work. If it holds the lock then, joining would wait for threads that wait for the
            # lock.
            if not self._changed.held():
                for thread in self._threads:
                    with suppress(RuntimeError):  # it is this thread
                        thread.join()

    def _take(self, index: int) -> _Done[R]:
        cost = None
        with self._changed:
            while index not in self._done:
                if index == self._next and self._is_near():
                    _, cost = self._begin()
                    break
                self._start_threads()
                self._changed.wait()
        if cost is not None:
            self._finish(index, cost)
        with self._changed:
            done = self._done.pop(index)
            self._open -= 1
            self._bytes -= done.cost
            self._changed.notify_all()
            self._start_threads()
            return done

    def _start_threads(self) -> None:
        """Start threads while there is work that no idle thread takes."""
        most = self.adaptive.threads if self.concurrency is None else self.concurrency
        while not self._idle and self._working < most and self._may_begin():
            self._working += 1
            work = partial(self._work, *self._begin())
            self._threads.append(self.runtime.spawn(work, "opendata-buffer-fetch"))

    def _work(self, index: int, cost: int) -> None:
        while True:
            self._finish(index, cost)
            with self._changed:
                self._idle += 1
                while not self._may_begin():
                    if not self._needs_threads():
                        self._idle -= 1
                        self._working -= 1
                        self._changed.notify_all()  # the caller now fetches for itself
                        return
                    self._changed.wait()
                self._idle -= 1
                index, cost = self._begin()

    def _finish(self, index: int, cost: int) -> None:
        done = self._run(index, cost)
        with self._changed:
            self._bytes += done.cost - cost
            self._done[index] = done
            if done.error is not None:
                # Items begin in order, so all earlier ones are running or done.
                self._stopped = True
            else:
                self._largest = max(self._largest or 0, done.cost)
            self._changed.notify_all()

    def _begin(self) -> tuple[int, int]:
        index, cost = self._next, self._cost()
        self._next += 1
        self._open += 1
        self._bytes += cost
        return index, cost

    def _run(self, index: int, cost: int) -> _Done[R]:
        item = self.items[index]
        started, worked = self.runtime.monotonic(), self.runtime.cpu_time()
        try:
            result = self.read(item)
            worked = self.runtime.cpu_time() - worked
            waited = self.runtime.monotonic() - started - worked
            if self.size_of is not None:
                size = self.size_of(result)
            else:
                size = getattr(result, "nbytes", item.size or 0)
            # Inside the try block, so that the error of a size that is not a number reaches the
            # caller.
            self.adaptive.fetched(size, waited, worked)
        except BaseException as error:
            return _Done(cost, error=error)
        return _Done(size, result)

    def _is_near(self) -> bool:
        """Return whether the caller's thread fetches the next item and no thread begins one."""
        if self.adaptive.near is None:
            # An item without a size would be fetched alone anyway.
            return self._open == 0 and self.items[self._next].size is None
        return self.adaptive.near

    def _may_begin(self) -> bool:
        """Return whether a thread may begin the next item."""
        return self._needs_threads() and (
            self._open == 0 or self._bytes + self._cost() <= self.limit
        )

    def _needs_threads(self) -> bool:
        """Return whether anything is left for threads to begin, now or when there is room."""
        return not self._stopped and self._next < len(self.items) and not self._is_near()

    def _cost(self) -> int:
        size = self.items[self._next].size
        if size is not None:
            return size
        return self.limit if self._largest is None else self._largest


class ContiguousRun:
    """The leading run of finished batches, for programs that finish batches out of order.

    Acknowledge up to the end of this run. Not thread-safe::

        run = ContiguousRun(descriptors)
        for future in as_completed(futures):
            if (through := run.done(future.result().sequence)) is not None:
                consumer.ack_through(through)
    """

    @checked
    def __init__(self, descriptors: Iterable[BatchDescriptor]) -> None:
        self._done = {each.sequence: False for each in descriptors}

    @checked
    def done(self, sequence: int) -> int | None:
        """Note that a batch is processed.

        Args:
            sequence: The sequence of the batch.

        Returns:
            The last sequence with no pending batch before it; None if that did not move.

        Raises:
            InvalidInput: The batch is not in this run, or the run has already passed it.
        """
        if sequence not in self._done:
            raise errors.InvalidInput(
                f"sequence {sequence} is not awaited: it does not belong to this run"
            )
        self._done[sequence] = True
        ended = list(takewhile(self._done.__getitem__, self._done))
        for each in ended:
            del self._done[each]
        return ended[-1] if ended else None
