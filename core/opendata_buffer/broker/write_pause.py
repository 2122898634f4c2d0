"""The floor: a guest writes the manifest, and the broker does not.

Some writes are not the broker's to make: whether Spark's sink appends a micro-batch depends on
the manifest at that instant, so it writes by itself, and it has to read first. Against a broker
that writes from memory without a pause it would lose every race (:mod:`.producer.group_commit`
lets it in
once in a while). So it asks for the floor, and the broker begins no write until the guest says
that it is through, its connection ends, or :data:`FLOOR_S` are over. Nothing but time depends on
it: both write by compare-and-swap, whoever has the floor.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from opendata_buffer.runtime import Condition, Runtime

__all__ = ["FLOOR_S", "Floor", "Guest"]

log = logging.getLogger(__name__)

FLOOR_S = 2.0
"""A guest that died, was suspended, or lies holds the broker's clients up no longer. A read and a
write of a manifest take a tenth of that, and of the largest ones about so long."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Guest(Generic[T]):
    """A client that wants to write.

    Attributes:
        client: Who; a client waits in line once.
        number: Of its request.
    """

    client: T
    number: int


class Floor(Generic[T]):
    """Who has the floor, and who waits for it. Every method is called with the lock held.

    Args:
        runtime: Clock.
        condition: The broker's lock.
    """

    def __init__(self, runtime: Runtime, condition: Condition) -> None:
        self._runtime = runtime
        self._condition = condition
        self._line: deque[Guest[T]] = deque()
        self._holder: Guest[T] | None = None
        self.given = 0
        """How often it was given to somebody."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self._line)

    def ask(self, guest: Guest[T]) -> bool:
        """Wait in line; False when the client does so already, or has the floor."""
        holder = [] if self._holder is None else [self._holder]
        if any(each.client is guest.client for each in (*self._line, *holder)):
            return False
        self._line.append(guest)
        self._condition.notify_all()
        return True

    def end(self, client: T) -> Guest[T] | None:
        """A client is through, or gone. The guest that waited in line, and was told nothing."""
        if self._holder is not None and self._holder.client is client:
            self._holder = None
            self._condition.notify_all()
        waiting = next((each for each in self._line if each.client is client), None)
        if waiting is not None:
            self._line.remove(waiting)
        return waiting

    def clear(self) -> list[Guest[T]]:
        """Give it to nobody any more; returns who waited."""
        waiting = list(self._line)
        self._line.clear()
        return waiting

    def give(self, tell: Callable[[Guest[T]], None], is_over: Callable[[], bool]) -> bool:
        """Let who waits longest write; returns when that is done. False when nobody waits.

        Called by the one thread that writes, between two writes of its own.

        Args:
            tell: Tells the guest; it must not block.
            is_over: Whether the broker leaves.
        """
        if not self._line:
            return False
        guest = self._holder = self._line.popleft()
        self.given += 1
        tell(guest)
        until = self._runtime.monotonic() + FLOOR_S
        while self._holder is guest and not is_over():
            left = until - self._runtime.monotonic()
            if left <= 0:
                log.warning("a guest has not written within %g s: going on without it", FLOOR_S)
                break
            self._condition.wait(left)
        self._holder = None
        return True
