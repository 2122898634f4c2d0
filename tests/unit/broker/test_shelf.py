"""What is known of the queue's batches, and which of them are not handed out."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.broker import dispatch_round as module
from opendata_buffer.broker.dispatch_round import ReadyBatches
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.quarantine import list_quarantine
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = ConsumerConfig(store="memory://unused")


class World:
    """A queue with three batches, the second of which has metadata."""

    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.store = MemoryStore()
        entries = []
        for number in range(3):
            self.store.put(f"ingest/{number}.batch", encode_batch([b"x"]))
            metadata = (Metadata(0, 7, b"m" * 300),) if number == 1 else ()
            entries.append(NewEntry(f"ingest/{number}.batch", metadata))
        Queue(self.store, CONFIG, runtime=self.runtime, role="test").append(entries)
        self.consumer = Consumer(CONFIG, store=self.store, runtime=self.runtime)
        self.ready = ReadyBatches(self.store, CONFIG, self.runtime)
        self.ready.begin(0)


def test_it_knows_what_was_looked_for_and_where_that_ends() -> None:
    world = World()
    assert world.ready.look_for(2, world.consumer, now=5.0)
    assert (world.ready.end, world.ready.looked_at) == (2, 5.0)
    body = world.ready.body_of(1)
    assert (body["sequence"], body["location"]) == (1, "ingest/1.batch")
    assert body["metadata"][0][:2] == [0, 7]
    assert world.ready.size_of(1) > 300 + world.ready.size_of(0)
    assert world.ready.look_for(2, world.consumer, now=6.0)
    assert not world.ready.look_for(2, world.consumer, now=7.0)
    assert world.ready.end == 3
    world.ready.begin(9)
    assert world.ready.end == 9


def test_a_released_batch_rests_for_a_while() -> None:
    world = World()
    world.ready.rests = {0: 10.0, 1: 20.0}
    assert world.ready.resting(now=10.0) == {1}
    assert world.ready.resting(now=20.0) == set()


def test_a_batch_goes_to_the_quarantine() -> None:
    world = World()
    world.ready.look_for(3, world.consumer, now=0.0)
    assert world.ready.quarantine(1, "it is bad")
    assert [each.sequence for each in list_quarantine(world.store, "ingest")] == [1]
    assert world.ready.resting(now=0.0) == set()


def test_one_that_is_too_large_for_it_is_handed_to_nobody_while_it_is_queued(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise InvalidInput("its object has more than 1 GiB")

    world = World()
    world.ready.look_for(3, world.consumer, now=0.0)
    monkeypatch.setattr(module, "quarantine", refuse)
    assert not world.ready.quarantine(1, "it is bad")
    assert "opendata-buffer skip memory://" in caplog.text
    assert world.ready.resting(now=0.0) == {1}
    world.ready.drop_before(2)
    assert world.ready.resting(now=0.0) == set()
    assert world.ready.body_of(2)["sequence"] == 2
