"""The benchmarks' own parts: a suite that cannot run measures nothing."""

from __future__ import annotations

from benchmarks.queues import fill, records_of
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.stores.memory import MemoryStore

CONFIG = ConsumerConfig(store="memory://bench", gc=GarbageCollectorConfig(enabled=False))


def drained(store: MemoryStore) -> list[bytes]:
    with Consumer(CONFIG, store=store) as consumer:
        batches = list(iter(consumer.next_batch, None))
        consumer.ack_through(batches[-1].sequence)
    return [bytes(entry) for batch in batches for entry in batch.entries]


def test_a_queue_is_drained_again_after_it_was_rewound() -> None:
    store = MemoryStore()
    records = records_of(10, 3)
    queued = fill(store, records, 2)
    assert drained(store) == records * 2
    queued.rewind()
    assert drained(store) == records * 2
