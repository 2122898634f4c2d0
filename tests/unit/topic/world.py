"""A topic in memory, and what is in its partitions."""

from __future__ import annotations

from typing import Any

from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic

WAIT_S = 60.0
"""Far beyond what any of these takes; reached only by a failure."""

URL = "memory://unused"


def producing(**settings: Any) -> ProducerConfig:
    settings = {"flush_interval_ms": 5, "backoff_max_ms": 20, "broker": "off"} | settings
    return ProducerConfig(store=URL, **settings)


def consuming(**settings: Any) -> ConsumerConfig:
    return ConsumerConfig(store=URL, gc=GarbageCollectorConfig(enabled=False), **settings)


def topic_in(store: MemoryStore, partitions: int) -> Topic:
    return Topic.create(URL, partitions, store=store)


def records(store: MemoryStore, partition: str) -> list[bytes]:
    """What is queued in one partition; nothing when it was never written."""
    key = f"{partition}/manifest"
    if not any(each.key == key for each in store.list(f"{partition}/").objects):
        return []
    found: list[bytes] = []
    manifest = store.get(key)
    assert isinstance(manifest, Blob)
    for entry in Manifest.parse(manifest.data).entries():
        blob = store.get(entry.location)
        assert isinstance(blob, Blob)
        found += decode_batch(blob.data)
    return found


def delivered(store: MemoryStore, partition: str) -> list[bytes]:
    """What a reader gets of one partition from the beginning, by the rule of read-committed."""
    manifest = store.get(f"{partition}/manifest")
    assert isinstance(manifest, Blob)
    entries = Manifest.parse(manifest.data).entries()
    pairs = [(entry.sequence, entry.location) for entry in entries]
    rule, found = ReadCommitted(partition), []
    for sequence, location in pairs:
        for each in rule.offer(sequence, location, lambda begin, end: pairs[begin:end]):
            blob = store.get(entries[each].location)
            assert isinstance(blob, Blob)
            found += decode_batch(blob.data)
    return found
