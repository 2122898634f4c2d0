"""A topic in memory, and what is in its partitions."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
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


def append(
    store: MemoryStore,
    runtime: Runtime,
    partition: str,
    *records: bytes,
    message: UUID | None = None,
) -> str:
    """One batch in one partition; returns its location."""
    location = batch_key(partition, runtime.ulid(), message=message)
    store.put(location, encode_batch(list(records)))
    config = Topic.config_of(partition, consuming())
    queue = Queue(store, config, runtime=runtime, role="test")
    queue.append([NewEntry(location)], read_first=True)
    return location


def manifest_of(store: MemoryStore, partition: str) -> Manifest:
    got = store.get(f"{partition}/manifest")
    assert isinstance(got, Blob)
    return Manifest.parse(got.data)


def records(store: MemoryStore, partition: str) -> list[bytes]:
    """What is queued in one partition; nothing when it was never written."""
    key = f"{partition}/manifest"
    if not any(each.key == key for each in store.list(f"{partition}/").objects):
        return []
    found: list[bytes] = []
    for entry in manifest_of(store, partition).entries():
        blob = store.get(entry.location)
        assert isinstance(blob, Blob)
        found += decode_batch(blob.data)
    return found


def delivered(store: MemoryStore, partition: str) -> list[bytes]:
    """What a reader gets of one partition from the beginning, by the rule of read-committed."""
    entries = manifest_of(store, partition).entries()
    pairs = [(entry.sequence, entry.location) for entry in entries]
    rule, found = ReadCommitted(partition), []
    for sequence, location in pairs:
        for each in rule.offer(sequence, location, lambda begin, end: pairs[begin:end]):
            blob = store.get(entries[each].location)
            assert isinstance(blob, Blob)
            found += decode_batch(blob.data)
    return found
