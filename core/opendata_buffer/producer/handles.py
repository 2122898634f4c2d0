"""Handles: what ``produce()`` returns, with the methods of ``concurrent.futures.Future``.

A batch has one :class:`Completion`, which all handles of its calls share.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic, Self, TypeVar

from opendata_buffer.arguments import checked
from opendata_buffer.errors import copied
from opendata_buffer.runtime import Runtime, locked, wait_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Durable:
    """Where durable records are: the batch's sequence in the queue and its location."""

    sequence: int
    location: str


class Completion:
    """The outcome of one batch, once it is known. Thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._condition = runtime.condition()
        self._callbacks: list[Callable[[], object]] = []
        self.outcome: Durable | BaseException | None = None

    def complete(self, outcome: Durable | BaseException) -> None:
        """Set the outcome and call the callbacks; only the first call counts."""
        with self._condition:
            if self.outcome is not None:
                return
            self.outcome = outcome
            self._condition.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        # This is a thread of the producer. sys.exit() in a callback would end that thread and not
        # the process, and all other handles would wait for ever.
        for callback in callbacks:
            _call(callback, BaseException)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the outcome is known, at once if it is already."""
        with self._condition:
            if self.outcome is None:
                self._callbacks.append(callback)
                return
        _call(callback, Exception)

    @locked
    def wait(self, timeout: float | None) -> None:
        """Wait for the outcome, ``timeout`` seconds at most, and raise ``TimeoutError`` then."""
        if not wait_for(self._runtime, self._condition, lambda: self.outcome, timeout):
            raise TimeoutError(
                f"not durable after {timeout} s; the producer goes on trying: wait again"
            )


def _call(callback: Callable[[], object], logged: type[BaseException]) -> None:
    try:
        callback()
    except logged:
        log.exception("a callback of a write handle failed")


Result = TypeVar("Result")


class Handle(ABC, Generic[Result]):
    """The methods of all handles, named as those of ``concurrent.futures.Future``. Thread-safe."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Whether the outcome is known: the records are durable, or were given up."""

    @checked
    def result(self, timeout: float | None = None) -> Result:
        """Block until the records are stored and queued, and return where they are.

        Args:
            timeout: Seconds; None waits until the producer's delivery timeout.

        Raises:
            TimeoutError: Not yet; the producer goes on trying.
            OpenDataBufferError: The records were given up; with ``CommitStateUnknown`` they may be
                in the queue all the same.
        """
        self._wait(timeout)
        return self._result()

    @checked
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As :meth:`result`, but return the error, or None once the records are durable."""
        self._wait(timeout)
        try:
            self._result()
        except BaseException as error:
            return error
        return None

    @checked
    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(handle)`` once the outcome is known, at once if it is already.

        It is called from a thread of the producer, which waits for it: it must not block, so
        neither produce nor flush. What it raises is logged.
        """
        self._when_done(partial(callback, self))

    def __await__(self) -> Generator[Any, None, Result]:
        done, wake = wakeable()
        self._when_done(wake)
        yield from done.__await__()
        return self._result()

    @abstractmethod
    def _wait(self, timeout: float | None) -> None: ...

    @abstractmethod
    def _result(self) -> Result: ...

    @abstractmethod
    def _when_done(self, callback: Callable[[], object]) -> None: ...


class WriteHandle(Handle[Durable]):
    """What ``produce()`` returns. ``await handle`` waits for durability in asyncio.

    Attributes:
        ingestion_time_ms: The time recorded for the records, milliseconds since the Unix epoch.
    """

    __slots__ = ("_completion", "ingestion_time_ms")

    def __init__(self, completion: Completion, ingestion_time_ms: int) -> None:
        self._completion = completion
        self.ingestion_time_ms = ingestion_time_ms

    def done(self) -> bool:
        """See :meth:`Handle.done`."""
        return self._completion.outcome is not None

    def _wait(self, timeout: float | None) -> None:
        if not self.done():  # without the lock, which a callback's thread need not take
            self._completion.wait(timeout)

    def _result(self) -> Durable:
        outcome = self._completion.outcome
        if isinstance(outcome, BaseException):
            # All calls of a failed append share its error: a copy for each time it is raised.
            raise copied(outcome)
        assert outcome is not None
        return outcome

    def _when_done(self, callback: Callable[[], object]) -> None:
        self._completion.add_callback(callback)


class TopicHandle(Handle[dict[str, Durable]]):
    """What ``produce()`` of a topic returns: its result has the place of each partition's part.

    It is done when all parts are; if one was given up, :attr:`parts` shows which.

    Attributes:
        parts: The handle of each partition that got some of the records.
        ingestion_time_ms: The earliest time recorded for them, milliseconds since the Unix
            epoch; 0 for a call without records.
    """

    __slots__ = ("_runtime", "ingestion_time_ms", "parts")

    def __init__(self, parts: Mapping[str, WriteHandle], runtime: Runtime) -> None:
        self.parts = parts
        self.ingestion_time_ms = min((each.ingestion_time_ms for each in parts.values()), default=0)
        self._runtime = runtime

    def done(self) -> bool:
        """See :meth:`Handle.done`."""
        return all(part.done() for part in self.parts.values())

    def _wait(self, timeout: float | None) -> None:
        until = None if timeout is None else self._runtime.monotonic() + timeout
        for part in self.parts.values():
            part._wait(None if until is None else max(0.0, until - self._runtime.monotonic()))

    def _result(self) -> dict[str, Durable]:
        return {name: part._result() for name, part in self.parts.items()}

    def _when_done(self, callback: Callable[[], object]) -> None:
        if not self.parts:
            callback()
        ended = count(1)

        def one_ended() -> None:
            if next(ended) == len(self.parts):  # next() is atomic
                callback()

        for part in self.parts.values():
            part._when_done(one_ended)


def wakeable() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running event loop, and a function for any thread that sets its result."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    def wake_from_thread() -> None:
        # RuntimeError: the loop was closed meanwhile, so nothing waits for the future. A check
        # of loop.is_closed() before the call would race with the closing.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(wake)

    return future, wake_from_thread
