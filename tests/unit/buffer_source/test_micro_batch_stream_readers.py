"""Queries that read a log, with or without a named reader: positions, starts, and limits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from buffer_source import micro_batch_stream, queue_session
from buffer_source.batch_reader import select
from buffer_source.micro_batch_stream import NOTE_READ_S, MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset, view_of, wanted_start
from buffer_source.stream_reader import _with_advice
from opendata_buffer.admin.readers import readers_of
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer import read_only
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.errors import DataLoss, Fenced, InvalidInput
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN
from opendata_buffer.queue import reader_queue
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import reset_reader
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import DRAIN_S, Topic, partition_config
from tests.support.logs import DAY_MS, become_log
from tests.unit.buffer_source.source_log import CONFIG, SourceLog
from tests.unit.buffer_source.source_queue import (
    SourceQueue,
    SourceTopic,
    batches_of,
    committed_before,
    report_of,
    values_of,
)


@pytest.fixture
def source(runtime: ManualRuntime, monkeypatch: pytest.MonkeyPatch) -> SourceLog:
    return SourceLog(runtime, monkeypatch)


def batch(
    driver: MicroBatchStream, start: SourceOffset | None
) -> tuple[SourceOffset | None, list[int]]:
    """Run one micro-batch of a normal query, and return its end and its sequences."""
    end = committed_before(driver, start)
    if end == start:
        return end, []
    return end, [each.sequence for each in batches_of(driver, start, end)]


def everything(driver: MicroBatchStream, start: SourceOffset | None = None) -> list[int]:
    """Return all sequences that a query reads, and commit its last micro-batch."""
    found: list[int] = []
    while True:
        end, read = batch(driver, start)
        if not read:
            if start is not None:
                driver.commit(start)
            return found
        found, start = found + read, end


def test_a_new_reader_of_a_log_with_a_deleted_beginning_gets_no_advice_to_enable_readers(
    source: SourceLog, caplog: pytest.LogCaptureFixture
) -> None:
    source.each(50)
    source.lift_floor(20)
    caplog.clear()
    assert everything(source.run(reader="billing")) == list(range(20, 50))
    assert caplog.messages == []


def test_a_restarted_query_continues_at_its_checkpoint(source: SourceLog) -> None:
    source.each(50)
    first, _ = batch(source.run(reader="billing", maxBatchesPerTrigger="10"), None)
    assert source.at("billing") == 0, (
        "the last batch is acknowledged only after Spark has committed it"
    )
    again = source.run(reader="billing", maxBatchesPerTrigger="10")
    assert [each.sequence for each in batches_of(again, None, first)] == list(range(10))
    restarted = source.run(reader="billing")
    assert everything(restarted, first) == list(range(10, 50))
    assert source.at("billing") == 50


@pytest.mark.parametrize("elsewhere", [0, 45])
def test_the_checkpoint_wins_over_the_position_of_the_reader(
    source: SourceLog, elsewhere: int
) -> None:
    source.each(50)
    end, _ = batch(source.run(reader="billing", maxBatchesPerTrigger="20"), None)
    view = source.view()
    reset_reader(view, "billing", elsewhere)
    assert source.at("billing") == elsewhere
    driver = source.run(reader="billing")
    driver.latest_offset(end)
    assert source.at("billing") == 20
    assert everything(driver, end) == list(range(20, 50))


def test_the_loss_at_a_checkpoint_that_is_no_longer_retained_names_its_sequences(
    source: SourceLog,
) -> None:
    source.each(50)
    end, _ = batch(source.run(reader="billing", maxBatchesPerTrigger="10"), None)
    source.lift_floor(30)
    with pytest.raises(
        DataLoss, match=r"needs sequence 10, and the log continues at 30: 20 batches"
    ):
        source.run(reader="billing").latest_offset(end)
    assert everything(source.run(reader="billing", failOnDataLoss="false"), end) == list(
        range(30, 50)
    )


@pytest.mark.parametrize("given", [{"reader": "billing"}, {"acknowledge": "false"}])
@pytest.mark.parametrize(
    ("start", "begin"), [("0", 0), ("9", 9), ("47", 47), ("latest", 50), ("50", 50)]
)
def test_a_reader_may_start_anywhere_and_deletes_nothing(
    source: SourceLog, given: dict[str, str], start: str, begin: int
) -> None:
    source.each(50)
    driver = source.run(startingOffsets=start, **given)
    end, read = batch(driver, None)
    assert read == list(range(begin, 50))
    source.each(3)
    assert everything(driver, end) == [50, 51, 52]
    assert everything(source.run(reader="other")) == list(range(53))
    if "reader" in given:
        assert source.at("billing") == 53


@pytest.mark.parametrize(
    ("given", "begin"),
    [
        ({}, 50),
        ({"startingOffsets": "earliest"}, 10),
        ({"startingOffsets": "10"}, 10),
        ({"startingOffsets": "30"}, 30),
        ({"startingOffsets": "latest"}, 60),
        ({"startingTimestamp": "0"}, 10),
    ],
)
def test_a_given_start_wins_over_the_position_of_the_reader(
    source: SourceLog, given: dict[str, str], begin: int
) -> None:
    """Only a new query without a start continues where its reader was."""
    source.each(50)
    everything(source.run(reader="billing"))
    source.lift_floor(10)
    source.each(10)
    driver = source.run(reader="billing", **given)
    end, read = batch(driver, None)
    assert read == list(range(begin, 60))
    assert source.at("billing") == begin, "the log keeps what the query has not committed"
    source.each(2)
    assert everything(driver, end) == [60, 61]
    assert source.at("billing") == 62
    restarted = source.run(reader="billing", **given)
    assert batch(restarted, end)[1] == [60, 61], "a query with a checkpoint ignores the start"


def test_a_given_earliest_reads_what_is_left_if_the_collector_is_faster(
    source: SourceLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.each(50)
    everything(source.run(reader="billing"))
    floors = [20, 35]

    def slow(*arguments: Any) -> int:
        begin = wanted_start(*arguments)
        if floors:
            source.lift_floor(floors.pop(0))
        return begin

    monkeypatch.setattr(queue_session, "wanted_start", slow)
    driver = source.run(reader="billing", startingOffsets="earliest")
    end, read = batch(driver, None)
    assert not floors, "the collector was faster twice"
    assert read == list(range(35, 50))
    assert [each.sequence for each in batches_of(source.run(reader="billing"), None, end)] == read


def test_a_given_sequence_that_the_collector_deletes_meanwhile_is_a_loss(
    source: SourceLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.each(50)
    everything(source.run(reader="billing"))

    def slow(*arguments: Any) -> int:
        begin = wanted_start(*arguments)
        source.lift_floor(20)
        return begin

    monkeypatch.setattr(queue_session, "wanted_start", slow)
    driver = source.run(reader="billing", startingOffsets="5")
    with pytest.raises(DataLoss, match="sequence 5"):
        driver.latest_offset(None)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, []),
        ({"startingOffsets": "earliest"}, ["a0", "a1", "a2", "b0", "b1"]),
        ({"startingOffsets": '{"0": 2}'}, ["a2", "b0", "b1"]),
        ({"startingOffsets": '{"0": 3, "1": 1}'}, ["b1"]),
        ({"startingOffsets": "latest"}, []),
        ({"startingTimestamp": "0"}, ["a0", "a1", "a2", "b0", "b1"]),
    ],
)
def test_a_given_start_wins_over_the_positions_of_the_reader_in_a_topic(
    runtime: ManualRuntime, given: dict[str, str], read: list[str]
) -> None:
    source = SourceTopic(runtime, 2)
    first, second = source.topic.description.names
    for name in (first, second):
        become_log(source.store, partition_config(name, CONFIG), runtime)
    source.append(first, b"a0", b"a1", b"a2")
    source.append(second, b"b0", b"b1")
    driver = source.run(reader="billing")
    end = committed_before(driver, None)
    assert len(batches_of(driver, None, end)) == 5
    driver.commit(end)
    again = source.run(reader="billing", **given)
    end = committed_before(again, None)
    assert sorted(value.decode() for value in values_of(again, None, end)) == read


def test_a_replay_of_the_first_micro_batch_after_a_reset_reads_the_same_batches(
    source: SourceLog,
) -> None:
    source.each(50)
    everything(source.run(reader="billing"))
    given = {"reader": "billing", "startingOffsets": "earliest", "maxBatchesPerTrigger": "20"}
    end, read = batch(source.run(**given), None)
    assert read == list(range(20))
    source.each(5)
    again = source.run(**given)
    assert end is not None
    assert [each.sequence for each in batches_of(again, None, end)] == read
    assert everything(again, end) == list(range(20, 55))


def test_an_earlier_run_cannot_move_the_reader_after_a_reset(source: SourceLog) -> None:
    source.each(50)
    old = source.run(reader="billing", maxBatchesPerTrigger="30")
    end, _ = batch(old, None)
    assert end is not None
    new = source.run(reader="billing", startingOffsets="earliest")
    batch(new, None)
    assert source.at("billing") == 0
    with pytest.raises(Fenced):
        old.commit(end)
    assert source.at("billing") == 0


def test_a_reader_may_start_at_a_time(source: SourceLog) -> None:
    source.each(25)
    source.runtime.advance(60)
    noon = source.runtime.now_ms()
    source.each(25)
    source.runtime.advance(60)
    for name, since_ms, begin in (
        ("before", noon - 30_000, 25),
        ("at", noon, 25),
        ("first", 0, 0),
        ("late", noon + 60_001, 50),
    ):
        driver = source.run(reader=name, startingTimestamp=str(since_ms))
        assert batch(driver, None)[1] == list(range(begin, 50))
        assert source.at(name) == begin, (
            "the reader retains only the batches that the query still reads"
        )


def test_a_start_that_is_not_retained_is_refused_before_the_reader_is_registered(
    source: SourceLog,
) -> None:
    source.each(50)
    source.lift_floor(30)
    with pytest.raises(DataLoss, match=r"sequence 29 is needed .* starts at 30"):
        source.run(reader="billing", startingOffsets="29").latest_offset(None)
    with pytest.raises(InvalidInput, match=r"use a sequence up to 50"):
        source.run(reader="billing", startingOffsets="51").latest_offset(None)
    assert source.index().readers == ()


def test_a_replay_reads_only_its_own_batches(
    source: SourceLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_queue, "REMEMBERED", 8)  # with which later batches are compared
    source.each(200)
    end, read = batch(source.run(reader="billing", startingOffsets="190"), None)
    assert read == list(range(190, 200))
    assert end is not None
    source.store.gets.clear()
    again = batches_of(source.run(reader="billing", startingOffsets="190"), None, end)
    assert [each.sequence for each in again] == read
    segments = [key for key, _ in source.store.gets if key.endswith(".segment")]
    assert len({*segments}) <= 4 < len(source.index().parts())


def test_a_micro_batch_without_a_limit_reads_only_a_part_of_a_long_log(
    source: SourceLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch_stream, "MOST_ENTRIES", 20)
    source.each(90)
    driver = source.run(reader="billing")
    driver.prepare_available_now()
    source.each(5)
    source.store.gets.clear()
    end, read = batch(driver, None)
    assert read == list(range(20))
    segments = {key for key, _ in source.store.gets if key.endswith(".segment")}
    assert len(segments) < len(source.index().parts())
    assert report_of(driver)["backlogBatches"] == 75
    assert everything(driver, end) == list(range(20, 90)), (
        "it stops at the end of the queue at its start"
    )


def test_a_query_with_a_reader_creates_a_missing_queue_as_a_log(
    runtime: ManualRuntime,
) -> None:
    queue = SourceQueue(runtime)
    driver = queue.run(reader="billing", createIfMissing="true")
    end, read = batch(driver, None)
    assert read == []
    queue.produce(2)
    end, read = batch(driver, end)
    assert read == [0, 1]
    index = Log(queue.store, CONFIG, runtime).need(marked=True)
    assert (index.readers, index.floor) == (("billing",), 0)
    _, read = batch(queue.run(reader="search", createIfMissing="true"), None)
    assert read == [0, 1]
    with pytest.raises(InvalidInput, match="is a log with named readers"):
        queue.run().latest_offset(None)


def test_a_query_with_a_reader_does_not_turn_an_existing_queue_into_a_log(
    runtime: ManualRuntime,
) -> None:
    """Its consumer would be fenced, and could not start again."""
    queue = SourceQueue(runtime)
    queue.produce(2)
    with pytest.raises(InvalidInput, match="is not a log, and has no named readers"):
        queue.run(reader="billing", createIfMissing="true").latest_offset(None)
    assert batch(queue.run(), None)[1] == [0, 1]


def test_a_query_with_a_reader_does_not_turn_unwritten_partitions_into_logs(
    runtime: ManualRuntime,
) -> None:
    source = SourceTopic(runtime, 2)
    with pytest.raises(InvalidInput, match="is not a log, and has no named readers"):
        source.run(reader="billing", createIfMissing="true").latest_offset(None)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_idle_query_does_not_appear_to_be_behind(source: SourceLog, micro_batches: int) -> None:
    """It cannot acknowledge one of its first two micro-batches before more data comes."""
    source.each(5 * micro_batches)
    driver = source.run(reader="billing", maxBatchesPerTrigger="5")
    end = None
    for _ in range(micro_batches):
        end, read = batch(driver, end)
        assert len(read) == 5
    (waiting,) = readers_of(source.target, source.view())
    assert (waiting.lag, waiting.next_sequence) == (5, 5 * micro_batches - 5)
    for _ in range(3):
        assert driver.latest_offset(end) == end
        source.runtime.advance(NOTE_READ_S)
    writes = source.store.puts
    for _ in range(10):
        assert driver.latest_offset(end) == end
    assert source.store.puts == writes, "it is noted once"
    (idle,) = readers_of(source.target, source.view())
    assert (idle.lag, idle.oldest_unread_seconds) == (0, None)
    assert idle.next_sequence == 5 * micro_batches - 5, "nothing is acknowledged"
    source.each(2)
    (behind,) = readers_of(source.target, source.view())
    assert behind.lag == 2
    again = source.run(reader="billing")
    assert [each.sequence for each in batches_of(again, None, end)][-1:] == [5 * micro_batches - 1]
    (restarted,) = readers_of(source.target, source.view())
    assert restarted.lag >= 7, "a query that starts has read nothing yet"


def test_a_busy_query_does_not_note_how_far_it_has_read(source: SourceLog) -> None:
    source.each(20)
    driver = source.run(reader="billing", maxBatchesPerTrigger="1")
    end = None
    for _ in range(20):
        end, read = batch(driver, end)
        assert len(read) == 1
        source.runtime.advance(NOTE_READ_S)
    assert source.position("billing").read == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reader": "a/b"}, "reader is 'a/b': use 1 to 100 letters"),
        ({"reader": "a", "acknowledge": "false"}, "keeps its position by acknowledging"),
    ],
)
def test_an_invalid_reader_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SourceOptions.from_spark({"path": "/queue", **given}).check_stream()


# Batch reads


def selected(source: SourceLog, **given: str) -> list[int]:
    """Return the sequences that a batch read of the log selects."""
    options = SourceOptions.from_spark({"path": "/queue", **given})
    options.check_batch()
    view = view_of(options, source.store, source.runtime)
    assert view is not None
    repeats = Repeats(source.store, CONFIG, source.runtime, "")
    return [each.sequence for each in select(view, options, repeats)]


def test_a_batch_read_has_all_retained_batches_including_acknowledged_ones(
    source: SourceLog,
) -> None:
    source.each(50)
    assert len(everything(source.run(reader="billing"))) == 50
    source.lift_floor(5)
    assert selected(source) == list(range(5, 50))
    assert selected(source, startingOffsets="20", endingOffsets="48") == list(range(20, 48))
    with pytest.raises(DataLoss, match=r"sequence 4 is needed .* starts at 5"):
        selected(source, startingOffsets="4")


def test_batch_reads_of_adjacent_time_ranges_have_each_batch_once(source: SourceLog) -> None:
    times = []
    for _ in range(4):
        times.append(source.runtime.now_ms())
        source.each(15)
        source.runtime.advance(60)
    bounds = [*times, times[-1] + 120_000]
    found = [
        selected(source, startingTimestamp=str(since), endingTimestamp=str(until))
        for since, until in itertools.pairwise(bounds)
    ]
    assert found == [list(range(at, at + 15)) for at in (0, 15, 30, 45)]
    assert selected(source, startingOffsets="3", endingTimestamp=str(times[1])) == list(
        range(3, 15)
    )


def test_a_time_range_of_a_log_does_not_read_all_of_it(
    source: SourceLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_only, "MOST_NOTED", 8)
    source.each(100)
    source.runtime.advance(60)
    since = source.runtime.now_ms()
    source.each(10)
    source.runtime.advance(60)
    until = source.runtime.now_ms()
    source.each(100)
    source.store.gets.clear()
    found = selected(source, startingTimestamp=str(since), endingTimestamp=str(until))
    assert found == list(range(100, 110))
    segments = {key for key, _ in source.store.gets if key.endswith(".segment")}
    assert len(segments) <= 4 < len(source.index().parts())


def test_a_transaction_that_is_committed_after_the_range_is_included(source: SourceLog) -> None:
    source.each(20)
    for clock in (2, 3):
        source.message(clock, CONTINUE_TXN)
    source.each(40)
    assert selected(source, startingOffsets="20", endingOffsets="24") == [22, 23], (
        "the transaction is undecided"
    )
    source.message(4, ACK_TXN)
    source.each(20)
    assert selected(source, startingOffsets="20", endingOffsets="24") == [22, 23, 20, 21]
    assert selected(source, startingOffsets="21", endingOffsets="22") == [21]


def test_a_range_of_times_that_ends_before_it_starts_is_refused() -> None:
    given = {"path": "/queue", "startingTimestamp": "2", "endingTimestamp": "1"}
    with pytest.raises(InvalidInput, match="startingTimestamp is 2 ms, later than endingTimest"):
        SourceOptions.from_spark(given).check_batch()
    with pytest.raises(InvalidInput, match="a stream has no end"):
        SourceOptions.from_spark({"path": "/queue", "endingTimestamp": "1"}).check_stream()


# Topics


def test_f47_a_query_that_was_down_during_an_expansion_misses_nothing(
    runtime: ManualRuntime,
) -> None:
    source = SourceTopic(runtime, 2)
    names = source.topic.description.names
    for name in names:
        become_log(source.store, partition_config(name, CONFIG), runtime)
        source.append(name, b"old")

    def read_all(reader: str, start: SourceOffset | None) -> tuple[SourceOffset, list[bytes]]:
        driver = source.run(reader=reader)
        end = committed_before(driver, start)
        values = values_of(driver, start, end)
        driver.commit(end)
        driver.stop()
        return end, values

    saved, values = read_all("billing", None)
    assert values == [b"old", b"old"]
    search, _ = read_all("search", None)
    new = [name for name in source.topic.expand(3).names if name not in names]
    source.append(new[0], b"new")
    _, values = read_all("search", search)
    assert values == [b"new"]
    runtime.advance(10)
    GarbageCollector(
        source.store, partition_config(new[0], ConsumerConfig(store="/queue")), runtime=runtime
    ).run_once()
    _, values = read_all("billing", saved)
    assert values == [b"new"]
    topic = Topic.open(CONFIG, store=source.store, runtime=runtime)
    assert list(topic.description.readers or ()) == ["billing", "search"]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_f53_a_query_gets_an_error_about_losses_of_its_reader_in_a_removed_partition(
    runtime: ManualRuntime, has_checkpoint: bool
) -> None:
    """A new checkpoint does not name the partition at all."""
    source = SourceTopic(runtime, 2)
    left, other = source.topic.description.names
    for name in (left, other):
        become_log(source.store, partition_config(name, CONFIG), runtime)

    def start(reader: str, **options: str) -> tuple[MicroBatchStream, SourceOffset | None]:
        return source.run(reader=reader, **options), saved.get(reader)

    saved = dict[str, SourceOffset]()
    for reader in ("billing", "search"):
        driver, _ = start(reader)
        saved[reader] = committed_before(driver, None)
        driver.stop()
    source.append(left, b"1", b"2")
    runtime.advance(2 * DAY_MS / 1000)
    source.topic.drain(left)
    runtime.advance(2 * DRAIN_S)
    driver, position = start("search")
    for _ in range(3):
        position = committed_before(driver, position)
        for name in (left, other):
            config = partition_config(name, ConsumerConfig(store="/queue"))
            GarbageCollector(source.store, config, runtime=runtime).run_once()
    topic = Topic.open(CONFIG, store=source.store, runtime=runtime)
    assert topic.description.names == [other], "the partition has left"
    if not has_checkpoint:
        del saved["billing"]
    driver, position = start("billing")
    with pytest.raises(DataLoss, match=r"(needs sequence 0.* continues at|starts at) 2: 2 batches"):
        committed_before(driver, position)
    driver.stop()
    driver, position = start("billing", failOnDataLoss="false")
    source.append(other, b"3")
    end = committed_before(driver, position)
    assert values_of(driver, position, end) == [b"3"]
    for value in (b"4", b"5"):
        source.append(other, value)
        end = committed_before(driver, end)
    assert topic.read().unread == {}
    assert [*end.partitions] == [other]


def test_a_query_registers_its_reader_on_the_topic_once(runtime: ManualRuntime) -> None:
    source = SourceTopic(runtime, 2)
    for name in source.topic.description.names:
        become_log(source.store, partition_config(name, CONFIG), runtime)
    for _ in range(2):
        driver = source.run(reader="billing")
        start = None
        for value in (b"a", b"b"):
            source.append(source.topic.description.names[0], value)
            runtime.advance(1)
            start = committed_before(driver, start)
        driver.stop()
        times = source.topic.read().readers
        assert times is not None
        runtime.advance(60)
    assert times["billing"] < runtime.now_ms() - 60_000, "the second run did not write it"


def test_batches_that_a_v1_consumer_dequeued_from_a_log_are_not_a_backlog(
    source: SourceLog,
) -> None:
    source.each(50)
    driver = source.run(reader="billing", maxBatchesPerTrigger="10", failOnDataLoss="false")
    batch(driver, None)
    assert report_of(driver)["backlogBatches"] == 40
    config = QueueConfig(store="/queue")
    thief = Queue(source.store, config, runtime=source.runtime, role="consumer")
    first = source.moved()
    epoch = thief.claim_epoch(None).epoch
    thief.dequeue(first + 3, epoch)
    restarted = source.run(reader="billing", maxBatchesPerTrigger="10", failOnDataLoss="false")
    batch(restarted, None)
    assert source.view().lost == ((first, first + 4),)
    assert report_of(restarted)["backlogBatches"] == 36


def test_the_error_of_a_query_whose_reader_lost_batches_names_options_of_spark(
    source: SourceLog,
) -> None:
    source.each(50)
    driver = source.run(reader="billing", maxBatchesPerTrigger="10")
    start, _ = batch(driver, None)
    driver.stop()
    source.lift_floor(30)
    with pytest.raises(DataLoss) as caught:
        source.run(reader="billing").latest_offset(start)
    with pytest.raises(DataLoss) as shown, _with_advice():
        raise caught.value
    assert "readers reset" not in str(shown.value)
    assert "set the option failOnDataLoss to false" in str(shown.value)
    assert "new checkpointLocation" in str(shown.value)
    allowed = source.run(reader="billing", failOnDataLoss="false")
    assert everything(allowed, start) == list(range(30, 50))
