"""Whose turn it is: one of each, round after round, so that no backlog holds others up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

__all__ = ["in_turn"]

T = TypeVar("T")


def in_turn(
    waiting: Mapping[str, Sequence[T]], after: str | None, limit: int
) -> list[tuple[str, T]]:
    """The first of each partition, then the second of each, and so on, with their partitions.

    Args:
        waiting: What waits, by partition, in order.
        after: The partition that had the last turn: the one behind it begins.
        limit: Most that are given out.
    """
    names = list(waiting)
    begin = names.index(after) + 1 if after is not None and after in waiting else 0
    return list(islice(_rounds({n: waiting[n] for n in names[begin:] + names[:begin]}), limit))


def _rounds(waiting: Mapping[str, Sequence[T]]) -> Iterator[tuple[str, T]]:
    for turn in range(max(map(len, waiting.values()), default=0)):
        for name, items in waiting.items():
            if turn < len(items):
                yield name, items[turn]
