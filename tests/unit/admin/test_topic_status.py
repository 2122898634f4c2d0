"""A status shows each partition of a topic."""

from __future__ import annotations

from opendata_buffer.admin.target import Target
from opendata_buffer.admin.topic_status import read_topic
from opendata_buffer.config import QueueConfig
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic, seal_partition

TOPIC = QueueConfig(store="memory://unused")
SYSTEM = SystemRuntime()


def test_a_closed_partition_that_is_still_listed_shows_its_real_epoch() -> None:
    store = MemoryStore()
    topic = Topic.create(TOPIC, 2, store=store)
    topic.drain("p-00001-05mv")
    seal_partition(topic, "p-00001-05mv")
    assert [
        each.epoch for each in read_topic(Target(store, TOPIC, SYSTEM, topic), topic).partitions
    ] == [0, 0]
