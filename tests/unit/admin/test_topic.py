"""What is in a topic, by one look at each partition."""

from __future__ import annotations

from opendata_buffer.admin.topic import read_topic
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.messages.message_ids import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic

CONFIG = QueueConfig(store="memory://unused")
RUNTIME = SystemRuntime()


def test_each_partition_is_looked_at_and_nothing_is_written() -> None:
    store = MemoryStore()
    topic = Topic.create(CONFIG, 40, store=store)
    queue = Queue(store, Topic.config_of("p-00033-06vz", CONFIG), runtime=RUNTIME, role="test")
    entry = NewEntry("p-00033-06vz/a.batch", (Metadata(0, RUNTIME.now_ms() - 5_000, b""),))
    queue.append([entry])
    queue.claim_epoch(None)
    topic.drain("p-00033-06vz")
    before = store.list("").objects
    found = read_topic(topic, CONFIG, RUNTIME)
    assert store.list("").objects == before
    assert len(found.partitions) == 40
    assert found.queue_length == 1
    one = found.partitions[33]
    assert (one.name, one.state, one.queue_length) == ("p-00033-06vz", "draining", 1)
    assert (one.next_sequence, one.epoch) == (1, 1)
    assert one.oldest_age_seconds is not None
    assert 5 <= one.oldest_age_seconds < 60
    assert found.partitions[0].oldest_age_seconds is None
    assert found.as_json()["partitions"][33]["state"] == "draining"


def test_undecided_transactions_are_counted() -> None:
    store = MemoryStore()
    topic = Topic.create(CONFIG, 2, store=store)
    queue = Queue(store, Topic.config_of("p-00001-05mv", CONFIG), runtime=RUNTIME, role="test")
    for producer in (b"\1AAAAA", b"\1BBBBB"):
        message = build_uuid(producer, 2, CONTINUE_TXN)
        queue.append([NewEntry(batch_key("p-00001-05mv", RUNTIME.ulid(), None, message))])
    assert [each.undecided for each in read_topic(topic, CONFIG, RUNTIME).partitions] == [0, 2]


def test_a_partition_that_is_closed_and_still_listed_shows_no_giant_epoch() -> None:
    store = MemoryStore()
    topic = Topic.create(CONFIG, 2, store=store)
    topic.drain("p-00001-05mv")
    topic.seal("p-00001-05mv")
    assert [each.epoch for each in read_topic(topic, CONFIG, RUNTIME).partitions] == [0, 0]
