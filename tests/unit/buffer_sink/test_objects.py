"""How batch objects of a write are named and stored; tasks that do it are in test_partition."""

from __future__ import annotations

from buffer_sink.blocks import Block
from buffer_sink.objects import BatchObjects
from buffer_sink.options import SinkOptions
from buffer_sink.topic_write import TopicWrite
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Compression, parse_footer
from opendata_buffer.formats.keys import Transaction, location_timestamp_ms, parse_location
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

OPTIONS = SinkOptions(
    queue=QueueConfig(store="memory://x"),
    compression=Compression.ZSTD,
    max_write_duration_ms=3_600_000,
)
TXN = Transaction("q", 4)


def objects(store: MemoryStore, topic: TopicWrite | None = None) -> BatchObjects:
    return BatchObjects(OPTIONS, TXN, topic, store=store, runtime=ManualRuntime())


def test_f5_a_name_is_ahead_of_time_and_says_whose_the_batch_is() -> None:
    name = objects(MemoryStore()).name(None, 0)
    assert location_timestamp_ms(name) == ManualRuntime().now_ms() + 3_600_000
    parsed = parse_location(name, "ingest")
    assert parsed is not None
    assert (parsed.txn, parsed.message) == (TXN, None)


def test_in_a_topic_it_is_a_message_of_the_attempt() -> None:
    topic = TopicWrite(("p-0",), (), b"\1AAAAA", "write-x")
    parsed = parse_location(objects(MemoryStore(), topic).name("p-0", 7), "p-0")
    assert parsed is not None
    assert parsed.message is not None
    assert parsed.txn == TXN


def test_what_is_stored_is_told_as_it_is_on_storage() -> None:
    store = MemoryStore()
    block = Block((b"\x01\x00\x00\x00", b"a" * 1), 1, (Metadata(0, 5),))
    made = objects(store)
    upload = made.put(made.name(None, 0), None, 0, block)
    got = store.get(upload.location)
    assert isinstance(got, Blob)
    assert (upload.bytes, upload.records, upload.metadata) == (len(got.data), 1, block.metadata)
    assert parse_footer(got.data).compression is Compression.ZSTD
