"""Threads and locks: calls in parallel, methods under a lock, objects that a block closes.

Locks are taken in no order, because a thread that holds one of :func:`locked` takes no other, and
calls no store and no caller's function: the object gives out values, and acts on them unlocked.
Three locks are held while a store or a connection answers: of a :class:`.Consumer`, which admits
its callers one by one, of a :class:`.Broker` and of a client's :class:`.Discovery`. What is called
there has at most one lock of its own, and calls nothing back.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.runtime import Condition, Runtime

log = logging.getLogger(__name__)


class Closeable(ABC):
    """A context manager that closes itself, and does not hide the error that ended the block."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is pending and end; free to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OpenDataBufferError as error:
            if exc is None:
                raise
            self._note_failed_close(error)

    def _note_failed_close(self, error: OpenDataBufferError) -> None:
        """Say that closing failed after the block had; called while the error is handled."""
        log.exception("closing the %s failed", type(self).__name__)


class Lockable(Protocol):
    """An object with one lock."""

    _condition: Condition


Owner = TypeVar("Owner", bound=Lockable)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def locked(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Run a method with its object's lock held, and release the lock however it ends.

    Ctrl-C raises ``KeyboardInterrupt`` between any two steps of the main thread, and
    ``PyThreadState_SetAsyncExc`` any error in any thread. A ``with`` statement leaves its lock
    locked when that happens between taking it and entering the block, or between leaving the block
    and releasing it, and the next thread that needs the lock waits for ever. Here there is no such
    gap. Half of a change is not undone, so the methods change their object's state in single
    steps, each of which leaves it valid.

    Locked methods do not call each other: the lock is not taken twice.

    Raises:
        RuntimeError: The thread holds the lock already: a signal handler interrupted it in the
            middle of a change and calls the same object.
    """

    @wraps(method)
    def run(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        condition = self._condition
        if condition.held():
            raise RuntimeError(
                f"{method.__qualname__.lstrip('_')} was called in the middle of another call of "
                "the same object, by a signal handler: raise an exception in the handler, and "
                "call it where that is caught"
            )
        try:
            try:
                condition.__enter__()
                return method(self, *args, **kwargs)
            finally:
                if condition.held():
                    condition.__exit__(None, None, None)
        finally:
            # Reached with the lock held when the error came while the inner lines released it.
            if condition.held():
                condition.__exit__(None, None, None)

    return run


def wait_for(
    runtime: Runtime, condition: Condition, is_true: Callable[[], object], until: float | None
) -> bool:
    """Wait with the lock held; False where it is not true by ``until``, monotonic seconds."""
    while not is_true():
        left = None if until is None else until - runtime.monotonic()
        if left is not None and left <= 0:
            return False
        condition.wait(left)
    return True


MAX_PARALLEL = 32
"""Half of the connections that a store keeps."""

Item = TypeVar("Item")


def in_parallel(
    runtime: Runtime,
    call: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = MAX_PARALLEL,
) -> list[Result]:
    """``call`` of each item, in threads, within the deadline of the calling thread.

    Returns:
        The results, in the order of the items.

    Raises:
        Exception: What the first of the failed calls raised, in the order of the items; all
            others have ended by then, so none of them is still under way. A caller that wants
            to know each outcome lets ``call`` return its error.
    """
    wanted = tuple(items)
    if len(wanted) <= 1:
        return [call(each) for each in wanted]  # a thread would only add cost
    changed = runtime.condition()
    waiting = list(enumerate(wanted))[::-1]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            with changed:
                if not waiting:
                    return
                index, item = waiting.pop()
            try:
                result = call(item)
            except BaseException as error:  # raised again in the caller's thread
                with changed:
                    errors[index] = error
                    changed.notify_all()
            else:
                with changed:
                    results[index] = result
                    changed.notify_all()

    for _ in range(min(most, len(wanted))):
        with changed:
            if not waiting:
                break  # a store nearby has answered all before there was a thread for each
        context = copy_context()  # one context cannot be entered twice at once
        try:
            runtime.spawn(lambda context=context: context.run(work), "opendata-buffer-together")  # type: ignore[misc]
        except RuntimeError:
            # No thread can be started. The error would leave calls under way without a waiter.
            work()
            break
    with changed:
        while len(results) + len(errors) < len(wanted):
            changed.wait()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(wanted))]
