"""Queues to read from, written straight into a store: making them is not what is measured."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig
from opendata_buffer.formats.batch import Compression, batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.runtime import SystemRuntime

INGESTED_MS = 1_700_000_000_000


class Puts(Protocol):
    """What filling a queue needs of a store."""

    def put(self, key: str, data: bytes | memoryview) -> None: ...

    def delete_many(self, keys: Iterable[str]) -> Sequence[object]: ...


@dataclass(frozen=True)
class Queued:
    """A queue of equal batches.

    Attributes:
        store: Where it is.
        manifest: Its manifest when nothing was read yet.
        records: Records of each batch.
        prefix: Its data prefix.
    """

    store: Puts
    manifest: Manifest
    records: int
    prefix: str = DEFAULT_DATA_PATH_PREFIX

    def rewind(self) -> None:
        """Queue everything again, whatever was acknowledged; nobody may be reading."""
        config = QueueConfig(store="memory://any", data_path_prefix=self.prefix)
        # The marker remembers how far the manifest got, so an old copy is refused (failure F4).
        assert not self.store.delete_many([owner_key(config.data_path_prefix)])
        self.store.put(config.manifest_path, self.manifest.raw)


def fill(
    store: Puts,
    records: Sequence[bytes],
    batches: int,
    compression: Compression = Compression.NONE,
    prefix: str = DEFAULT_DATA_PATH_PREFIX,
) -> Queued:
    """Queue ``batches`` batches of the same records."""
    return queue_all(store, [encode_batch(records, compression)] * batches, len(records), prefix)


def queue_all(
    store: Puts, objects: Iterable[bytes], records: int, prefix: str = DEFAULT_DATA_PATH_PREFIX
) -> Queued:
    """Queue encoded batches; ``records`` are those of each where they are alike."""
    runtime = SystemRuntime()
    entries = []
    for data in objects:
        location = batch_key(prefix, runtime.ulid())
        store.put(location, data)
        entries.append(NewEntry(location, (Metadata(0, INGESTED_MS, b"bench"),)))
    queued = Queued(store, Manifest.empty().append(entries), records, prefix)
    queued.rewind()
    return queued


def records_of(size: int, count: int, seed: int = 7) -> list[bytes]:
    """Incompressible records of one size."""
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]
