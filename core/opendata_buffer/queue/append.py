"""A group of batches on its way into the manifest, all of it or nothing. Pure.

An append whose answer was lost is repeated until it is known to have landed, and must not land
twice: the group is recognised by its locations, each of which is used once (failures F1, F2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.attempts import Untraceable

__all__ = ["Append"]

T = TypeVar("T")


class Append(Generic[T]):
    """The change of one append, and its :class:`~.attempts.Proof`.

    Args:
        entries: At least one.
        check: Called with each manifest that is about to be replaced and its successor; raises
            when that must not be written.
        guard: See :meth:`.Queue.append`.

    Attributes:
        sequence: Of the first entry, where it is now or was to go last; -1 before that.
        stopped: What the guard answered in the last attempt; None to go on.
    """

    def __init__(
        self,
        entries: Sequence[NewEntry],
        check: Callable[[Manifest, Manifest], None],
        guard: Callable[[Manifest], T | None] | None,
    ) -> None:
        self._entries = entries
        self._check = check
        self._guard = guard
        self.sequence = -1
        self.stopped: T | None = None

    def decide(self, before: Manifest) -> Manifest:
        """The manifest with the group behind its entries; the same one where the guard stops."""
        self.stopped = None if self._guard is None else self._guard(before)
        if self.stopped is not None:
            return before
        after = before.append(self._entries)
        self._check(before, after)
        self.sequence = before.next_sequence
        return after

    def mark(self) -> int:
        """The first sequence of the attempt."""
        return self.sequence

    def find(self, now: Manifest | None, marks: Sequence[int]) -> bool:
        """Whether the group is in the manifest.

        Raises:
            Untraceable: It is not, and a consumer took entries that may have been it.
        """
        if now is None:
            return False
        # A search of bytes, decoding nothing. It looks for the last entry because the consumer
        # drops the group from its front.
        last = now.find(self._entries[-1].location)
        if last is None:
            if any(mark < now.first_sequence for mark in marks):
                raise Untraceable("those sequences were dequeued since")
            return False
        self.sequence = last - len(self._entries) + 1
        self.stopped = None
        return True
