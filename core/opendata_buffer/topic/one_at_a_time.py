"""Calls that are carried out one after the other, without a lock that is held through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opendata_buffer.locks import locked
from opendata_buffer.runtime import Runtime

__all__ = ["OneAtATime"]


class OneAtATime:
    """Lets one caller in at a time: ``with turns.taken(): ...``. Thread-safe, not reentrant.

    A lock could not do it: a call that waits for storage holds it for seconds, and a thread that
    is interrupted while it waits must leave it as it was.

    Args:
        runtime: The lock and its waiting room.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._condition = runtime.condition()
        self._holder: object | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the others, and keep them waiting until the end of the block."""
        own = object()
        try:
            self._take(own)
            yield
        finally:
            # Also when an interruption came out of the waiting: then it is another one's turn.
            self._give_back(own)

    @locked
    def _take(self, own: object) -> None:
        while self._holder is not None:
            self._condition.wait()
        self._holder = own

    @locked
    def _give_back(self, own: object) -> None:
        if self._holder is own:
            self._holder = None
            self._condition.notify_all()
