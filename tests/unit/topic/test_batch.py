"""What a topic's consumer hands out."""

from __future__ import annotations

import pickle

import pyarrow as pa

from opendata_buffer.topic.consumer import TopicArrowBatch


def test_an_arrow_batch_of_a_partition_is_one_of_a_queue_that_names_its_partition() -> None:
    values = pa.array([b'{"a": 1}', b'{"a": 2}'], pa.binary())
    batch = TopicArrowBatch(values, 7, "p-00000-04pn/x.batch", (), partition="p-00000-04pn")
    assert batch.nbytes == values.nbytes
    table = batch.to_table(pa.schema([("_sequence", pa.int64()), ("a", pa.int64())]))
    assert table.to_pylist() == [{"_sequence": 7, "a": 1}, {"_sequence": 7, "a": 2}]
    assert pickle.loads(pickle.dumps(batch)) == batch
