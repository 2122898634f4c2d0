"""A topic in memory, and helpers that read its partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from opendata_buffer.consumer.isolation import READ_COMMITTED, READ_UNCOMMITTED, ReadCommitted
from opendata_buffer.formats.batch import batch_key, decode_batch, encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic, partition_config
from tests.support.tuned import tuned

WAIT_S = 60.0
"""Far more than any of these tests takes. Only a failure reaches it."""

URL = "memory://unused"

NAMES = ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb", "p-00003-04vf", "p-00004-00jx"]
"""The names of the partitions of a new topic."""


class Faulty(MemoryStore):
    """Calls hooks with the operation and the key. The request raises the errors of a hook."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: Callable[[str, str], None] = lambda operation, key: None
        self.after: Callable[[str, str], None] = lambda operation, key: None

    def _do(self, operation: str, key: str, *rest: Any, **options: Any) -> Any:
        self.before(operation, key)
        outcome = getattr(MemoryStore, operation)(self, key, *rest, **options)
        self.after(operation, key)
        return outcome

    def get(self, key: str, **options: Any) -> Any:
        return self._do("get", key, **options)

    def put(self, key: str, data: Any) -> None:
        self._do("put", key, data)

    def put_if(self, key: str, data: Any, condition: Any) -> Any:
        return self._do("put_if", key, data, condition)

    def fail(self, operation: str, key: str, error: Exception) -> None:
        """Fail an operation on keys with this prefix until :meth:`heal`."""

        def refuse(asked: str, at: str) -> None:
            if asked == operation and at.startswith(key):
                raise error

        self.before = refuse

    def heal(self) -> None:
        self.before = self.after = lambda operation, key: None


def producing(**settings: Any) -> ProducerConfig:
    settings = {"flush_interval_ms": 5, "backoff_max_ms": 20, "broker": "off"} | settings
    return tuned(ProducerConfig, store=URL, **settings)


def consuming(**settings: Any) -> ConsumerConfig:
    settings.setdefault("create_if_missing", True)
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
    """Append one batch to one partition, and return its location."""
    location = batch_key(partition, runtime.ulid(), message=message)
    store.put(location, encode_batch(list(records)))
    config = partition_config(partition, consuming())
    queue = Queue(store, config, runtime=runtime, role="test")
    queue.append([NewEntry(location)], read_first=True)
    return location


def manifest_of(store: Any, partition: str) -> Manifest:
    return Manifest.parse(store.get(f"{partition}/manifest").data)


def records(store: Any, partition: str, isolation: str = READ_UNCOMMITTED) -> list[bytes]:
    """Return the records that a reader gets from one partition, even if it was never written."""
    key = f"{partition}/manifest"
    if not any(each.key == key for each in store.list(f"{partition}/").objects):
        return []
    pairs = list(enumerate(manifest_of(store, partition).locations()))
    rule, found = ReadCommitted(partition, isolation), []
    for sequence, location in pairs:
        for each in rule.offer(sequence, location, lambda begin, end: pairs[begin:end]):
            found += decode_batch(store.get(pairs[each][1]).data)
    return found


def delivered(store: Any, partition: str) -> list[bytes]:
    return records(store, partition, READ_COMMITTED)
