"""Positions of a stream, as Spark keeps them in its checkpoint.

Spark compares offsets as JSON text, so the keys have one order and an idle source hands back
the very offset it was given. The initial offset is a fixed sentinel: Spark asks for it twice
and stores it nowhere, so whatever it resolves to must travel in the end offset of the first
batch, the one thing that is on record before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.errors import InvalidInput

__all__ = ["INITIAL", "SourceOffset"]

VERSION = 1

INITIAL: dict[str, Any] = {"v": VERSION, "at": "start"}
"""The offset of a query that has read nothing; means whatever ``startingOffsets`` says."""


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """Everything below sequence ``next`` has been read.

    Attributes:
        next: First sequence that has not been read.
        base: Where reading began: the resolved ``startingOffsets``, or the sequence reading
            had to continue at when ``failOnDataLoss`` is false and a gap was passed by.
        transactions: State of the transaction filter, small JSON.
        queue: Id of the queue; empty when it has none. A sequence of another queue, or of one
            that was deleted and made anew, means nothing in this one.
    """

    next: int
    base: int
    transactions: dict[str, Any] = field(default_factory=dict)
    queue: str = ""

    def to_json(self) -> dict[str, Any]:
        """The offset as Spark stores it: ``{"v":1,"queue":"01..","next":7,"base":0,"txn":{}}``."""
        return {
            "v": VERSION,
            "queue": self.queue,
            "next": self.next,
            "base": self.base,
            "txn": self.transactions,
        }

    @classmethod
    def from_json(cls, offset: Mapping[str, Any] | None) -> SourceOffset | None:
        """Read an offset back; None stands for :data:`INITIAL`.

        Raises:
            InvalidInput: Not an offset of this source, or of a newer version of it.
        """
        if not isinstance(offset, Mapping) or "v" not in offset:
            raise InvalidInput(
                f"offset {offset!r} was not written by the opendata-buffer source: the "
                "checkpoint belongs to another query. Give this query a checkpointLocation of "
                "its own."
            )
        if offset["v"] != VERSION:
            raise InvalidInput(
                f"offset {offset!r} has version {offset['v']!r} and this release reads version "
                f"{VERSION}: the checkpoint was written by a newer release. Upgrade "
                "opendata-buffer."
            )
        if dict(offset) == INITIAL:
            return None
        following, base, transactions = (offset.get(key) for key in ("next", "base", "txn"))
        if not _is_position(following) or not _is_position(base):
            raise InvalidInput(f"offset {offset!r} is damaged: next and base must be sequences")
        queue = offset.get("queue", "")
        if not isinstance(transactions, dict) or not isinstance(queue, str):
            raise InvalidInput(
                f"offset {offset!r} is damaged: txn must be an object and queue a text"
            )
        return cls(following, base, transactions, queue)  # type: ignore[arg-type]

    def begin_of(self, start: SourceOffset | None) -> int:
        """First sequence of the micro-batch from ``start`` to this offset.

        Needs no memory of how the offsets came about, so a replay in a new process agrees
        with the first run.
        """
        if start is None or self.base != start.base or self.next < start.next:
            return self.base
        return start.next


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
