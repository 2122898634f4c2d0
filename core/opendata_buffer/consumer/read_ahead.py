"""Many fetches at once, within a budget, with their results in order.

Threads hide the time a fetch waits for its store. Where there is none to hide (a directory whose
files are in the page cache) they only cost: switches, a lock that one holds at a time, and memory
for all that is fetched and not yet taken. There the caller's thread fetches, one after the other.
How many hide it depends on how long that is: see :attr:`Pace.threads`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Generic, Protocol, TypeVar

from opendata_buffer.errors import InvalidInput
from opendata_buffer.runtime import Runtime, SystemRuntime, Task

__all__ = ["Pace", "fetch_many"]

T = TypeVar("T")


class Item(Protocol):
    """What is fetched: a batch's descriptor, or several together."""

    @property
    def size(self) -> int | None:
        """Bytes of the result, where they are known."""
        ...


Wanted = TypeVar("Wanted", bound=Item)

LEAST_THREADS, MOST_THREADS = 16, 128
"""At once, where the caller does not say how many; the latter is what a store keeps connections
for."""

DEFAULT_MAX_IN_FLIGHT_BYTES = 256 * 1024 * 1024

NEAR_S, NEAR_BYTES_PER_S = 0.001, 1e9
"""A fetch that waited no longer than this came from a page cache, and not over a network."""

FORGETTING = 1.01

FAR, STRIKES = 4, 2
"""Hysteresis: only so many times that wait, so often in a row, is not just a busy machine."""


class Pace:
    """Whether fetches hardly wait for their store; may be kept from one read to the next.

    Attributes:
        near: They do not; None while nothing is known.
        largest: Bytes of the largest result so far; None while nothing is known.
    """

    def __init__(self) -> None:
        self.near: bool | None = None
        self.largest: int | None = None
        self._strikes = 0
        self._shortest: float | None = None
        self._worked = 0.0

    @property
    def threads(self) -> int:
        """How many fetches at once keep one processor busy, as far as known; 16 to 128.

        While one waits, the others work: that takes as many as its wait is longer than its work.
        The shortest wait counts. Longer ones are also waits for a processor, or for the store's
        bandwidth, and grow with the number of threads.
        """
        if self._shortest is None:
            return LEAST_THREADS
        if self._shortest >= self._worked * MOST_THREADS:
            return MOST_THREADS
        return max(LEAST_THREADS, 1 + ceil(self._shortest / self._worked))

    def saw(self, size: int, waited: float, worked: float = 0.0) -> None:
        """A fetch of so many bytes waited and used the processor for so many seconds.

        A busy machine lets a fetch wait about as long as it works, however near its store is.
        """
        self.largest = max(self.largest or 0, size)
        # It grows a little with each fetch, so that a store that gets slower is noticed.
        shortest = waited if self._shortest is None else self._shortest * FORGETTING
        self._shortest = min(waited, shortest)
        self._worked += (worked - self._worked) / (10 if self._worked else 1)
        limit = max(NEAR_S + size / NEAR_BYTES_PER_S, worked)
        if waited > FAR * limit:
            self._strikes += 1
            if self._strikes >= STRIKES:
                self.near = False
            return
        self._strikes = 0
        if waited <= limit:
            self.near = True


def fetch_many(
    fetch: Callable[[Wanted], T],
    descriptors: Iterable[Wanted],
    *,
    concurrency: int | None = None,
    max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
    runtime: Runtime | None = None,
    size_of: Callable[[T], int] | None = None,
    pace: Pace | None = None,
) -> Generator[T, None, None]:
    """Fetch ahead, in parallel, and yield the results in the order of the descriptors.

    The bytes in flight are those of fetches under way and of results nobody took yet. A fetch
    begins while they are below the limit, and always when there are none: its own size is the
    descriptor's, or where that is unknown the largest result so far. Until a first result, of
    this read or an earlier one of the same ``pace``, says how large results are, a descriptor
    without a size is fetched alone. Where fetches do not
    wait for the store, nothing is in flight: see above.

    An error is raised at its place in the order, after everything before it; no fetch begins
    after it. Closing the iterator, or dropping it, ends the threads.

    Args:
        fetch: One fetch, such as :meth:`FetchHandle.fetch`. Called from several threads.
        descriptors: What to fetch.
        concurrency: Threads, at most; started as there is work for them. Default: 16 to 128, by
            how long a fetch waits beside what it works.
        max_in_flight_bytes: Default 256 MiB.
        runtime: Threads and clock.
        size_of: Bytes of a result. Default: its ``nbytes``, else the descriptor's size.
        pace: What an earlier call learnt about the store. Default: nothing is known yet.

    Raises:
        InvalidInput: ``concurrency`` or ``max_in_flight_bytes`` is not positive.
    """
    for name, value in (("concurrency", concurrency), ("max_in_flight_bytes", max_in_flight_bytes)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name} is {value!r}: use a whole number of at least 1")
    items = tuple(descriptors)
    if len(items) == 1:
        # A thread to wait for at once would be pure cost, and most micro-batches are this small.
        return (fetch(each) for each in items)
    ahead = _ReadAhead(
        fetch,
        items,
        concurrency,
        max_in_flight_bytes,
        runtime if runtime is not None else SystemRuntime(),
        size_of,
        pace,
    )
    return ahead.results()


@dataclass(slots=True)
class _Done(Generic[T]):
    """The end of one fetch: its result or what it raised."""

    cost: int
    result: T | None = None
    error: BaseException | None = None


class _ReadAhead(Generic[Wanted, T]):
    def __init__(
        self,
        fetch: Callable[[Wanted], T],
        items: tuple[Wanted, ...],
        concurrency: int | None,
        limit: int,
        runtime: Runtime,
        size_of: Callable[[T], int] | None,
        pace: Pace | None,
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
        self._bytes = 0  # of those items
        self._done: dict[int, _Done[T]] = {}
        self._threads: list[Task] = []
        self._working = 0  # threads that have not ended
        self._idle = 0  # those of them that wait for room
        self._pace = pace if pace is not None else Pace()
        # Or each task of a topic, where batches are too few to list, would fetch the first alone.
        self._largest = self._pace.largest
        self._stopped = False

    def results(self) -> Generator[T, None, None]:
        try:
            for index in range(len(self._items)):
                done = self._take(index)
                if done.error is not None:
                    raise done.error
                yield done.result  # type: ignore[misc]  # T may include None
                del done  # it would hold the result in memory while the caller waits for the next
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in self._threads:
                thread.join()

    def _take(self, index: int) -> _Done[T]:
        cost = None
        with self._changed:
            while index not in self._done:
                if index == self._next and (self._is_near()):
                    _, cost = self._begin()
                    break
                self._staff()
                self._changed.wait()
        if cost is not None:
            self._finish(index, cost)
        with self._changed:
            done = self._done.pop(index)
            self._open -= 1
            self._bytes -= done.cost
            self._changed.notify_all()
            self._staff()
            return done

    def _staff(self) -> None:
        """Start threads while there is work that no idle thread takes."""
        most = self._pace.threads if self._concurrency is None else self._concurrency
        while not self._idle and self._working < most and self._may_begin():
            self._working += 1
            work = partial(self._work, *self._begin())
            self._threads.append(self._runtime.spawn(work, "opendata-buffer-fetch"))

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

    def _run(self, index: int, cost: int) -> _Done[T]:
        item = self._items[index]
        started, worked = self._runtime.monotonic(), self._runtime.cpu_time()
        try:
            result = self._fetch(item)
            worked = self._runtime.cpu_time() - worked
            waited = self._runtime.monotonic() - started - worked
            if self._size_of is not None:
                size = self._size_of(result)
            else:
                size = getattr(result, "nbytes", item.size or 0)
        except BaseException as error:
            return _Done(cost, error=error)
        self._pace.saw(size, waited, worked)
        return _Done(size, result)

    def _is_near(self) -> bool:
        """Whether the caller's thread fetches the next item, and no other begins one."""
        if self._pace.near is None:
            # Without a size it would be fetched alone anyway.
            return self._open == 0 and self._items[self._next].size is None
        return self._pace.near

    def _may_begin(self) -> bool:
        """Whether a thread may begin the next item."""
        return self._needs_threads() and (
            self._open == 0 or self._bytes + self._cost() <= self._limit
        )

    def _needs_threads(self) -> bool:
        """Whether there is, room or not, something left for threads to begin."""
        return not self._stopped and self._next < len(self._items) and not self._is_near()

    def _cost(self) -> int:
        size = self._items[self._next].size
        if size is not None:
            return size
        return self._limit if self._largest is None else self._largest
