"""Reading with the library alone: acknowledging a long queue, draining small batches."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator

from benchmarks.queues import Queued, fill, records_of
from benchmarks.reading import floor_row, limit_row, rows
from benchmarks.table import Row
from opendata_buffer import Consumer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.fetch import fetch_many
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

LATENCY_MS = 60
BATCHES = 10_000
SERIAL_BATCHES = 200
DRAIN_S = 8.0
NEAR_BATCHES = 32
NEAR_ROUNDS = 5

SLOW = FaultPlan(get_ms=LATENCY_MS, put_ms=LATENCY_MS, cas_ms=LATENCY_MS, list_ms=LATENCY_MS)
CONFIG = ConsumerConfig(store="memory://bench", gc=GarbageCollectorConfig(enabled=False))


def small_batches() -> tuple[FaultyStore, Queued]:
    """10,000 batches of 10 records on a store that is still fast."""
    store = FaultyStore(MemoryStore(), SystemRuntime())
    return store, fill(store, records_of(100, 10), BATCHES)


def serial_seconds(consumer: Consumer, batches: int) -> float:
    """The loop of the README: one batch after the other."""
    started = time.perf_counter()
    for _ in range(batches):
        batch = consumer.next_batch()
        assert batch is not None
        consumer.ack(batch.sequence)
    return time.perf_counter() - started


def drain_row() -> Row:
    store, queued = small_batches()
    with Consumer(CONFIG, store=store) as consumer:
        store.plan = SLOW
        serial = serial_seconds(consumer, SERIAL_BATCHES) / SERIAL_BATCHES
        store.plan = FaultPlan()
    queued.rewind()
    with Consumer(CONFIG, store=store) as consumer:
        store.plan = SLOW
        started = time.perf_counter()
        descriptors = consumer.next_descriptors(BATCHES)
        count = 0
        for batch in fetch_many(consumer.fetch_handle().fetch, descriptors):
            count += len(batch.entries)
        consumer.ack_through(descriptors[-1].sequence)
        taken = time.perf_counter() - started
        assert count == BATCHES * queued.records
        assert len(consumer) == 0
        store.plan = FaultPlan()
    speedup = serial * BATCHES / taken
    return Row(
        f"drain {BATCHES:,} batches of 10 records, {LATENCY_MS} ms storage, without an option",
        f"{taken:.1f} s",
        f"<= {DRAIN_S:g} s",
        taken <= DRAIN_S,
        f"{speedup:.0f} x next_batch and ack; one by one {serial * 1e3:.0f} ms a batch, "
        f"measured on {SERIAL_BATCHES}",
    )


def near_row() -> Row:
    """Read-ahead where there is nothing to hide: files in the page cache, decoded to objects."""
    times: dict[str, list[float]] = {"next_batch": [], "fetch_many": []}
    with tempfile.TemporaryDirectory() as directory:
        queued = fill(LocalStore(directory), records_of(1_000, 4_000), NEAR_BATCHES)
        config = ConsumerConfig(store=directory, gc=GarbageCollectorConfig(enabled=False))
        for turn in range(2 * NEAR_ROUNDS):
            queued.rewind()
            way = "next_batch" if turn % 2 else "fetch_many"
            with Consumer(config) as consumer:
                started = time.perf_counter()
                if way == "next_batch":
                    count = sum(len(each.entries) for each in iter(consumer.next_batch, None))
                else:
                    fetched = fetch_many(
                        consumer.fetch_handle().fetch, consumer.next_descriptors(NEAR_BATCHES)
                    )
                    count = sum(len(each.entries) for each in fetched)
                times[way].append(time.perf_counter() - started)
            assert count == NEAR_BATCHES * queued.records
    serial, ahead = (statistics.median(times[way]) for way in ("next_batch", "fetch_many"))
    return Row(
        f"{NEAR_BATCHES} batches of 4 MB in a directory, fetch_many / next_batch",
        f"{ahead / serial:.2f} x the time",
        "<= 1.1 x",
        ahead / serial <= 1.1,
        f"{ahead * 1e3:.0f} and {serial * 1e3:.0f} ms, medians of {NEAR_ROUNDS}",
    )


def ack_row() -> Row:
    store, _ = small_batches()
    with Consumer(CONFIG, store=store) as consumer:
        last = consumer.next_descriptors(BATCHES)[-1].sequence
        before = store.operations["put_if"]
        started = time.perf_counter()
        consumer.ack_through(last)
        taken = time.perf_counter() - started
        writes = store.operations["put_if"] - before
        assert len(consumer) == 0
    return Row(
        f"ack_through over {BATCHES:,} entries",
        f"{writes} CAS write{'s' if writes != 1 else ''}",
        "1",
        writes == 1,
        f"{taken * 1e3:.1f} ms without storage latency",
    )


def run() -> Iterator[Row]:
    """All lines of this suite, in the order of the report."""
    yield ack_row()
    yield drain_row()
    yield near_row()
    yield limit_row()
    yield floor_row()
    yield from rows()
