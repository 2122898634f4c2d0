"""Handles: the futures that ``produce()`` returns.

A batch has one :class:`Completion`. The handles of all calls in the batch share it, so setting an
outcome costs the same for one call and for a thousand.

A handle is a ``concurrent.futures.Future``, so ``wait``, ``as_completed`` and
``asyncio.wrap_future`` take it. But a future has a lock of its own, which costs as much as all
else that a call with metadata does, and most programs never need it. So a handle
becomes a complete future only when the standard library looks at it: :class:`Handle` answers all
usual calls from its completion, and creates the attributes of the future when one of them is first
read.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from opendata_buffer.arguments import checked, wrong_type
from opendata_buffer.errors import copied
from opendata_buffer.familiar_names import OF_HANDLES, missing_attribute
from opendata_buffer.runtime import Runtime, locked, wait_for

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Durable:
    """Where durable records are.

    Attributes:
        sequence: The sequence of their batch in the queue.
        location: The name of the batch's object.
    """

    sequence: int
    location: str


class Completion:
    """The outcome of one batch, once it is known. Thread-safe.

    Args:
        runtime: Clock and threads.
        queue: The name of the queue, for the text of the handles.
    """

    def __init__(self, runtime: Runtime, queue: str = "a queue") -> None:
        self.queue = queue
        self._runtime = runtime
        self._condition = runtime.condition()
        self._callbacks: list[Callable[[], object]] = []
        self.outcome: Durable | BaseException | None = None

    def complete(self, outcome: Durable | BaseException) -> None:
        """Set the outcome and call the callbacks. Only the first call counts."""
        with self._condition:
            if self.outcome is not None:
                return
            self.outcome = outcome
            self._condition.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        # This is a thread of the producer. If a callback called sys.exit(), it would end this
        # thread instead of the process, and all other handles would wait forever.
        for callback in callbacks:
            _call(callback, BaseException)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the outcome is known, or at once if it is known already."""
        with self._condition:
            if self.outcome is None:
                self._callbacks.append(callback)
                return
        _call(callback, Exception)

    @locked
    def wait(self, timeout: float | None) -> None:
        """Wait for the outcome.

        Args:
            timeout: Seconds; None waits without a limit.

        Raises:
            TimeoutError: The outcome is not known yet.
        """
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

OnDelivery: TypeAlias = Callable[[BaseException | None, Result | None], object]
"""Called once with an error and None, or with None and the place of the records."""


def check_on_delivery(function: object) -> None:
    """Refuse a callback that is not a function.

    Args:
        function: The callback of a call; None if it has none.

    Raises:
        InvalidInput: It cannot be called.
    """
    if function is not None and not callable(function):
        raise wrong_type("on_delivery", function, "a function of (error, durable)")


_FUTURE_ATTRIBUTES = frozenset(vars(Future()))

_becoming_future = threading.Lock()


class Handle(Future[Result], ABC):
    """A ``concurrent.futures.Future`` for accepted records. Thread-safe.

    ``concurrent.futures.wait``, ``as_completed`` and ``asyncio.wrap_future`` accept it, and it can
    be awaited. Calls of one millisecond share a handle, so a set of handles may be smaller than the
    number of calls.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # For a type checker, a class with this method has every attribute.

        def __getattr__(self, name: str) -> Any:
            if name not in _FUTURE_ATTRIBUTES:
                raise missing_attribute(self, name, OF_HANDLES)
            return self._future_attribute(name)

    def _future_attribute(self, name: str) -> Any:
        """Create the attributes of the future when the first one of them is read.

        The standard library reads ``_condition``, ``_state`` and ``_waiters``. It looks at the
        state and adds a waiter with the condition held. So the outcome has to be set with the
        condition held, too, which :meth:`_settle` does.
        """
        with _becoming_future:
            is_first = _FUTURE_ATTRIBUTES.isdisjoint(vars(self))
            if is_first:
                Future.__init__(self)
        if is_first:
            self._when_done(self._settle)
        return vars(self)[name]

    def _settle(self) -> None:
        """Set the outcome of the future, which wakes those who wait for it."""
        try:
            result = self._landed()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)

    def cancel(self) -> bool:
        """Return False: accepted records cannot be taken back."""
        return False

    def cancelled(self) -> bool:
        """Return False: accepted records cannot be taken back."""
        return False

    def running(self) -> bool:
        """Return whether the outcome is not known yet."""
        return not self.done()

    @abstractmethod
    def done(self) -> bool:
        """Return whether the outcome is known: the records are durable, or were given up."""

    @checked
    def result(self, timeout: float | None = None) -> Result:
        """Wait until the records are durable, and return where they are.

        Args:
            timeout: Seconds to wait. None (default) waits for as long as the producer tries.

        Returns:
            The place of the records in the queue; for a topic, one place for each partition.

        Raises:
            TimeoutError: The records are not durable yet. The producer goes on trying.
            CommitStateUnknown: The records were given up, but they may be in the queue.
            OpenDataBufferError: The records were given up and are not in the queue.
        """
        self._wait(timeout)
        return self._landed()

    @checked
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait like :meth:`result`, and return the error.

        Args:
            timeout: As for :meth:`result`.

        Returns:
            What :meth:`result` would raise; None if the records are durable.

        Raises:
            TimeoutError: The outcome is not known yet.
        """
        self._wait(timeout)
        try:
            self._landed()
        except BaseException as error:
            return error
        return None

    @checked
    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call a function once the outcome is known, or at once if it already is.

        A thread of the producer calls it and waits for it. So it must not block, and must not call
        ``produce()`` or ``flush()``. Its errors are logged::

            def report(handle):
                if (error := handle.exception()) is not None:
                    log.error("not stored: %s", error)

            producer.produce([record]).add_done_callback(report)

        Args:
            callback: Called with the handle.
        """
        self._when_done(partial(callback, self))

    def _report_to(self, on_delivery: OnDelivery[Result] | None) -> Self:
        """Call ``on_delivery``, if any, with the error or the result, and return the handle."""
        if on_delivery is None:
            return self

        def report() -> None:
            try:
                landed = self._landed()
            except BaseException as error:
                on_delivery(error, None)
            else:
                on_delivery(None, landed)

        self._when_done(report)
        return self

    def __await__(self) -> Generator[Any, None, Result]:
        done, wake = wakeable()
        self._when_done(wake)
        yield from done.__await__()
        return self._landed()

    @abstractmethod
    def _wait(self, timeout: float | None) -> None: ...

    @abstractmethod
    def _landed(self) -> Result: ...

    @abstractmethod
    def _when_done(self, callback: Callable[[], object]) -> None: ...


class WriteHandle(Handle[Durable]):
    """What ``produce()`` returns. In asyncio, ``await handle`` waits until it is durable.

    Args:
        completion: The completion of the batch that has the records.
        ingestion_time_ms: The time recorded for the records, in milliseconds since the Unix epoch.

    Attributes:
        ingestion_time_ms: The time recorded for the records, in milliseconds since the Unix epoch.
    """

    __slots__ = ("_completion", "ingestion_time_ms")

    def __init__(self, completion: Completion, ingestion_time_ms: int) -> None:
        self._completion = completion
        self.ingestion_time_ms = ingestion_time_ms

    def done(self) -> bool:
        """See :meth:`Handle.done`."""
        return self._completion.outcome is not None

    def _wait(self, timeout: float | None) -> None:
        # Without the lock, if possible: most callers wait for a handle that is done.
        if not self.done():
            self._completion.wait(timeout)

    def _landed(self) -> Durable:
        outcome = self._completion.outcome
        if isinstance(outcome, BaseException):
            # All calls of a failed append share the error, so each time a copy is raised.
            raise copied(outcome)
        assert outcome is not None
        return outcome

    def _when_done(self, callback: Callable[[], object]) -> None:
        self._completion.add_callback(callback)

    def _outcome(self) -> str:
        outcome = self._completion.outcome
        if outcome is None:
            return "pending"
        if isinstance(outcome, Durable):
            return f"durable at sequence {outcome.sequence}"
        return f"failed with {type(outcome).__name__}"

    def __repr__(self) -> str:
        return f"<WriteHandle of {self._completion.queue}: {self._outcome()}>"


class TopicHandle(Handle[dict[str, Durable]]):
    """What ``produce()`` of a topic returns. The result has one ``Durable`` per partition.

    It is done when all parts are. If a part was given up, :attr:`parts` shows which one.

    Args:
        parts: The handle of each partition that got some of the records.
        runtime: Clock and threads.

    Attributes:
        parts: The handle of each partition that got some of the records.
        ingestion_time_ms: The earliest time recorded for them, in milliseconds since the Unix
            epoch; 0 for a call without records.
    """

    __slots__ = ("_runtime", "ingestion_time_ms", "parts")

    def __init__(self, parts: Mapping[str, WriteHandle], runtime: Runtime) -> None:
        self.parts = parts
        self.ingestion_time_ms = min((part.ingestion_time_ms for part in parts.values()), default=0)
        self._runtime = runtime

    def done(self) -> bool:
        """See :meth:`Handle.done`."""
        return all(part.done() for part in self.parts.values())

    def _wait(self, timeout: float | None) -> None:
        until = None if timeout is None else self._runtime.monotonic() + timeout
        for part in self.parts.values():
            part._wait(None if until is None else max(0.0, until - self._runtime.monotonic()))

    def _landed(self) -> dict[str, Durable]:
        return {name: part._landed() for name, part in self.parts.items()}

    def _when_done(self, callback: Callable[[], object]) -> None:
        if not self.parts:
            callback()
        ended = count(1)

        def one_ended() -> None:
            # next() is atomic, so only one part is the last one.
            if next(ended) == len(self.parts):
                callback()

        for part in self.parts.values():
            part._when_done(one_ended)

    def __repr__(self) -> str:
        parts = [f"{name} {part._outcome()}" for name, part in self.parts.items()]
        return f"<TopicHandle of {len(parts)} partitions: {', '.join(parts) or 'done'}>"


def wakeable() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """Make a future that another thread can complete.

    Returns:
        A future of the running event loop, and a function that sets its result, for any thread.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    def wake_from_thread() -> None:
        # A RuntimeError means that the loop was closed, so nothing waits for the future. Checking
        # loop.is_closed() before the call would race with the closing.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(wake)

    return future, wake_from_thread
