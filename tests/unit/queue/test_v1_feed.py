"""v1 consumers as readers of a log: what is appended to their queues, and what stops that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import Consumer, InvalidInput, Producer, outcomes
from opendata_buffer.config import ConsumerConfig, ProducerConfig
from opendata_buffer.formats.manifest import SEALED_EPOCH, BatchDescriptor, Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue import v1_feed
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.reader_admin import unregister
from opendata_buffer.queue.reader_positions import ReaderPosition
from opendata_buffer.queue.v1_admin import add_v1_reader
from opendata_buffer.queue.v1_feed import Feeder, Feeders, fed, noted
from tests.support.log_fixture import DAY_S, KEY, URL, LogFixture, read, small
from tests.support.v1_consumer import V1Consumer

__all__ = ["small"]

QUEUE = "other/manifest"


def entries(first: int, end: int) -> list[BatchDescriptor]:
    return [BatchDescriptor(number, f"ingest/{number}.batch") for number in range(first, end)]


class Fed(LogFixture):
    """A log with a v1 consumer, and a feeder."""

    def __init__(self, batches: int = 0, start: int | None = None) -> None:
        super().__init__()
        self.append(batches)
        self.begin = add_v1_reader(
            self.store,
            self.view,
            "other",
            "other",
            lambda view: view.first_sequence if start is None else start,
        )
        self.consumer = V1Consumer(self.store, "other")
        self.feeders = self.new_feeders()

    def new_feeders(self) -> Feeders:
        found = Feeders(Log(self.store, self.config, self.runtime, self.claim.queue_id))
        found.find(self.index())
        return found

    def feed(self, feeders: Feeders | None = None, *, check: bool = False) -> str:
        feeders = feeders or self.feeders
        feeders.feed(self.manifest(), check=check, note=True)
        return feeders.feeders["other"].fault

    def queue_now(self) -> Manifest:
        return Manifest.parse(self.store.get(QUEUE).data)

    def position(self) -> ReaderPosition:
        return ReaderPosition.from_json(self.store.get("ingest/_readers/other.json").data)

    def consume(self, most: int = 10_000) -> list[int]:
        """Read and acknowledge as the consumer; check that each object exists."""
        found = self.consumer.next_entries(most)
        for entry in found:
            assert self.store.get(entry.location)
            assert entry.location == self.locations[entry.sequence]
        if found:
            assert self.consumer.dequeue(found[-1].sequence)
        return [entry.sequence for entry in found]


# ---- the rule


def test_only_entries_that_follow_the_queue_are_appended() -> None:
    queue = Manifest.starting_at(5, 1)
    assert fed(entries(6, 9), queue) is queue
    assert fed(entries(0, 5), queue) is queue
    after = fed(entries(3, 9), queue)
    assert after is not None
    assert [entry.location for entry in after.entries()] == [
        f"ingest/{number}.batch" for number in range(5, 9)
    ]
    assert (after.first_sequence, after.next_sequence, after.epoch) == (5, 9, 1)
    assert fed(entries(3, 9), after) is after


def test_a_queue_that_is_gone_or_closed_is_not_fed() -> None:
    assert fed(entries(0, 3), None) is None
    closed = Manifest.starting_at(0, SEALED_EPOCH)
    assert fed(entries(0, 3), closed) is closed


def test_a_queue_is_filled_up_to_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1_feed, "MOST_ENTRIES", 4)
    after = fed(entries(0, 9), Manifest.starting_at(0, 0))
    assert after is not None
    assert after.entry_count == 4
    monkeypatch.setattr(v1_feed, "MOST_BYTES", 100)
    after = fed(entries(0, 9), Manifest.starting_at(0, 0))
    assert after is not None
    assert after.entry_count == 3


def test_a_position_only_moves_forward_and_keeps_an_idle_consumer_from_expiring() -> None:
    position = ReaderPosition("id", 5, 2, moved_ms=1_000, v1="other", fed=9)
    queue = Manifest.starting_at(7, 2).append([NewEntry("ingest/a")])
    after = noted(position, "other", queue, 8, 5_000)
    assert after == replace(position, next=7, moved_ms=5_000)
    assert noted(after, "other", Manifest.starting_at(6, 1), 8, 6_000) is after
    drained = Manifest.starting_at(9, 2)
    after = noted(position, "other", drained, 9, 5_000)
    assert after == replace(position, next=9, moved_ms=5_000)
    assert noted(after, "other", drained, 9, 5_001) is after
    assert noted(after, "other", drained, 9, 100_000) == replace(after, moved_ms=100_000)
    assert noted(after, "elsewhere", drained, 9, 100_000) is after
    assert noted(None, "other", drained, 9, 100_000) is None


# ---- feeding


def test_a_v1_consumer_gets_each_batch_once_from_segments_and_from_the_manifest() -> None:
    fixture = Fed(60)
    assert fixture.consumer.claim()
    found = []
    for _ in range(20):
        assert fixture.feed() == ""
        found += fixture.consume(7)
        fixture.append(3)
    fixture.feed()
    found += fixture.consume()
    assert found == [*range(120)]


def test_the_queue_stays_small_while_the_consumer_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1_feed, "MOST_ENTRIES", 10)
    fixture = Fed(60)
    assert fixture.feed() == ""
    assert fixture.queue_now().entry_count == 10
    assert fixture.consumer.claim()
    found = []
    while batches := fixture.consume():
        found += batches
        assert fixture.feed() == ""
    assert found == [*range(60)]


def test_a_consumer_begins_where_the_operator_said() -> None:
    fixture = Fed(30, start=12)
    assert fixture.begin == 12
    assert fixture.consumer.claim()
    fixture.feed()
    assert fixture.consume() == [*range(12, 30)]


def test_feeding_from_memory_costs_one_write_and_no_read() -> None:
    fixture = Fed(10)
    fixture.feed()
    manifest = None
    for _ in range(5):
        fixture.append(1)
        manifest = fixture.queue.last_seen
        assert manifest is not None
        fixture.store.requests.clear()
        fixture.feeders.feed(manifest)
        assert dict(fixture.store.requests) == {("put_if", QUEUE): 1}
    fixture.store.requests.clear()
    assert manifest is not None
    fixture.feeders.feed(manifest)
    assert not fixture.store.requests


def test_two_feeders_and_lost_answers_append_each_entry_once() -> None:
    fixture = Fed(20)
    one, two = fixture.new_feeders(), fixture.new_feeders()
    write, answers = fixture.store.put_if, 0

    def put_if(key: str, data: bytes, condition: Any) -> Any:
        nonlocal answers
        answers += key == QUEUE
        if key == QUEUE and answers % 3 == 0:
            return outcomes.Unknown("not sent")
        outcome = write(key, data, condition)
        return outcomes.Unknown("lost") if key == QUEUE and answers % 3 == 1 else outcome

    fixture.store.put_if = put_if  # type: ignore[method-assign]
    for number in range(30):
        assert fixture.feed(one if number % 2 else two) == ""
        fixture.append(2)
    fixture.feed(one)
    assert answers > 60
    assert [entry.location for entry in fixture.queue_now().entries()] == fixture.locations


def test_a_feeder_learns_that_another_one_was_faster() -> None:
    fixture = Fed(5)
    other = fixture.new_feeders()
    fixture.feed()
    fixture.feed(other)
    fixture.append(1)
    manifest = fixture.manifest()
    fixture.feeders.feed(manifest)
    other.feed(manifest)
    assert not fixture.feeders.feeders["other"].lost_race
    assert other.feeders["other"].lost_race


# ---- the collector


def test_the_log_keeps_everything_from_the_front_of_the_queue_on() -> None:
    fixture = Fed(40)
    assert fixture.consumer.claim()
    fixture.collect()
    assert fixture.index().floor == 0
    assert fixture.consume(15) == [*range(15)]
    fixture.collect()
    assert fixture.index().floor == 15
    assert fixture.position().next == 15
    assert fixture.consume(100) == [*range(15, 40)]
    fixture.collect()
    assert fixture.index().floor == 40


def test_a_cycle_of_the_collector_feeds_the_queue() -> None:
    fixture = Fed(40)
    fixture.collect()
    assert fixture.queue_now().next_sequence == 40


def test_an_earlier_release_collects_nothing_that_the_consumer_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its collector knows the position only, and keeps the fields that it does not know."""
    fixture = Fed(40)
    assert fixture.consumer.claim()
    fixture.feed()
    assert fixture.consume(10) == [*range(10)]
    fixture.feed(check=True)
    assert fixture.consume(10) == [*range(10, 20)]
    monkeypatch.setattr(Feeders, "find", lambda self, index: None)
    fixture.collect()
    assert fixture.index().floor == 10
    assert fixture.index().v1 == {"other": "other"}


def test_a_position_that_another_program_raised_does_not_delete_what_the_consumer_needs() -> None:
    fixture = Fed(40)
    raised = replace(fixture.position(), next=30)
    fixture.store.put("ingest/_readers/other.json", raised.to_json())
    fixture.collect()
    assert fixture.index().floor == 0


def test_a_consumer_that_has_everything_does_not_expire_and_one_that_is_down_does() -> None:
    fixture = Fed(3)
    assert fixture.consumer.claim()
    fixture.collect()
    assert fixture.consume() == [0, 1, 2]
    for _ in range(20):
        fixture.runtime.advance(DAY_S / 2)
        fixture.collect()
    assert fixture.index().readers == ("other",)
    fixture.append(1)
    for _ in range(16):
        fixture.runtime.advance(DAY_S / 2)
        fixture.collect()
    assert fixture.index().readers == ()
    assert fixture.index().v1 == {"other": "other"}


def test_the_collector_of_a_v1_consumer_deletes_nothing_of_the_log() -> None:
    fixture = Fed(30)
    fixture.feed()
    assert fixture.consumer.claim()
    fixture.consume(20)
    assert fixture.consumer.collect() == []
    assert all(fixture.store.get(location) for location in fixture.locations)


# ---- what stops feeding


def test_another_producer_of_the_queue_stops_feeding() -> None:
    fixture = Fed(5)
    fixture.feed()
    foreign = fixture.queue_now().append([NewEntry("other/x.batch")])
    fixture.store.put(QUEUE, foreign.raw)
    assert "another producer writes to it: it ends at 6" in fixture.feed(check=True)
    fixture.append(3)
    fault = fixture.feed()
    assert "its sequence 5 is 'other/x.batch'" in fault
    assert "'other/manifest' of reader 'other'" in fault
    assert fixture.queue_now() == foreign
    fixture.collect()
    assert fixture.index().floor == 0


def test_a_queue_that_is_gone_is_not_created_again() -> None:
    fixture = Fed(5)
    fixture.feed()
    fixture.store.delete_many([QUEUE])
    assert "it is gone" in fixture.feed(check=True)
    assert "it is gone" in fixture.feed(fixture.new_feeders())
    # A v1 consumer creates it again, with sequence 0.
    assert fixture.consumer.claim()
    for feeders in (fixture.feeders, fixture.new_feeders()):
        assert "it ended at 5 with epoch 0, and now at 0" in fixture.feed(feeders, check=True)
    assert fixture.queue_now().entry_count == 0
    fixture.collect()
    assert fixture.index().floor == 0


def test_a_queue_that_was_restored_from_an_old_copy_is_not_fed() -> None:
    fixture = Fed(5)
    fixture.feed()
    copy = fixture.store.get(QUEUE).data
    fixture.append(5)
    fixture.feed()
    fixture.store.put(QUEUE, copy)
    for feeders in (fixture.feeders, fixture.new_feeders()):
        assert "restored from an old copy" in fixture.feed(feeders, check=True)
    assert fixture.store.get(QUEUE).data == copy


def test_a_gap_of_the_log_stops_feeding() -> None:
    fixture = Fed(10)
    assert fixture.feed() == ""
    fixture.append(3)
    taken = fixture.manifest().drop_through(11)  # A v1 consumer of the log itself.
    fixture.store.put(KEY, taken.raw)
    fixture.append(20)
    assert "sequence" in fixture.feed()
    assert "gone from the log" in fixture.feed()
    assert fixture.queue_now().next_sequence == 10
    assert fixture.consumer.claim()
    assert fixture.consume() == [*range(10)]
    assert "gone from the log" in fixture.feed(check=True)
    assert fixture.position().next == 10, "the operator sees where to add it again"


def test_a_damaged_queue_stops_only_its_own_reader() -> None:
    fixture = Fed(5)
    add_v1_reader(fixture.store, fixture.view, "b", "b", lambda view: view.first_sequence)
    fixture.feeders.find(fixture.index())
    fixture.store.put(QUEUE, b"rubbish")
    fault = fixture.feed()
    assert "it is damaged" in fault
    assert "fsck" not in fault, "a repair of the queue is refused: the reader must be deleted"
    assert Manifest.parse(fixture.store.get("b/manifest").data).next_sequence == 5


# ---- deleting


def test_a_deleted_consumer_gets_nothing_more_also_from_feeders_with_an_old_memory() -> None:
    fixture = Fed(30)
    fixture.feed()
    old = fixture.new_feeders()
    fixture.feed(old)
    assert fixture.consumer.claim()
    fixture.consume(5)
    unregister(fixture.store, Log(fixture.store, fixture.config, fixture.runtime), "other")
    assert (fixture.index().readers, fixture.index().v1) == ((), {})
    assert fixture.consumer.next_entries() == []
    fixture.append(5)
    assert "it is closed" in fixture.feed(old)
    late = V1Consumer(fixture.store, "other")
    assert late.claim()
    assert late.next_entries() == []
    assert "it is closed" in fixture.feed(old, check=True)
    assert not fixture.store.list("ingest/_readers/").objects


# ---- other programs


def test_only_v1_consumers_may_use_the_prefix_and_the_name() -> None:
    fixture = Fed(5)
    fixture.feed()
    for open_queue in (
        lambda: Producer(
            ProducerConfig(store=URL, data_path_prefix="other", broker="off"),
            store=fixture.store,
            runtime=fixture.runtime,
        ),
        lambda: Consumer(
            ConsumerConfig(store=URL, data_path_prefix="other"),
            store=fixture.store,
            runtime=fixture.runtime,
        ),
        lambda: GarbageCollector(
            fixture.store,
            ConsumerConfig(store=URL, data_path_prefix="other"),
            runtime=fixture.runtime,
        ).run_once(),
    ):
        with pytest.raises(InvalidInput, match="queue of reader 'other' of the log"):
            open_queue()
    with pytest.raises(InvalidInput, match="belongs to the queue with manifest 'ingest/manifest'"):
        Consumer(
            ConsumerConfig(store=URL, manifest_path=QUEUE),
            store=fixture.store,
            runtime=fixture.runtime,
        )
    with pytest.raises(InvalidInput, match="is a v1 consumer"):
        fixture.reader("other")
    assert read(fixture.reader("python")) == [*range(5)]


def test_an_earlier_release_refuses_the_prefix() -> None:
    """Version 2 of the owner marker: an earlier release would take the queue for its own."""
    marker = Fed().store.get("other/_owner.json").data
    assert b'"version": 2' in marker
    assert b'"reader": "other"' in marker


def test_a_feeder_looks_without_writing() -> None:
    fixture = Fed(5)
    feeder = Feeder(Log(fixture.store, fixture.config, fixture.runtime), "other", "other")
    fixture.store.requests.clear()
    feeder.look(fixture.manifest())
    assert feeder.fault == ""
    assert not [key for kind, key in fixture.store.requests if kind == "put_if"]
