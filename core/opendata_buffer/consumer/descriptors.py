"""What a consumer hands out: a queue entry to fetch.

What fetching it returns is in :mod:`opendata_buffer.consumer.batches`; who plans a query needs
none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from opendata_buffer.formats.entries import Metadata, QueueEntry

__all__ = ["BatchDescriptor"]


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """One queued batch that was handed out and is to be fetched. Small, hashable, picklable.

    Attributes:
        sequence: Position in the queue.
        location: Key of the batch object, relative to the store.
        metadata: Ranges of records with their ingestion time and payload.
        size: Bytes of the object when somebody listed it; None when nobody did.
    """

    sequence: int
    location: str
    metadata: tuple[Metadata, ...] = ()
    size: int | None = None

    @classmethod
    def of(cls, entry: QueueEntry, size: int | None = None) -> BatchDescriptor:
        """The descriptor of a manifest entry."""
        return cls(entry.sequence, entry.location, entry.metadata, size)
