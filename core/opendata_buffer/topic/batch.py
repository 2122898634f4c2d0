"""What a topic's consumer hands out: a batch, and the partition that it is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from opendata_buffer.consumer.batches import ArrowBatch
from opendata_buffer.formats.manifest import Metadata

__all__ = ["Delivered", "TopicArrowBatch", "TopicBatch"]


class Delivered(Protocol):
    """A batch that was handed out, or what is kept of it: its records need not be."""

    @property
    def partition(self) -> str:
        """Which one."""
        ...

    @property
    def sequence(self) -> int:
        """Position in the partition's queue."""
        ...


@dataclass(frozen=True, slots=True)
class TopicBatch:
    """A decoded batch of one partition.

    Attributes:
        partition: Which one.
        entries: The records, in ingestion order.
        sequence: Position in the partition's queue.
        location: Key of the batch object.
        metadata: Ranges of records with their ingestion time and payload.
    """

    partition: str
    entries: list[bytes]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicArrowBatch(ArrowBatch):
    """A decoded batch of one partition whose records are one ``pa.binary()`` array.

    Attributes:
        partition: Which one. All else is as in :class:`.ArrowBatch`, also ``to_table()``.
    """

    partition: str
