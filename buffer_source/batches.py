"""Batches that a micro-batch reads, with the partition each is in, and the tasks that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from buffer_source.offsets import ONLY
from buffer_source.options import SourceOptions
from buffer_source.planner import pack, shares
from opendata_buffer.consumer.fetch import BatchDescriptor

__all__ = ["PartitionBatch", "tasks_of"]


@dataclass(frozen=True, slots=True)
class PartitionBatch(BatchDescriptor):
    """A queued batch of one partition.

    Attributes:
        partition: The partition's name in offsets and in the column ``partition``.
        part: Of a batch that several tasks share, which part this is: from 0.
        parts: How many tasks share it.
    """

    partition: str = ONLY
    part: int = 0
    parts: int = 1

    @classmethod
    def within(cls, partition: str, batch: BatchDescriptor) -> PartitionBatch:
        """The batch as one of a partition."""
        return cls(batch.sequence, batch.location, batch.metadata, batch.size, partition)

    def rows(self, count: int) -> range:
        """The rows of this part, of ``count`` in the batch: each is in one part."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)

    def shared_by(self, parts: int) -> list[PartitionBatch]:
        """The batch for several tasks, in the order of its rows."""
        if parts == 1:
            return [self]
        return [replace(self, part=part, parts=parts) for part in range(parts)]


def tasks_of(
    batches: Sequence[PartitionBatch], sizes: Sequence[int], options: SourceOptions
) -> list[tuple[PartitionBatch, ...]]:
    """The batches of a plan, dealt to tasks; very large ones are shared by several.

    Args:
        batches: In the order they are read.
        sizes: Stored bytes of each; estimates will do.
        options: How many tasks there are to be.
    """
    parts = shares(sizes, options.parallelism, options.min_partitions)
    return pack(
        [
            part
            for batch, count in zip(batches, parts, strict=True)
            for part in batch.shared_by(count)
        ],
        [size // count for size, count in zip(sizes, parts, strict=True) for _ in range(count)],
        options.parallelism,
        options.min_partitions,
    )
