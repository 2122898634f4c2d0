"""How locks are taken, so that an interrupted thread never takes one along.

Ctrl-C raises ``KeyboardInterrupt`` between any two steps of the main thread, and
``PyThreadState_SetAsyncExc`` any error in any thread. A ``with`` statement leaves its lock
locked when that happens between taking it and entering the block, or between leaving the block
and giving it back; whoever needs the lock next then waits for ever. :func:`locked` has no such
gap. What it cannot do is to undo half of a change, so the methods it guards change their
object's state in single steps, each of which leaves it valid.

The order of the locks that are taken so: none. A thread that holds one of them takes no other,
calls no store and no function of a caller's. Each object with such a lock gives out values, and
acts on them unlocked.

The other locks come before or after. A :class:`.Consumer` lets its callers in one by one and holds
its lock while the store answers; a broker's :class:`.Service` and a client's :class:`.Finder` write
to a connection, or close it, with theirs. What is called there has at most one lock of its own, and
calls nobody back: a store, a queue, a connection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from opendata_buffer.runtime import Condition

__all__ = ["locked"]


class Lockable(Protocol):
    """An object with one lock."""

    _condition: Condition


Self = TypeVar("Self", bound=Lockable)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def locked(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Run a method with its object's lock held, and give the lock back however it ends.

    Locked methods do not call each other: the lock is not taken twice.

    Raises:
        RuntimeError: The thread holds the lock already: a signal handler interrupted it in the
            middle of a change and calls the same object.
    """

    @wraps(method)
    def run(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
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
