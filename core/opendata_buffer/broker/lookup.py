"""Appends of which an earlier attempt may have landed without anybody knowing. Pure.

Whoever appends a second time looks first, on the very manifest its compare-and-swap replaces: if
the first attempt has landed it is there, and if it lands later, the second one loses its race
and looks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendata_buffer.errors import CommitStateUnknown
from opendata_buffer.formats.manifest import Manifest, NewEntry

__all__ = ["Landed", "look_up"]


@dataclass(frozen=True, slots=True)
class Landed:
    """The earlier attempt is in the manifest; ``sequence`` is its first entry's."""

    sequence: int


def look_up(
    key: str, entries: Sequence[NewEntry], since: int
) -> Callable[[Manifest], Landed | None]:
    """A guard for :meth:`.Queue.append` that finds an earlier attempt of the same append.

    Args:
        key: The manifest's key, for the error.
        entries: What is to be appended.
        since: The earlier attempt can only have landed at this sequence or later.

    Raises:
        CommitStateUnknown: By the guard: the attempt is not in the manifest, but a consumer has
            dequeued entries among which it may have been.
    """

    def guard(before: Manifest) -> Landed | None:
        # The last entry, because a consumer takes an append from its front.
        last = before.find(entries[-1].location)
        if last is not None:
            return Landed(last - len(entries) + 1)
        if before.first_sequence > since:
            raise CommitStateUnknown(
                key,
                since,
                tuple(entry.location for entry in entries),
                before.next_sequence,
                "the broker that was to append it gave no answer, and sequences where it may "
                "have been were dequeued since",
            )
        return None

    return guard
