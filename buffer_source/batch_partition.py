"""The batches of one task, as the driver plans them and Spark sends them to an executor."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from buffer_source.batches import PartitionBatch
from buffer_source.offsets import ONLY

__all__ = ["BatchPartition"]


class BatchPartition(InputPartition):
    """Batches of one task, of each partition in queue order; pickled into the task."""

    def __init__(self, descriptors: tuple[PartitionBatch, ...]) -> None:
        super().__init__(descriptors)
        self.descriptors = descriptors

    def __repr__(self) -> str:
        if not self.descriptors:
            return "BatchPartition()"
        first, last = (_name(each) for each in (self.descriptors[0], self.descriptors[-1]))
        return f"BatchPartition({len(self.descriptors)} batches, {first} to {last})"


def _name(batch: PartitionBatch) -> str:
    part = f" (part {batch.part + 1} of {batch.parts})" if batch.parts > 1 else ""
    where = "" if batch.partition == ONLY else f"{batch.partition}:"
    return f"{where}{batch.sequence}{part}"
