"""Many fetches at once, within a limit of bytes, with their results in order.

Threads hide the time a fetch waits for its store. Where it does not wait (a directory whose files
are in the page cache), the caller's thread fetches, one batch after the other. Only reading runs
ahead, not decoding: records as objects take several times as much as the stored batch, and sixteen
threads that decode would hold them outside of any limit, and wait for the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar

from opendata_buffer.consumer.fetch import AdaptiveConcurrency, Fetch
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.runtime import Runtime, SystemRuntime, Task

T = TypeVar("T")
R = TypeVar("R")


class Item(Protocol):
    """What is fetched: a batch's descriptor, or several together."""

    @property
    def size(self) -> int | None:
        """Bytes of the result, where they are known."""


Wanted = TypeVar("Wanted", bound=Item)

DEFAULT_MAX_IN_FLIGHT_BYTES = 256 * 1024 * 1024


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
    return read_ahead(
        read,
        descriptors,
        lambda _, result: result if decode is None else decode(result),
        concurrency=concurrency,
        max_in_flight_bytes=max_in_flight_bytes,
        runtime=runtime,
        size_of=size_of,
        adaptive=adaptive,
    )


def read_ahead(
    read: Callable[[Wanted], R],
    items: Iterable[Wanted],
    decode: Callable[[Wanted, R], T],
    *,
    concurrency: int | None = None,
    max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
    runtime: Runtime | None = None,
    size_of: Callable[[R], int] | None = None,
    adaptive: AdaptiveConcurrency | None = None,
) -> Generator[T, None, None]:
    """As :func:`fetch_many`, with reading and decoding given apart.

    ``read`` runs ahead, in several threads; the limit of bytes is that of its results. The caller's
    thread calls ``decode`` with an item and its result when it takes that.
    """
    for name, value in (("concurrency", concurrency), ("max_in_flight_bytes", max_in_flight_bytes)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name} is {value!r}: use a whole number of at least 1")
    wanted = tuple(items)
    if len(wanted) == 1:
        # A thread to wait for at once would be pure cost, and most micro-batches are this small.
        return (decode(each, read(each)) for each in wanted)
    ahead = _ReadAhead(
        read,
        wanted,
        decode,
        concurrency,
        max_in_flight_bytes,
        runtime if runtime is not None else SystemRuntime(),
        size_of,
        adaptive if adaptive is not None else AdaptiveConcurrency(),
    )
    return ahead.results()


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
class _ReadAhead(Generic[Wanted, R, T]):
    read: Callable[[Wanted], R]
    items: tuple[Wanted, ...]
    decode: Callable[[Wanted, R], T]
    concurrency: int | None
    limit: int
    runtime: Runtime
    size_of: Callable[[R], int] | None
    adaptive: AdaptiveConcurrency

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

    def __init__(self, descriptors: Iterable[BatchDescriptor]) -> None:
        self._done = {each.sequence: False for each in descriptors}

    def done(self, sequence: int) -> int | None:
        """A batch is processed: the last one that no pending one is before, if that moved.

        ``InvalidInput`` for a batch that is not awaited.
        """
        if sequence not in self._done:
            raise InvalidInput(f"sequence {sequence} is not awaited: it is no batch of this run")
        self._done[sequence] = True
        ended = list(takewhile(self._done.__getitem__, self._done))
        for each in ended:
            del self._done[each]
        return ended[-1] if ended else None
