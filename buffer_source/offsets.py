"""Positions of a stream, as Spark keeps them in its checkpoint.

An offset maps each partition of the source to a position in that partition's queue; a source
that reads one queue has the one partition :data:`ONLY`. Version 1 offsets, which were the
position of one queue without the map, are still read.

Spark compares offsets as JSON text, so the keys have one order and an idle source hands back
the very offset it was given. The initial offset is a fixed sentinel: Spark asks for it twice
and stores it nowhere, so what it resolves to travels in the end offset of the first
micro-batch, which is on record before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.errors import InvalidInput

VERSION = 2
_READABLE = (1, 2)

ONLY = "0"
"""The partition of a source that reads one queue."""

INITIAL: dict[str, Any] = {"v": VERSION, "at": "start"}
"""The offset of a query that has read nothing: ``startingOffsets`` decides where it begins."""


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    """How far one queue was read: everything below sequence ``next``.

    Attributes:
        next: First sequence that has not been read.
        base: Where reading began: the resolved ``startingOffsets``, or the sequence reading
            continued at behind a loss, when ``failOnDataLoss`` is false.
        transactions: State of the transaction filter, small JSON.
        queue: Id of the queue; empty when it has none. A sequence of another queue, or of one
            that was deleted and made anew, means nothing in this one.
        missing: Sequences of the micro-batch that ends here whose objects were found to be gone
            when it was planned, and which it passes by (``failOnDataLoss`` is false). On
            record, because a replay that asked again might find otherwise. Those of earlier ones
            stay while an open transaction begins in front of them.
    """

    next: int
    base: int
    transactions: dict[str, Any] = field(default_factory=dict)
    queue: str = ""
    missing: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """``{"queue":"01..","next":7,"base":0,"txn":{}}``, keys in this order.

        Where batches were missing there is also ``"missing":[5]`` at the end.
        """
        position: dict[str, Any] = {
            "queue": self.queue,
            "next": self.next,
            "base": self.base,
            "txn": self.transactions,
        }
        if self.missing:
            position["missing"] = list(self.missing)
        return position

    @classmethod
    def from_json(cls, position: Mapping[str, Any]) -> PartitionOffset:
        """Read back what :meth:`to_json` wrote; a damaged position is an error."""
        following, base, transactions = (position.get(key) for key in ("next", "base", "txn"))
        queue, missing = position.get("queue", ""), position.get("missing", [])
        if not (
            isinstance(transactions, dict)
            and isinstance(queue, str)
            and isinstance(missing, list)
            and all(map(_is_sequence, (following, base, *missing)))
        ):
            raise InvalidInput(
                f"offset {position!r} is damaged: next, base and missing must be sequences, txn an "
                "object and queue a text"
            )
        return cls(following, base, transactions, queue, tuple(missing))  # type: ignore[arg-type]

    def begin_of(self, start: PartitionOffset | None) -> int:
        """First sequence of the micro-batch from ``start`` to this position; pure, for replays."""
        if start is None or self.base != start.base or self.next < start.next:
            return self.base
        return start.next


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """A position for each partition of the source, by the partition's name."""

    partitions: Mapping[str, PartitionOffset]

    @property
    def only(self) -> PartitionOffset:
        """The position of a source that reads one queue; an error for other partitions."""
        if set(self.partitions) != {ONLY}:
            raise InvalidInput(
                f"the checkpoint is about partitions {sorted(self.partitions)}, and this source "
                f"reads one queue, partition {ONLY!r}: the checkpoint belongs to another query. "
                "Give this query a checkpointLocation of its own."
            )
        return self.partitions[ONLY]

    def to_json(self) -> dict[str, Any]:
        """The offset as Spark stores it: ``{"v":2,"partitions":{"0":{...}}}``, names in order."""
        return {
            "v": VERSION,
            "partitions": {
                name: self.partitions[name].to_json() for name in sorted(self.partitions)
            },
        }

    @classmethod
    def from_json(cls, offset: Mapping[str, Any] | None) -> SourceOffset | None:
        """Read an offset of version 1 or 2; None stands for :data:`INITIAL`.

        Raises:
            InvalidInput: Not an offset of this source, or of a newer version of it.
        """
        if not isinstance(offset, Mapping) or "v" not in offset:
            raise InvalidInput(
                f"offset {offset!r} was not written by the opendata-buffer source: the "
                "checkpoint belongs to another query. Give this query a checkpointLocation of "
                "its own."
            )
        version = offset["v"]
        if version not in _READABLE or isinstance(version, bool):
            raise InvalidInput(
                f"offset {offset!r} has version {version!r} and this release reads versions "
                f"up to {VERSION}: the checkpoint was written by a newer release. Upgrade "
                "opendata-buffer."
            )
        if offset == {"v": version, "at": "start"}:
            return None
        if version == 1:
            return cls({ONLY: PartitionOffset.from_json(offset)})
        partitions = offset.get("partitions")
        if (
            not isinstance(partitions, Mapping)
            or not partitions
            or not all(isinstance(each, Mapping) for each in partitions.values())
        ):
            raise InvalidInput(
                f"offset {offset!r} is damaged: partitions must be an object of positions"
            )
        return cls({name: PartitionOffset.from_json(each) for name, each in partitions.items()})


def _is_sequence(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
