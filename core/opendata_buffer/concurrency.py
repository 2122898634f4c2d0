"""One call for each of many things at once: looks at all partitions cost the time of one."""

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

__all__ = ["ClosedAtEnd", "MOST_AT_ONCE", "locked", "together"]


# ---- What is closed at the end of a ``with`` block, and may fail to. ----


log = logging.getLogger(__name__)


class ClosedAtEnd(ABC):
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


# ---- How locks are taken, so that an interrupted thread never takes one along. ----
#
# Ctrl-C raises ``KeyboardInterrupt`` between any two steps of the main thread, and
# ``PyThreadState_SetAsyncExc`` any error in any thread. A ``with`` statement leaves its lock
# locked when that happens between taking it and entering the block, or between leaving the block
# and giving it back; whoever needs the lock next then waits for ever. :func:`locked` has no such
# gap. What it cannot do is to undo half of a change, so the methods it guards change their
# object's state in single steps, each of which leaves it valid.
#
# The order of the locks that are taken so: none. A thread that holds one of them takes no other,
# calls no store and no function of a caller's. Each object with such a lock gives out values, and
# acts on them unlocked.
#
# The other locks come before or after. A :class:`.Consumer` lets its callers in one by one and
# holds
# its lock while the store answers; a broker's :class:`.Service` and a client's :class:`.Discovery`
# write
# to a connection, or close it, with theirs. What is called there has at most one lock of its own,
# and
# calls nobody back: a store, a queue, a connection.


class Lockable(Protocol):
    """An object with one lock."""

    _condition: Condition


Owner = TypeVar("Owner", bound=Lockable)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def locked(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Run a method with its object's lock held, and give the lock back however it ends.

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
            # Reached with the lock held when the error came while the inner lines gave it back.
            if condition.held():
                condition.__exit__(None, None, None)

    return run


MOST_AT_ONCE = 32
"""Half of the connections that a store keeps."""

Item = TypeVar("Item")


def together(
    runtime: Runtime,
    call: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = MOST_AT_ONCE,
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
        return [call(each) for each in wanted]  # a thread to wait for at once is pure cost
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
                break  # a store that is near has answered all before there was a thread for each
        context = copy_context()  # one context cannot be entered twice at once
        try:
            runtime.spawn(lambda context=context: context.run(work), "opendata-buffer-together")  # type: ignore[misc]
        except RuntimeError:
            # No thread is left. Raised, it would leave calls under way that nobody waits for.
            work()
            break
    with changed:
        while len(results) + len(errors) < len(wanted):
            changed.wait()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(wanted))]
