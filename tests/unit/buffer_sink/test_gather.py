"""Small results of many tasks become few batches, in their order."""

from __future__ import annotations

import pyarrow as pa
import pytest

from buffer_sink.messages import SmallBatch, TopicWrite, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.uploads import BatchObjects, join_blocks, store_small
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.messages.message_ids import parse_uuid
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

TXN = Transaction("q", 4)
TOPIC = TopicWrite(("p-0", "p-1"), (), b"\1AAAAA", "write-x")


def small(
    *values: bytes, partition: str | None = None, clock: int = 0, metadata: bytes = b"", at: int = 5
) -> SmallBatch:
    block, _ = encode_arrow_block(pa.array(values, pa.binary()))
    return SmallBatch(bytes(block), len(values), (Metadata(0, at, metadata),), partition, clock)


def stored(
    *batches: UploadedBatch | SmallBatch,
    topic: TopicWrite | None = None,
    target: int = 1_000,
    store: MemoryStore | None = None,
) -> list[tuple[str, list[bytes]]]:
    """Location and records of what comes out; of what was uploaded before, no records."""
    store = store or MemoryStore()
    runtime = ManualRuntime()
    options = SinkOptions(queue=QueueConfig(store="memory://x"), target_batch_bytes=target)
    objects = BatchObjects(
        options, WriteTask(0, Moment(0, 0.0), TXN, topic=topic), store=store, runtime=runtime
    )
    found = []
    for each in store_small(batches, objects, options, runtime):
        if each.location.startswith("before"):
            found.append((each.location, []))
            continue
        got = store.get(each.location)
        assert isinstance(got, Blob)
        assert (each.bytes, each.records) == (len(got.data), len(decode_batch(got.data)))
        found.append((each.location, decode_batch(got.data)))
    return found


def uploaded(name: str, partition: str | None = None) -> UploadedBatch:
    return UploadedBatch(f"before/{name}", 1, 10, (Metadata(0, 5),), partition)


def test_neighbours_are_joined_and_what_a_task_uploaded_stays_between_them() -> None:
    found = stored(small(b"a"), small(b"b", b"c"), uploaded("x"), small(b"d"))
    assert [records for _, records in found] == [[b"a", b"b", b"c"], [], [b"d"]]
    parsed = parse_location(found[0][0], "ingest")
    assert parsed is not None
    assert parsed.txn == TXN


def test_a_joined_batch_is_no_larger_than_any_other() -> None:
    found = stored(*(small(bytes([n]) * 6) for n in range(5)), target=20)
    assert [len(records) for _, records in found] == [2, 2, 1]


def test_each_partition_of_a_topic_has_its_own_and_clocks_rise_in_each() -> None:
    found = stored(
        small(b"a", partition="p-0", clock=10),
        small(b"b", partition="p-1", clock=11),
        small(b"c", partition="p-0", clock=20),
        uploaded("x", "p-0"),
        small(b"d", partition="p-0", clock=40),
        small(b"e", partition="p-1", clock=41),
        topic=TOPIC,
    )
    assert [records for _, records in found] == [[b"a", b"c"], [b"b", b"e"], [], [b"d"]]
    clocks = {}
    for location, records in found:
        if records:
            parsed = parse_location(location, location.split("/")[0])
            assert parsed is not None
            assert parsed.message is not None
            clocks[records[0]] = parse_uuid(parsed.message).clock
    assert clocks == {b"a": 10, b"b": 11, b"d": 40}


def test_metadata_begins_where_its_records_begin_and_times_never_fall() -> None:
    block = join_blocks(
        [
            small(b"a", b"b", metadata=b"x", at=9),
            small(b"c", metadata=b"x", at=7),
            small(b"d", metadata=b"y", at=6),
        ]
    )
    assert block.records == 4
    assert block.metadata == (Metadata(0, 9, b"x"), Metadata(3, 9, b"y"))


def test_a_store_that_refuses_fails_the_write() -> None:
    class Refusing(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise PermanentStorageError("403")

    with pytest.raises(PermanentStorageError):
        stored(small(b"a"), store=Refusing())
