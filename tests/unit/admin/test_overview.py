"""One look at a queue or at all partitions of a topic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opendata_buffer.admin.overview import ASIDE_S, Overseer, summarised, writer_of
from opendata_buffer.broker.lease import announcement_key
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.formats.keys import Transaction, batch_key, tagged_ulid
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.messages.message_ids import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.consumer_info import write_consumer_info
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic

CONFIG = QueueConfig(store="memory://unused", cas_deadline_ms=1_000)


@pytest.fixture
def runtime() -> ManualRuntime:
    return ManualRuntime()


def append(store: MemoryStore, config: QueueConfig, runtime: ManualRuntime, *keys: str) -> None:
    queue = Queue(store, config, runtime=runtime, role="test")
    queue.append([NewEntry(key, (Metadata(0, runtime.now_ms(), b""),)) for key in keys])


def key_of(runtime: ManualRuntime, tag: str, prefix: str = "ingest") -> str:
    return batch_key(prefix, tagged_ulid(runtime.ulid(), tag))


def test_a_queue_is_told_with_its_writers_and_its_age(runtime: ManualRuntime) -> None:
    store = MemoryStore()
    append(store, CONFIG, runtime, key_of(runtime, "AAAAAA"), key_of(runtime, "AAAAAA"))
    runtime.advance(7)
    append(store, CONFIG, runtime, key_of(runtime, "BBBBBB"))
    Queue(store, CONFIG, runtime=runtime, role="test").claim_epoch(None)
    before = store.list("").objects
    found = Overseer(store, CONFIG, runtime).look()
    assert store.list("").objects == before, "and nothing is written"
    assert (found.topic, found.backlog, found.oldest_age_seconds) == ("", 3, 7.0)
    (queue,) = found.queues
    assert (queue.name, queue.first_sequence, queue.next_sequence, queue.epoch) == (
        ("ingest", 0, 3, 1)
    )
    assert queue.writers == {"process AAAAAA": 2, "process BBBBBB": 1}
    assert found.as_json()["queues"][0]["backlog"] == 3
    assert "monotonic" not in found.as_json()


def test_a_writer_is_its_app_its_publisher_its_tag_or_unknown(runtime: ManualRuntime) -> None:
    ulid = runtime.ulid()
    message = build_uuid(b"\1AAAAA", 2, CONTINUE_TXN)
    app = batch_key("ingest", ulid, Transaction("orders", 3))
    assert writer_of(app, "ingest") == "app orders"
    publisher = batch_key("ingest", ulid, None, message)
    assert writer_of(publisher, "ingest") == "publisher " + b"\1AAAAA".hex()
    assert writer_of(batch_key("ingest", ulid), "ingest") == f"process {ulid[10:16]}"
    assert writer_of("ingest/by-hand.parquet", "ingest") == "unknown"


def test_all_partitions_of_a_topic_are_told_and_undecided_transactions_counted(
    runtime: ManualRuntime,
) -> None:
    store = MemoryStore()
    topic = Topic.create(CONFIG, 3, store=store, runtime=runtime)
    last = topic.description.names[2]
    message = build_uuid(b"\1AAAAA", 2, CONTINUE_TXN)
    own = topic.config_of(last, CONFIG)
    append(store, own, runtime, batch_key(last, runtime.ulid(), None, message))
    found = Overseer(store, CONFIG, runtime, topic=True).look()
    assert found.topic == topic.description.topic_id
    assert [each.name for each in found.queues] == list(topic.description.names)
    assert [each.backlog for each in found.queues] == [0, 0, 1]
    assert [each.undecided for each in found.queues] == [0, 0, 1]


def test_one_partition_alone_is_looked_at_where_that_is_meant(runtime: ManualRuntime) -> None:
    store = MemoryStore()
    topic = Topic.create(CONFIG, 2, store=store, runtime=runtime)
    name = topic.description.names[1]
    append(store, topic.config_of(name, CONFIG), runtime, key_of(runtime, "AAAAAA", name))
    own = replace(CONFIG, data_path_prefix=name, manifest_path="")
    found = Overseer(store, own, runtime).look()
    assert [each.name for each in found.queues] == [name]


def test_where_there_is_no_queue_it_says_so_and_makes_none(runtime: ManualRuntime) -> None:
    store = MemoryStore()
    with pytest.raises(InvalidInput, match="there is no queue"):
        Overseer(store, CONFIG, runtime).look()
    with pytest.raises(InvalidInput, match="topic"):
        Overseer(store, CONFIG, runtime, topic=True).look()
    assert store.list("").objects == ()


def test_an_unchanged_manifest_is_not_transferred_again(runtime: ManualRuntime) -> None:
    inner = MemoryStore()
    append(inner, CONFIG, runtime, key_of(runtime, "AAAAAA"))

    class Counting(MemoryStore):
        transferred = 0

        def get(self, key: str, **options: object) -> object:  # type: ignore[override]
            found = inner.get(key, **options)  # type: ignore[arg-type]
            Counting.transferred += key == CONFIG.manifest_path and hasattr(found, "data")
            return found

    overseer = Overseer(Counting(), CONFIG, runtime)
    for _ in range(5):
        assert overseer.look().backlog == 1
    assert Counting.transferred == 1


def test_a_look_that_failed_is_followed_by_one_that_begins_anew(runtime: ManualRuntime) -> None:
    inner = MemoryStore()
    append(inner, CONFIG, runtime, key_of(runtime, "AAAAAA"))
    store = FaultyStore(inner, runtime)
    overseer = Overseer(store, CONFIG, runtime)
    assert overseer.look().backlog == 1
    store.plan = FaultPlan(get_errors=1.0)
    with pytest.raises(TransientStorageError):
        overseer.look()
    store.plan = FaultPlan()
    inner.delete_many([CONFIG.manifest_path])
    with pytest.raises(InvalidInput, match="there is no queue"):
        overseer.look()
    append(inner, CONFIG, runtime, key_of(runtime, "AAAAAA"), key_of(runtime, "AAAAAA"))
    assert overseer.look().backlog == 2


def test_an_announcement_that_cannot_be_read_does_not_hide_the_queue(
    runtime: ManualRuntime,
) -> None:
    store = MemoryStore()
    append(store, CONFIG, runtime, key_of(runtime, "AAAAAA"))
    store.put(announcement_key("ingest"), b"no json")
    overseer = Overseer(store, CONFIG, runtime)
    (queue,) = overseer.look().queues
    assert queue.backlog == 1
    assert len(queue.notes) == 1
    store.delete_many([announcement_key("ingest")])
    assert overseer.look().queues[0].notes == queue.notes, "looked at not long ago"
    runtime.advance(ASIDE_S)
    assert overseer.look().queues[0].notes == ()


def test_an_empty_queue_and_one_that_is_sealed_show_no_age_and_no_giant_epoch() -> None:
    look = summarised("ingest", "active", Manifest.starting_at(41, 3), 0)
    assert (look.backlog, look.oldest_age_seconds, look.first_sequence) == (0, None, 41)
    assert look.writers == {}


def test_the_consumer_is_named_while_its_epoch_lasts(runtime: ManualRuntime) -> None:
    store = MemoryStore()
    append(store, CONFIG, runtime, key_of(runtime, "AAAAAA"))
    Queue(store, CONFIG, runtime=runtime, role="test").claim_epoch(None)
    write_consumer_info(store, CONFIG, runtime, 1, program="Spark")
    overseer = Overseer(store, CONFIG, runtime)
    (queue,) = overseer.look().queues
    assert queue.holder is not None
    assert (queue.holder.program, queue.holder.epoch) == ("Spark", 1)
    Queue(store, CONFIG, runtime=runtime, role="test").claim_epoch(None)
    assert overseer.look().queues[0].holder is None, "another took it over, and left no note"
