"""Fetching batches: one by a :class:`FetchHandle`, and many ahead within a limit of bytes.

A handle is stateless and picklable. It turns one descriptor into one batch and moves no cursor, so
any number of threads and processes may use it while one owner keeps the
:class:`~.consumer.Consumer` (OpenData RFC 0003).

Ahead of the caller, threads hide the time a fetch waits for its store. Where it does not wait (a
directory whose files are in the page cache), the caller's thread fetches, one batch after the
other. Only reading runs ahead, not decoding: records as objects take several times as much as the
stored batch, and sixteen threads that decode would hold them outside of any limit, and wait for the
interpreter's lock.
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
from opendata_buffer.queue.hints import reset_command
from opendata_buffer.queue.missing import Missing, look_for_missing
from opendata_buffer.runtime import Retries, Runtime, SystemRuntime, Task
from opendata_buffer.stores.base import Get, ZeroCopy, read_bytes
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)

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
    """Whether fetches wait for their store, and how many at once hide the wait; kept from one read
    to the next. A ``store`` of files is near, of others the waits are measured."""

    def __init__(self, store: object = None) -> None:
        self._declared = isinstance(store, ZeroCopy)
        self.near: bool | None = True if self._declared else None
        """Fetches hardly wait; None while nothing is known."""
        self.largest: int | None = None
        """Bytes of the largest result so far; None while nothing is known."""
        self._strikes = 0
        self._shortest: float | None = None
        self._worked = 0.0
        self._decoded = 0.0

    @property
    def threads(self) -> int:
        """How many fetches at once keep one processor busy, as far as known; 16 to 128. That is the
        ratio of a fetch's wait to its work. The shortest wait counts: longer ones are also waits
        for a processor or the store's bandwidth, and grow with the number of threads."""
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
    """A batch object as it is stored: fetched, or if it is a large file found, and not decoded."""

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
            # The store's own URL: a relative path means another place in another process.
            self._reopen = (opened.url, options)
            store = opened
        self._store = store
        self._prefix = data_path_prefix
        self._partition = ""
        self._max_batch_bytes = max_batch_bytes
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._reads_as: ConsumerConfig | None = None
        """Of a named reader of a log its configuration, for what errors advise."""
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
        """The handle of a consumer's configuration; ``store`` instead of the one it names.
        ``resettable`` as for :func:`.open_queue`."""
        made = cls(
            config.store if store is None else store,
            config.store_options if store is None else None,
            data_path_prefix=config.data_path_prefix,
            max_batch_bytes=config.max_batch_bytes,
            runtime=runtime,
        )
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
        """An independent handle on the same store."""
        other = object.__new__(FetchHandle)
        other.__dict__.update(self.__dict__)
        return other

    @checked
    def within(self, partition: str) -> FetchHandle:
        """A handle on one partition of a topic in the same store, with the same settings: batches
        and errors name the partition."""
        other = self.clone()
        other._prefix = other._partition = partition
        if self._reads_as is not None:
            other._reads_as = replace(self._reads_as, data_path_prefix=partition, manifest_path="")
        return other

    def adaptive_concurrency(self) -> AdaptiveConcurrency:
        """What reading ahead of this store begins with; keep it where there are several reads."""
        return AdaptiveConcurrency(self._store)

    @property
    def fetch(self) -> Fetch[ConsumedBatch]:
        """``fetch(descriptor)`` fetches and decodes one batch: see :meth:`Fetch.__call__`."""
        return Fetch(self, self.decode)

    @property
    def fetch_arrow(self) -> Fetch[ArrowBatch]:
        """As :attr:`fetch`, to an Arrow array without a Python object per record."""
        return Fetch(self, self.decode_arrow)

    @checked
    def fetch_pooled(
        self, descriptor: BatchDescriptor, retrying: Retries | None = None
    ) -> PooledBatch:
        """As :attr:`fetch`, without decoding: see :meth:`decode`, :meth:`decode_arrow`.

        A large file is read while it is decoded. ``retrying`` is for its parts, too.
        """
        started = self._runtime.monotonic()
        sequence, location = descriptor.sequence, descriptor.location
        # Otherwise a manifest that another program wrote could make the consumer read, with its own
        # rights, any object of the bucket (failure F23).
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

    @checked
    def decode(self, raw: PooledBatch) -> ConsumedBatch:
        """Decode the result of :meth:`fetch_pooled`.

        Raises:
            BatchUnreadable: It does not decode, or is larger than ``max_batch_bytes``.
        """
        with self._unreadable(raw):
            entries = decode_records(raw.data, self._max_batch_bytes)
        _count(len(entries))
        return ConsumedBatch(entries, raw.sequence, raw.location, raw.metadata, self._partition)

    @checked
    def decode_arrow(self, raw: PooledBatch) -> ArrowBatch:
        """As :meth:`decode`, to an Arrow array."""
        with self._unreadable(raw):
            values = decode_arrow(raw.data, self._max_batch_bytes)
        _count(len(values))
        return ArrowBatch(values, raw.sequence, raw.location, raw.metadata, self._partition)

    @checked
    def records(
        self, pooled: PooledBatch, array_bytes: int, *, check_first: bool = False
    ) -> Records:
        """Open the result of :meth:`fetch_pooled`, to decode it in arrays of ``array_bytes``.

        With ``check_first`` all of it is decoded once before the first array is handed out. Without
        it the arrays may raise ``BatchUnreadable`` after good ones.
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
        """Errors of its bytes name the batch."""
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
        """The error about a batch; a named reader is told the command that continues ``after``."""
        command, config = "", self._reads_as
        if config is not None and self._resettable:
            url = str(getattr(self._store, "url", config.store))
            after = batch.sequence + 1 if after is None else after
            command = reset_command(url, config, config.reader, after)
        return kind(batch.sequence, batch.location, why, self._partition, command)

    def _find_missing(self, sequence: int) -> Missing | None:
        """How many batches of a log are gone from this one on, for an error; None where that is not
        known. The answer is kept: a reader that passes over missing batches asks for each."""
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


def _plain(error: Exception) -> str:
    return str(error).rstrip(".")


def _count(records: int) -> None:
    metrics.batches_collected.add(1)
    metrics.entries_collected.add(records)


T = TypeVar("T")
R = TypeVar("R")


def or_poison(call: Callable[[T], R]) -> Callable[[T | errors.PoisonBatch], R | errors.PoisonBatch]:
    """The call, whose result for a batch that cannot be delivered is the error: the next one is
    fetched all the same. The result of such a call may be the argument of another."""

    def attempt(what: T | errors.PoisonBatch) -> R | errors.PoisonBatch:
        try:
            return what if isinstance(what, errors.PoisonBatch) else call(what)
        except errors.PoisonBatch as error:
            return error

    return attempt


class Item(Protocol):
    """What is fetched: a batch's descriptor, or several together."""

    @property
    def size(self) -> int | None:
        """Bytes of the result, where they are known."""


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

    The bytes in flight are those of fetches under way and of results that were not taken yet. A
    fetch begins while they are below the limit, and always when there are none: its own size is the
    descriptor's, or where that is unknown the largest result so far. Until a first result, of this
    read or an earlier one with the same ``adaptive``, shows how large results are, a descriptor
    without a size is fetched alone. Where fetches do not wait for the store, nothing is in flight:
    see above.

    Of :attr:`.FetchHandle.fetch` and :attr:`.FetchHandle.fetch_arrow` only the reading runs ahead.
    Batches are in flight as they are stored, and each is decoded by the caller's thread when it is
    taken. Beside the limit there is the memory of one batch that is decoded.

    An error is raised at its place in the order, after everything before it; no fetch begins
    after it. Closing the iterator, or dropping it, ends the threads.

    Args:
        fetch: One fetch, such as :attr:`.FetchHandle.fetch`. Called from several threads.
        descriptors: What to fetch.
        concurrency: Threads, at most; started as there is work for them. Default: 16 to 128, by
            how long a fetch waits beside its work.
        max_in_flight_bytes: Default 256 MiB.
        runtime: Threads and clock.
        size_of: Bytes of a result. Default: its ``nbytes``, else the descriptor's size.
        adaptive: What an earlier call learnt about the store. Default: of a
            :class:`.FetchHandle`, what its store declares; otherwise nothing is known yet.

    Raises:
        InvalidInput: ``concurrency`` or ``max_in_flight_bytes`` is not positive.
    """
    read: Callable[[Any], Any] = fetch
    decode: Callable[[Any], Any] | None = None
    if isinstance(fetch, Fetch):
        adaptive = adaptive or fetch.handle.adaptive_concurrency()
        if size_of is None:  # It would be of decoded batches.
            read, decode = fetch.handle.fetch_pooled, fetch.decode
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
    """The end of one fetch: its result or what it raised."""

    cost: int
    result: R | None = None
    error: BaseException | None = None

    def taken(self) -> R:
        """The result, which is kept no longer."""
        result, self.result = self.result, None
        return result  # type: ignore[return-value]  # R may include None


@dataclass(eq=False)
class ReadAhead(Generic[Wanted, R, T]):
    """As :func:`fetch_many`, with reading and decoding given apart: ``read`` runs ahead, in several
    threads, and ``limit`` is of the bytes of its results; the caller's thread decodes."""

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
        # Known from earlier calls: a task of a topic has few batches of each partition, too few to
        # list for their sizes, and would otherwise fetch the first of each alone.
        self._largest = self.adaptive.largest
        self._stopped = False

    def results(self) -> Generator[T, None, None]:
        """The decoded items, in order; called once."""
        if len(self.items) == 1:
            # A thread to wait for at once would be pure cost: most micro-batches are this small.
            yield self.decode(self.items[0], self.read(self.items[0]))
            return
        try:
            for index in range(len(self.items)):
                done = self._take(index)
                if done.error is not None:
                    raise done.error
                worked = self.runtime.cpu_time()
                # One expression: the stored batch is freed before the caller has the decoded one.
                result = self.decode(self.items[index], done.taken())
                self.adaptive.decoded(self.runtime.cpu_time() - worked)
                yield result
                del result  # or it stays in memory while the caller waits for the next
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            # A dropped generator may be collected as garbage by one of these threads, anywhere in
            # its work. With the lock held it would wait for others that wait for the lock.
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
                # Items are begun in order: all before this one are under way or done.
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
            # In the try block, because a size that is no number has to reach the caller, too.
            self.adaptive.fetched(size, waited, worked)
        except BaseException as error:
            return _Done(cost, error=error)
        return _Done(size, result)

    def _is_near(self) -> bool:
        """Whether the caller's thread fetches the next item, and no other begins one."""
        if self.adaptive.near is None:
            # Without a size it would be fetched alone anyway.
            return self._open == 0 and self.items[self._next].size is None
        return self.adaptive.near

    def _may_begin(self) -> bool:
        """Whether a thread may begin the next item."""
        return self._needs_threads() and (
            self._open == 0 or self._bytes + self._cost() <= self.limit
        )

    def _needs_threads(self) -> bool:
        """Whether there is, room or not, something left for threads to begin."""
        return not self._stopped and self._next < len(self.items) and not self._is_near()

    def _cost(self) -> int:
        size = self.items[self._next].size
        if size is not None:
            return size
        return self.limit if self._largest is None else self._largest


class ContiguousRun:
    """How far batches are done whose processing ends out of order. Not thread-safe::

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
        """A batch is processed: the last one that no pending one is before, if that moved.

        ``InvalidInput`` for a batch that is not awaited.
        """
        if sequence not in self._done:
            raise errors.InvalidInput(
                f"sequence {sequence} is not awaited: it is no batch of this run"
            )
        self._done[sequence] = True
        ended = list(takewhile(self._done.__getitem__, self._done))
        for each in ended:
            del self._done[each]
        return ended[-1] if ended else None
