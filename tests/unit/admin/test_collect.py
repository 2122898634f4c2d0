"""One cycle of the collector over all queues that an operator means."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.collect import collect
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic

RUNTIME = SystemRuntime()
CONFIG = ConsumerConfig(store="memory://x", gc=GarbageCollectorConfig(grace_period_ms=0))


def consumed(store: MemoryStore, config: ConsumerConfig) -> str:
    """One batch that was read and acknowledged; where it is."""
    queue = Queue(store, config, runtime=RUNTIME, role="test")
    location = batch_key(config.data_path_prefix, RUNTIME.ulid())
    store.put(location, encode_batch([b"x"]))
    queue.append([NewEntry(location)])
    queue.dequeue(0, queue.claim_epoch(None).epoch)
    # In the millisecond in which it was written it is too young, whatever the grace period.
    written_ms = RUNTIME.now_ms()
    while RUNTIME.now_ms() <= written_ms:
        pass
    return location


def batches(store: MemoryStore) -> set[str]:
    return {each.key for each in store.list("").objects if each.key.endswith(".batch")}


def test_a_queue_is_collected() -> None:
    store = MemoryStore()
    location = consumed(store, CONFIG)
    assert [each.key for each in collect(store, CONFIG, None, RUNTIME).plan.delete] == [location]
    assert batches(store) == set()


def test_a_queue_that_is_not_there_is_not_made() -> None:
    store = MemoryStore()
    with pytest.raises(InvalidInput, match="there is no queue"):
        collect(store, CONFIG, None, RUNTIME)
    assert not store.list("").objects


def test_partitions_and_those_that_have_left_are_collected_and_the_latter_forgotten() -> None:
    store = MemoryStore()
    topic = Topic.create(CONFIG, 3, store=store)
    for name in topic.description.names[:2]:
        consumed(store, topic.config_of(name, CONFIG))
    topic.drain("0")
    (left,) = topic.remove_drained(after_s=0)
    assert collect(store, CONFIG, topic, RUNTIME, dry_run=True).deleted == 0
    assert topic.read().left == (left,)
    assert collect(store, CONFIG, topic, RUNTIME).deleted == 2
    assert batches(store) == set()
    assert topic.read().left == ()
    assert not store.list("p-00002").objects, "nobody has written to it, and neither did this"


def test_one_that_has_left_is_remembered_as_long_as_something_of_it_is_too_young() -> None:
    store = MemoryStore()
    topic = Topic.create(CONFIG, 2, store=store)
    consumed(store, topic.config_of(topic.description.names[0], CONFIG))
    topic.drain("0")
    left = topic.remove_drained(after_s=0)
    patient = ConsumerConfig(store="memory://x")
    assert collect(store, patient, topic, RUNTIME).plan.waiting == 1
    assert list(topic.read().left) == left
