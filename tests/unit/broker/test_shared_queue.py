"""Appends and acknowledgements of one process take turns, and none of them races another."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from opendata_buffer.broker.shared_queue import FRESH_S, SharedQueue
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Fenced
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = ProducerConfig(store="memory://shared")


def entry(number: int) -> NewEntry:
    return NewEntry(f"ingest/{number:06}")


def test_two_threads_write_in_turns_and_lose_no_race() -> None:
    runtime = SystemRuntime()
    store = FaultyStore(MemoryStore(), runtime, FaultPlan(cas_ms=2, get_ms=2))
    queue = SharedQueue(store, CONFIG, runtime=runtime)
    epoch = queue.claim_epoch(None).epoch
    over = threading.Event()
    appended: list[Any] = []

    def append() -> None:
        while not over.is_set():
            appended.append(queue.append([entry(len(appended))]))

    thread = threading.Thread(target=append)
    thread.start()
    try:
        for _ in range(20):
            manifest = queue.read()
            assert manifest is not None
            before = len(appended)
            queue.dequeue(manifest.next_sequence - 1, epoch)
            # Who writes all the time waits behind who came meanwhile. Room for a busy machine.
            assert len(appended) - before <= 8
    finally:
        over.set()
        thread.join(30)
    assert appended == list(range(len(appended)))
    assert queue.conflicts == 0
    # Its own manifest is in memory: what was written needs no reading.
    assert store.operations["get"] <= 3


def test_what_was_written_just_now_is_not_read_again_and_later_it_is() -> None:
    runtime, store = ManualRuntime(), MemoryStore()
    queue = SharedQueue(store, CONFIG, runtime=runtime)
    queue.append([entry(0)])
    Queue(store, CONFIG, runtime=runtime, role="other").append([entry(1)])
    manifest = queue.read()
    assert manifest is not None
    assert manifest.entry_count == 1
    runtime.advance(FRESH_S)
    manifest = queue.read()
    assert manifest is not None
    assert manifest.entry_count == 2


def test_another_consumer_is_noticed_by_a_write_from_memory() -> None:
    runtime, store = ManualRuntime(), MemoryStore()
    queue = SharedQueue(store, CONFIG, runtime=runtime)
    epoch = queue.claim_epoch(None).epoch
    queue.append([entry(0)])
    Queue(store, CONFIG, runtime=runtime, role="consumer").claim_epoch(None)
    with pytest.raises(Fenced):
        queue.dequeue(0, epoch)
    # Who failed holds nobody up.
    assert queue.append([entry(1)]) == 1
