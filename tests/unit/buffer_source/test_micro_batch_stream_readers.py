"""Queries that read a log by name, or look at one: positions, starts, and how much is read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from buffer_source import batch_reader, micro_batch_stream
from buffer_source.batch_reader import select
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset, view_of
from buffer_source.stream_reader import _with_advice
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN
from opendata_buffer.queue import reader_queue
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import reset_reader
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from tests.support.logs import become_log
from tests.unit.buffer_source.source_log import CONFIG, LogWorld
from tests.unit.buffer_source.source_queue import (
    TopicWorld,
    batches_of,
    committed_before,
    report_of,
    values_of,
)


@pytest.fixture
def world(runtime: ManualRuntime, monkeypatch: pytest.MonkeyPatch) -> LogWorld:
    return LogWorld(runtime, monkeypatch)


def batch(
    driver: MicroBatchStream, start: SourceOffset | None
) -> tuple[SourceOffset | None, list[int]]:
    """One micro-batch of a normal query: its end, and the sequences that it reads."""
    end = committed_before(driver, start)
    if end == start:
        return end, []
    return end, [each.sequence for each in batches_of(driver, start, end)]


def everything(driver: MicroBatchStream, start: SourceOffset | None = None) -> list[int]:
    """What a query reads until nothing waits; its last micro-batch is committed."""
    found: list[int] = []
    while True:
        end, read = batch(driver, start)
        if not read:
            if start is not None:
                driver.commit(start)
            return found
        found, start = found + read, end


def test_a_new_reader_of_a_log_whose_beginning_is_gone_is_not_told_to_make_a_log(
    world: LogWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.each(50)
    world.lift_floor(20)
    caplog.clear()
    assert everything(world.run(reader="billing")) == list(range(20, 50))
    assert caplog.messages == []


def test_a_restarted_query_goes_on_where_its_checkpoint_is(world: LogWorld) -> None:
    world.each(50)
    first, _ = batch(world.run(reader="billing", maxBatchesPerTrigger="10"), None)
    assert world.at("billing") == 0, "not acknowledged before Spark has committed it"
    again = world.run(reader="billing", maxBatchesPerTrigger="10")
    assert [each.sequence for each in batches_of(again, None, first)] == list(range(10))
    restarted = world.run(reader="billing")
    assert everything(restarted, first) == list(range(10, 50))
    assert world.at("billing") == 50


@pytest.mark.parametrize("elsewhere", [0, 45])
def test_the_checkpoint_counts_and_not_the_readers_position(
    world: LogWorld, elsewhere: int
) -> None:
    world.each(50)
    end, _ = batch(world.run(reader="billing", maxBatchesPerTrigger="20"), None)
    view = world.view()
    reset_reader(view, "billing", elsewhere)
    assert world.at("billing") == elsewhere
    driver = world.run(reader="billing")
    driver.latest_offset(end)
    assert world.at("billing") == 20
    assert everything(driver, end) == list(range(20, 50))


def test_a_checkpoint_that_is_not_kept_any_more_is_a_loss_with_its_numbers(world: LogWorld) -> None:
    world.each(50)
    end, _ = batch(world.run(reader="billing", maxBatchesPerTrigger="10"), None)
    world.lift_floor(30)
    with pytest.raises(
        DataLoss, match=r"needs sequence 10, and the log continues at 30: 20 batches"
    ):
        world.run(reader="billing").latest_offset(end)
    assert everything(world.run(reader="billing", failOnDataLoss="false"), end) == list(
        range(30, 50)
    )


@pytest.mark.parametrize("given", [{"reader": "billing"}, {"acknowledge": "false"}])
@pytest.mark.parametrize(
    ("start", "begin"), [("0", 0), ("9", 9), ("47", 47), ("latest", 50), ("50", 50)]
)
def test_a_reader_may_start_anywhere_and_deletes_nothing(
    world: LogWorld, given: dict[str, str], start: str, begin: int
) -> None:
    world.each(50)
    driver = world.run(startingOffsets=start, **given)
    end, read = batch(driver, None)
    assert read == list(range(begin, 50))
    world.each(3)
    assert everything(driver, end) == [50, 51, 52]
    assert everything(world.run(reader="other")) == list(range(53))
    if "reader" in given:
        assert world.at("billing") == 53


def test_a_reader_may_start_at_a_time(world: LogWorld) -> None:
    world.each(25)
    world.runtime.advance(60)
    noon = world.runtime.now_ms()
    world.each(25)
    world.runtime.advance(60)
    for name, since_ms, begin in (
        ("before", noon - 30_000, 25),
        ("at", noon, 25),
        ("first", 0, 0),
        ("late", noon + 60_001, 50),
    ):
        driver = world.run(reader=name, startingTimestamp=str(since_ms))
        assert batch(driver, None)[1] == list(range(begin, 50))
        assert world.at(name) == begin, "it holds what the query reads, and no more"


def test_a_start_that_is_not_kept_is_refused_before_anything_is_claimed(world: LogWorld) -> None:
    world.each(50)
    world.lift_floor(30)
    with pytest.raises(DataLoss, match=r"sequence 29 is needed .* starts at 30"):
        world.run(reader="billing", startingOffsets="29").latest_offset(None)
    with pytest.raises(InvalidInput, match=r"use a sequence up to 50"):
        world.run(reader="billing", startingOffsets="51").latest_offset(None)
    assert world.index().readers == ()


def test_a_replay_reads_its_own_batches_and_not_those_before_them(
    world: LogWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_queue, "REMEMBERED", 8)  # that it compares later ones with
    world.each(200)
    end, read = batch(world.run(reader="billing", startingOffsets="190"), None)
    assert read == list(range(190, 200))
    assert end is not None
    world.store.gets.clear()
    again = batches_of(world.run(reader="billing", startingOffsets="190"), None, end)
    assert [each.sequence for each in again] == read
    segments = [key for key, _ in world.store.gets if key.endswith(".segment")]
    assert len({*segments}) <= 4 < len(world.index().parts())


def test_a_micro_batch_without_a_limit_reads_a_part_of_a_long_log(
    world: LogWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch_stream, "MOST_ENTRIES", 20)
    world.each(90)
    driver = world.run(reader="billing")
    driver.prepare_available_now()
    world.each(5)
    world.store.gets.clear()
    end, read = batch(driver, None)
    assert read == list(range(20))
    segments = {key for key, _ in world.store.gets if key.endswith(".segment")}
    assert len(segments) < len(world.index().parts())
    assert report_of(driver)["backlogBatches"] == 75
    assert everything(driver, end) == list(range(20, 90)), "to the end that was there at its start"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reader": "a/b"}, "reader is 'a/b': use 1 to 100 letters"),
        ({"reader": "a", "acknowledge": "false"}, "keeps its position by acknowledging"),
    ],
)
def test_a_reader_that_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SourceOptions.from_spark({"path": "/world", **given}).check_stream()


# Batch reads


def selected(world: LogWorld, **given: str) -> list[int]:
    """What a batch read of the log wants."""
    options = SourceOptions.from_spark({"path": "/world", **given})
    options.check_batch()
    view = view_of(options, world.store, world.runtime)
    assert view is not None
    repeats = Repeats(world.store, CONFIG, world.runtime, "")
    return [each.sequence for each in select(view, options, repeats)]


def test_a_batch_read_has_all_that_is_kept_also_what_readers_have_acknowledged(
    world: LogWorld,
) -> None:
    world.each(50)
    assert len(everything(world.run(reader="billing"))) == 50
    world.lift_floor(5)
    assert selected(world) == list(range(5, 50))
    assert selected(world, startingOffsets="20", endingOffsets="48") == list(range(20, 48))
    with pytest.raises(DataLoss, match=r"sequence 4 is needed .* starts at 5"):
        selected(world, startingOffsets="4")


def test_batch_reads_of_times_in_a_row_have_each_batch_once(world: LogWorld) -> None:
    times = []
    for _ in range(4):
        times.append(world.runtime.now_ms())
        world.each(15)
        world.runtime.advance(60)
    bounds = [*times, times[-1] + 120_000]
    found = [
        selected(world, startingTimestamp=str(since), endingTimestamp=str(until))
        for since, until in itertools.pairwise(bounds)
    ]
    assert found == [list(range(at, at + 15)) for at in (0, 15, 30, 45)]
    assert selected(world, startingOffsets="3", endingTimestamp=str(times[1])) == list(range(3, 15))


def test_a_time_range_of_a_log_does_not_read_all_of_it(
    world: LogWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_reader, "MOST_NOTED", 8)
    world.each(100)
    world.runtime.advance(60)
    since = world.runtime.now_ms()
    world.each(10)
    world.runtime.advance(60)
    until = world.runtime.now_ms()
    world.each(100)
    world.store.gets.clear()
    found = selected(world, startingTimestamp=str(since), endingTimestamp=str(until))
    assert found == list(range(100, 110))
    segments = {key for key, _ in world.store.gets if key.endswith(".segment")}
    assert len(segments) <= 4 < len(world.index().parts())


def test_a_transaction_that_is_committed_behind_the_range_is_in_it(world: LogWorld) -> None:
    world.each(20)
    for clock in (2, 3):
        world.message(clock, CONTINUE_TXN)
    world.each(40)
    assert selected(world, startingOffsets="20", endingOffsets="24") == [22, 23], "undecided"
    world.message(4, ACK_TXN)
    world.each(20)
    assert selected(world, startingOffsets="20", endingOffsets="24") == [22, 23, 20, 21]
    assert selected(world, startingOffsets="21", endingOffsets="22") == [21]


def test_a_range_of_times_that_ends_before_it_starts_is_refused() -> None:
    given = {"path": "/world", "startingTimestamp": "2", "endingTimestamp": "1"}
    with pytest.raises(InvalidInput, match="startingTimestamp is 2 ms, later than endingTimest"):
        SourceOptions.from_spark(given).check_batch()
    with pytest.raises(InvalidInput, match="a stream has no end"):
        SourceOptions.from_spark({"path": "/world", "endingTimestamp": "1"}).check_stream()


# Topics


def test_f47_a_query_that_was_down_during_an_expansion_misses_nothing(
    runtime: ManualRuntime,
) -> None:
    world = TopicWorld(runtime, 2)
    names = world.topic.description.names
    for name in names:
        become_log(world.store, Topic.config_of(name, CONFIG), runtime)
        world.append(name, b"old")

    def read_all(reader: str, start: SourceOffset | None) -> tuple[SourceOffset, list[bytes]]:
        driver = world.run(reader=reader)
        end = committed_before(driver, start)
        values = values_of(driver, start, end)
        driver.commit(end)
        driver.stop()
        return end, values

    saved, values = read_all("billing", None)
    assert values == [b"old", b"old"]
    search, _ = read_all("search", None)
    new = [name for name in world.topic.expand(3).names if name not in names]
    world.append(new[0], b"new")
    _, values = read_all("search", search)
    assert values == [b"new"]
    runtime.advance(10)
    GarbageCollector(
        world.store, Topic.config_of(new[0], ConsumerConfig(store="/world")), runtime=runtime
    ).run_once()
    _, values = read_all("billing", saved)
    assert values == [b"new"]
    topic = Topic.open(CONFIG, store=world.store, runtime=runtime)
    assert list(topic.description.readers or ()) == ["billing", "search"]


def test_a_query_registers_its_reader_on_the_topic_once(runtime: ManualRuntime) -> None:
    world = TopicWorld(runtime, 2)
    for name in world.topic.description.names:
        become_log(world.store, Topic.config_of(name, CONFIG), runtime)
    for _ in range(2):
        driver = world.run(reader="billing")
        start = None
        for value in (b"a", b"b"):
            world.append(world.topic.description.names[0], value)
            runtime.advance(1)
            start = committed_before(driver, start)
        driver.stop()
        times = world.topic.read().readers
        assert times is not None
        runtime.advance(60)
    assert times["billing"] < runtime.now_ms() - 60_000, "the second run did not write it"


def test_batches_that_a_foreign_consumer_took_from_a_log_are_not_a_backlog(world: LogWorld) -> None:
    world.each(50)
    driver = world.run(reader="billing", maxBatchesPerTrigger="10", failOnDataLoss="false")
    batch(driver, None)
    assert report_of(driver)["backlogBatches"] == 40
    config = QueueConfig(store="/world")
    thief = Queue(world.store, config, runtime=world.runtime, role="consumer")
    first = world.moved()
    epoch = thief.claim_epoch(None).epoch
    thief.dequeue(first + 3, epoch)
    restarted = world.run(reader="billing", maxBatchesPerTrigger="10", failOnDataLoss="false")
    batch(restarted, None)
    assert world.view().lost == ((first, first + 4),)
    assert report_of(restarted)["backlogBatches"] == 36


def test_a_query_whose_reader_lost_batches_is_told_what_helps_a_query(world: LogWorld) -> None:
    world.each(50)
    driver = world.run(reader="billing", maxBatchesPerTrigger="10")
    start, _ = batch(driver, None)
    driver.stop()
    world.lift_floor(30)
    with pytest.raises(DataLoss) as caught:
        world.run(reader="billing").latest_offset(start)
    with pytest.raises(DataLoss) as shown, _with_advice():
        raise caught.value
    assert "readers reset" not in str(shown.value)
    assert "set the option failOnDataLoss to false" in str(shown.value)
    assert "new checkpointLocation" in str(shown.value)
    allowed = world.run(reader="billing", failOnDataLoss="false")
    assert everything(allowed, start) == list(range(30, 50))
