"""Whose a queue is."""

from __future__ import annotations

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.owner import read_ownership
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.queue.consumer_info import write_consumer_info
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = ConsumerConfig(store="memory://owner")


def test_a_note_is_about_its_own_epoch_only() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    queue = Queue(store, CONFIG, runtime=runtime, role="consumer")
    queue.claim_epoch(None)
    write_consumer_info(store, CONFIG, runtime, 1, program="a")
    runtime.advance(5.0)
    found = read_ownership(Observer(store, CONFIG, runtime))
    assert (found.epoch, found.known, found.since_seconds) == (1, True, 5.0)
    queue.claim_epoch(None)
    found = read_ownership(Observer(store, CONFIG, runtime))
    assert (found.epoch, found.known) == (2, False)
    assert found.as_json()["holder_epoch"] == 1


def test_a_sealed_partition_is_nobody_s() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    Queue(store, CONFIG, runtime=runtime, role="topic").seal()
    assert read_ownership(Observer(store, CONFIG, runtime)).epoch == 0
