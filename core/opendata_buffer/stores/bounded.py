"""Ends a call of a store at its deadline, also one that no timeout of its own ends.

Resolving a name has no timeout, fetching credentials has others than ours, and a server that
sends a byte now and then never exceeds the one between two bytes. So a call that has a deadline
runs in a thread of its own, and its caller goes on without it when the time is up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from http.client import HTTPException
from typing import TypeVar

from opendata_buffer.errors import OpenDataBufferError, TransientStorageError
from opendata_buffer.redaction import redacted
from opendata_buffer.runtime import Runtime, remaining

__all__ = ["DeadlinePassed", "bounded", "in_time"]

T = TypeVar("T")

_NONSENSE = (AttributeError, HTTPException, LookupError, TypeError, ValueError)
"""What reading an answer may end in that is none."""


class DeadlinePassed(Exception):
    """The call did not end in time; it may still be under way, and take effect."""


def bounded(runtime: Runtime, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, within the deadline of the calling thread.

    The call sees the same deadline and can begin nothing more once it has passed; the request it
    waits for then ends by its own timeout. Without a deadline it runs in the calling thread.

    Raises:
        DeadlinePassed: The call did not end in time, or was not begun: no time was left.
    """
    left = remaining()
    if left is None:
        return call()
    if left <= 0:
        raise DeadlinePassed
    changed = runtime.condition()
    ended: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = (call(), None)
        except BaseException as error:  # raised again in the caller's thread
            outcome = (None, error)
        with changed:
            ended.append(outcome)
            changed.notify_all()

    context = copy_context()
    runtime.spawn(lambda: context.run(run), "opendata-buffer-store")
    with changed:
        while not ended:
            left = remaining()
            if left is None or left <= 0:
                raise DeadlinePassed
            changed.wait(left)
    result, error = ended.pop()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T may include None


def in_time(
    runtime: Runtime, call: Callable[[], T], *, verb: str, key: str, where: Callable[[], str]
) -> T:
    """What ``call`` returns or raises, within the deadline of the calling thread.

    Args:
        runtime: Threads.
        call: One request, or a few.
        verb: ``read``, ``write``, ``list`` or ``delete``.
        key: The full key, or prefix.
        where: Says what was asked; called when it gave no answer.

    Raises:
        TransientStorageError: It did not end in time, or the answer could not be made sense of.
    """
    try:
        return bounded(runtime, call)
    except (OpenDataBufferError, OSError):
        raise
    except _NONSENSE as error:
        # Libraries, and what reads their results here, take an answer to be the service's. What a
        # broken server or a proxy has written ends in whatever error comes of it.
        raise TransientStorageError(
            f"cannot {verb} {key!r} in {where()}: the answer makes no sense "
            f"({type(error).__name__}: {redacted(str(error)).strip()}). Check what answers at the "
            "endpoint, or try again later."
        ) from error
    except DeadlinePassed:
        raise TransientStorageError(
            f"cannot {verb} {key!r} in {where()}: no answer in time. Check the endpoint and the "
            "network, or try again later."
        ) from None
