"""How claims come from one foreman to the next, and how they are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.broker.claims import Claims, decode, encode
from opendata_buffer.broker.dispatcher_term import DispatcherTerm, stored_epoch
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import Closed, Fenced
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import Absent, Blob, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = ConsumerConfig(store="memory://unused")
CLAIMS = "ingest/_claims.json"


class World:
    """A queue with two batches, and foremen that come and go."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.runtime = ManualRuntime()
        self.store = store if store is not None else MemoryStore()
        entries = [NewEntry(f"ingest/{number}.batch") for number in range(2)]
        for each in entries:
            self.store.put(each.location, encode_batch([b"x"]))
        Queue(self.store, CONFIG, runtime=self.runtime, role="test").append(entries)

    def take(self) -> DispatcherTerm:
        return DispatcherTerm(self.store, CONFIG, self.runtime, Consumer)

    @property
    def stored(self) -> Claims:
        blob = self.store.get(CLAIMS)
        assert isinstance(blob, Blob)
        return decode(blob.data)


def test_the_first_one_begins_at_the_front_and_a_successor_has_what_it_wrote() -> None:
    world = World()
    assert stored_epoch(world.store, CONFIG, world.runtime) is None
    first = world.take()
    assert (first.first, first.claims.frontier, first.epoch) == (0, 0, 1)
    first.write(first.claims.claim([0], "w", 1_000))
    assert world.stored == first.claims
    second = world.take()
    assert second.claims.held == first.claims.held
    assert (second.epoch, world.stored.epoch) == (2, 2)
    assert stored_epoch(world.store, CONFIG, world.runtime) == 2


def test_who_was_succeeded_writes_nothing_any_more() -> None:
    world = World()
    first, second = world.take(), world.take()
    with pytest.raises(Fenced) as caught:
        first.write(first.claims.claim([0], "w", 1_000))
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert world.stored == second.claims
    assert second.claims.held == {}


def test_claims_that_did_not_change_are_not_written() -> None:
    world = World()
    tenure = world.take()
    world.store.delete_many([CLAIMS])
    tenure.write(tenure.claims)
    assert stored_epoch(world.store, CONFIG, world.runtime) is None


class AnswerLost(MemoryStore):
    """Loses the answers of some writes of the claims."""

    lose = 2

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        outcome = super().put_if(key, data, condition)
        if key == CLAIMS and self.lose:
            self.lose -= 1
            return outcomes.Unknown("injected")
        return outcome


def test_a_lost_answer_to_a_write_of_the_claims_is_looked_up() -> None:
    store = AnswerLost()
    world = World(store)
    tenure = world.take()
    tenure.write(tenure.claims.claim([0], "w", 1_000))
    assert store.lose == 0
    assert world.stored.deliveries == {0: 1}
    assert world.stored == tenure.claims


def test_claims_of_a_queue_that_was_made_again_say_nothing_of_its_batches() -> None:
    """With the old frontier the new queue's first batches would pass for done."""
    world = World()
    old = Claims(epoch=9, frontier=1_000, tokens=77, queue="another queue")
    world.store.put(CLAIMS, encode(old))
    claims = world.take().claims
    assert claims.free(2) == [0, 1]
    assert claims.tokens == 77


class Overtaken(MemoryStore):
    """An older foreman's write arrives between a newer one's read and its write."""

    armed = False

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        if self.armed and key == CLAIMS:
            self.armed = False
            found = self.get(key)
            assert isinstance(found, Blob)
            super().put(key, encode(replace(decode(found.data), tokens=50)))
        return super().put_if(key, data, condition)


def test_a_newer_foreman_takes_over_whatever_the_older_one_wrote_last() -> None:
    store = Overtaken()
    world = World(store)
    world.take()
    store.armed = True
    second = world.take()
    assert not store.armed
    assert second.claims.tokens == 50
    assert world.stored == second.claims


class Paused(MemoryStore):
    """Whoever reads the claims first is paused there, and succeeded."""

    armed = False
    successor: DispatcherTerm | None = None

    def get(self, key: str, **options: Any) -> Any:
        if self.armed and key == CLAIMS:
            self.armed = False
            self.successor = DispatcherTerm(self, CONFIG, ManualRuntime(seed=2), Consumer)
        return super().get(key, **options)


def test_a_foreman_that_was_succeeded_while_it_began_takes_nothing_over() -> None:
    store = Paused()
    world = World(store)
    store.armed = True
    with pytest.raises(Fenced) as caught:
        world.take()
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert store.successor is not None
    assert world.stored == store.successor.claims


def test_a_consumer_whose_claims_cannot_be_taken_over_is_closed() -> None:
    store = Paused()
    world = World(store)
    store.armed = True
    opened: list[Consumer] = []

    def open_consumer(config: ConsumerConfig, **settings: Any) -> Consumer:
        opened.append(Consumer(config, **settings))
        return opened[-1]

    with pytest.raises(Fenced):
        DispatcherTerm(store, CONFIG, world.runtime, open_consumer)
    (consumer,) = opened
    with pytest.raises(Closed):
        consumer.check_fence()
