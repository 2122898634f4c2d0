from __future__ import annotations

import pickle

from buffer_source.planner import BatchPartition, PartitionBatch


def test_a_partition_says_what_is_in_it_and_pickles() -> None:
    partition = BatchPartition((PartitionBatch(3, "a"), PartitionBatch(4, "b")))
    assert repr(partition) == "BatchPartition(2 batches, 3 to 4)"
    assert repr(BatchPartition(())) == "BatchPartition()"
    assert pickle.loads(pickle.dumps(partition)).descriptors == partition.descriptors


def test_a_partition_says_which_part_of_a_batch_is_in_it() -> None:
    parts = PartitionBatch(1, "b").shared_by(3)
    assert repr(BatchPartition((PartitionBatch(0, "a"), parts[1]))) == (
        "BatchPartition(2 batches, 0 to 1 (part 2 of 3))"
    )
