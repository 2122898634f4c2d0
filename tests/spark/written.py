"""What the sink wrote, seen without Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig, StoreOptions
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store


@dataclass(frozen=True)
class Queued:
    sequence: int
    location: str
    transaction: Transaction | None
    records: list[bytes]
    metadata: tuple[Metadata, ...]


def open_queue(
    store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX, options: StoreOptions | None = None
) -> Queue:
    config = QueueConfig(
        store=store, data_path_prefix=prefix, store_options=options or StoreOptions()
    )
    return Queue(
        open_store(store, config.store_options), config, runtime=SystemRuntime(), role="test"
    )


def queued(
    store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX, options: StoreOptions | None = None
) -> list[Queued]:
    """Every queued batch, decoded."""
    found = open_store(store, options or StoreOptions())
    manifest = open_queue(store, prefix, options).read() or Manifest.empty()
    result = []
    for entry in manifest.entries():
        blob: Any = found.get(entry.location)
        parsed = parse_location(entry.location, prefix)
        assert parsed is not None
        result.append(
            Queued(
                entry.sequence, entry.location, parsed.txn, decode_batch(blob.data), entry.metadata
            )
        )
    return result


def records(batches: list[Queued]) -> list[bytes]:
    return [record for each in batches for record in each.records]


def filtered(batches: list[Queued], prefix: str = DEFAULT_DATA_PATH_PREFIX) -> list[bytes]:
    """The records a reader with a transaction filter passes on."""
    passes = TransactionFilter(prefix)
    return records([each for each in batches if passes.offer(each.sequence, each.location)])


def drain(store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX) -> list[Queued]:
    """Take everything, as a consumer does."""
    taken = queued(store, prefix)
    queue = open_queue(store, prefix)
    if taken:
        queue.dequeue(taken[-1].sequence, queue.claim_epoch(None).epoch)
    return taken
