from __future__ import annotations

import pickle

from buffer_source.batches import PartitionBatch
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.formats.manifest import Metadata


def test_a_batch_takes_its_partition_into_the_task() -> None:
    batch = BatchDescriptor(7, "p-00003/a.batch", (Metadata(0, 5, b"m"),), 99)
    within = pickle.loads(pickle.dumps(PartitionBatch.within("p-00003", batch)))
    assert within.partition == "p-00003"
    for name in ("sequence", "location", "metadata", "size"):
        assert getattr(within, name) == getattr(batch, name)
    assert PartitionBatch(7, "a").partition == "0"
