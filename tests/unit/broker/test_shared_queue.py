"""Appends and acknowledgements of one process take turns, and none of them races another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.broker.broker import FRESH_S, SharedQueue
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Fenced
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import eventually

CONFIG = ProducerConfig(store="memory://shared")


def entry(number: int) -> NewEntry:
    return NewEntry(f"ingest/{number:06}")


class Watched(MemoryStore):
    """Notes who writes. A write of the thread that appends lasts, when told so, until ``held``."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[str] = []
        self.reads = 0
        self.held: Callable[[], object] | None = None
        self.holds = threading.Event()

    def get(self, key: str, **options: Any) -> Any:
        self.reads += 1
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        who = threading.current_thread().name
        held = self.held
        if held is not None and who == "appends":
            self.held, who = None, "held"
            self.holds.set()
            eventually(held)
        self.writers.append(who)
        return super().put_if(key, data, condition)


def test_two_threads_write_in_turns_and_lose_no_race() -> None:
    store = Watched()
    queue = SharedQueue(store, CONFIG, runtime=ManualRuntime())
    epoch = queue.claim_epoch(None).epoch
    over = threading.Event()
    appended: list[Any] = []

    def append() -> None:
        while not over.is_set():
            appended.append(queue.append([entry(len(appended))]))

    thread = threading.Thread(target=append, name="appends")
    thread.start()
    try:
        for _ in range(20):
            before = len(appended)
            eventually(lambda before=before: len(appended) > before)  # type: ignore[misc]
            manifest = queue.read()
            assert manifest is not None
            store.holds.clear()
            # An append is under way when this thread asks for its turn.
            store.held = lambda: len(queue._lock._waiting) > 1
            assert store.holds.wait(60)
            queue.dequeue(manifest.next_sequence - 1, epoch)
    finally:
        over.set()
        thread.join()
    assert appended == list(range(len(appended)))
    assert queue.conflicts == 0
    # Who writes all the time waits behind who came meanwhile.
    held = [number for number, who in enumerate(store.writers) if who == "held"]
    assert len(held) == 20
    assert {store.writers[number + 1] for number in held} == {threading.current_thread().name}
    # Its own manifest is in memory: what was written needs no reading.
    assert store.reads <= 3


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
