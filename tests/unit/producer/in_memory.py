"""Producer settings for tests, and helpers that read the entries of a store in memory."""

from __future__ import annotations

from typing import Any

from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.stores.base import Blob, Store
from opendata_buffer.stores.memory import MemoryStore
from tests.support.tuned import tuned

WAIT_S = 60.0
"""Far more than any of these tests takes. Only a failure reaches it."""


class Scripted(MemoryStore):
    """Fails the first puts with these errors."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.puts: list[str] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.puts.append(key)
        if self.errors:
            raise self.errors.pop(0)
        super().put(key, data)


def config(**settings: Any) -> ProducerConfig:
    settings = {"flush_interval_ms": 5, "backoff_max_ms": 20} | settings
    return tuned(ProducerConfig, store="memory://unused", **settings)


def held_config(**settings: Any) -> ProducerConfig:
    """Return a configuration with which no batch is flushed because of its age."""
    return config(**{"flush_interval_ms": 60_000, **settings})


def bytes_of(store: Store, key: str) -> bytes:
    # Bypass the methods of a store that hangs on purpose.
    blob = MemoryStore.get(store, key) if isinstance(store, MemoryStore) else store.get(key)
    assert isinstance(blob, Blob)
    return blob.data


def entries(store: Store, key: str = "ingest/manifest") -> tuple[BatchDescriptor, ...]:
    return Manifest.parse(bytes_of(store, key)).entries()


def batches(store: Store) -> list[list[bytes]]:
    return [decode_batch(bytes_of(store, entry.location)) for entry in entries(store)]


def records(store: Store) -> list[bytes]:
    return [record for batch in batches(store) for record in batch]
