"""What one task reads."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from opendata_buffer.descriptors import BatchDescriptor

__all__ = ["BatchPartition"]


class BatchPartition(InputPartition):
    """Batches of one task, in queue order; pickled into the task."""

    def __init__(self, descriptors: tuple[BatchDescriptor, ...]) -> None:
        super().__init__(descriptors)
        self.descriptors = descriptors

    def __repr__(self) -> str:
        if not self.descriptors:
            return "BatchPartition()"
        first, last = self.descriptors[0].sequence, self.descriptors[-1].sequence
        return f"BatchPartition({len(self.descriptors)} batches, {first} to {last})"
