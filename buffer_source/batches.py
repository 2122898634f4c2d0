"""A batch that a micro-batch reads, and the partition of the source it is in."""

from __future__ import annotations

from dataclasses import dataclass

from buffer_source.offsets import ONLY
from opendata_buffer.consumer.descriptors import BatchDescriptor

__all__ = ["PartitionBatch"]


@dataclass(frozen=True, slots=True)
class PartitionBatch(BatchDescriptor):
    """A queued batch of one partition.

    Attributes:
        partition: The partition's name in offsets and in the column ``partition``.
    """

    partition: str = ONLY

    @classmethod
    def within(cls, partition: str, batch: BatchDescriptor) -> PartitionBatch:
        """The batch as one of a partition."""
        return cls(batch.sequence, batch.location, batch.metadata, batch.size, partition)
