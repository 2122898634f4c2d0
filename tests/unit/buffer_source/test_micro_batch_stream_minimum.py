"""``minOffsetsPerTrigger`` and ``maxTriggerDelay``: micro-batches that wait for more records."""

from __future__ import annotations

import pytest

from buffer_source import micro_batch_stream
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.partitions import SourceOffset
from opendata_buffer.consumer.pace import FIRST_PAUSE_S
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.source_queue import (
    SourceQueue,
    SourceTopic,
    batches_of,
    committed_before,
    report_of,
)


@pytest.fixture
def queue(runtime: ManualRuntime) -> SourceQueue:
    return SourceQueue(runtime)


def started(
    queue: SourceQueue, minimum: int = 10, **options: str
) -> tuple[MicroBatchStream, SourceOffset]:
    """Start a query and run its first micro-batch, which does not wait."""
    driver = queue.run(minOffsetsPerTrigger=str(minimum), **options)
    return driver, committed_before(driver, None)


def reads(driver: MicroBatchStream, start: SourceOffset) -> int:
    """Return how many batches the next micro-batch reads; 0 if the query waits."""
    end = committed_before(driver, start)
    return 0 if end is start else len(batches_of(driver, start, end))


def test_a_micro_batch_waits_until_enough_records_have_come(queue: SourceQueue) -> None:
    queue.produce(records=[b"x"] * 3)
    driver, start = started(queue)
    assert len(batches_of(driver, None, start)) == 1
    queue.produce(records=[b"x"] * 4)
    assert reads(driver, start) == 0
    queue.produce(records=[b"x"] * 5)
    assert reads(driver, start) == 0
    assert report_of(driver)["backlogBatches"] == 2, "batches that wait are a backlog"
    queue.produce(records=[b"x"])
    assert reads(driver, start) == 3


def test_a_micro_batch_does_not_wait_longer_than_the_delay(queue: SourceQueue) -> None:
    queue.produce()
    driver, start = started(queue, maxTriggerDelay="30s")
    queue.produce()
    queue.runtime.advance(29)
    assert reads(driver, start) == 0
    queue.runtime.advance(1)
    end = committed_before(driver, start)
    assert len(batches_of(driver, start, end)) == 1
    queue.produce()
    assert reads(driver, end) == 0, "the delay counts from the last micro-batch"


def test_the_delay_is_15_minutes_by_default(queue: SourceQueue) -> None:
    queue.produce()
    driver, start = started(queue)
    queue.produce()
    queue.runtime.advance(15 * 60 - 1)
    assert reads(driver, start) == 0
    queue.runtime.advance(1)
    assert reads(driver, start) == 1


def test_an_idle_query_reads_nothing_when_the_delay_is_over(queue: SourceQueue) -> None:
    queue.produce()
    driver, start = started(queue, maxTriggerDelay="30s")
    queue.runtime.advance(60)
    assert reads(driver, start) == 0
    queue.produce()
    assert reads(driver, start) == 1


def test_the_first_micro_batch_after_a_restart_does_not_wait(queue: SourceQueue) -> None:
    queue.produce()
    _, start = started(queue)
    queue.produce()
    assert reads(queue.run(minOffsetsPerTrigger="10"), start) == 1


def test_a_run_with_available_now_or_without_limits_does_not_wait(queue: SourceQueue) -> None:
    queue.produce(2)
    driver = queue.run(minOffsetsPerTrigger="10", maxBatchesPerTrigger="1")
    driver.prepare_available_now()
    found, start = 0, None
    while (end := committed_before(driver, start)) != start:
        found += len(batches_of(driver, start, end))
        start = end
    assert found == 2
    queue.produce()
    driver, start = started(queue)
    queue.produce()
    assert reads(driver, start) == 0
    assert driver.latest_offset(start, unlimited=True) != start


@pytest.mark.parametrize(
    "limit",
    [{"maxBatchesPerTrigger": "2"}, {"maxBytesPerTrigger": "30"}],
)
def test_a_micro_batch_that_another_limit_makes_full_does_not_wait(
    queue: SourceQueue, limit: dict[str, str]
) -> None:
    """Otherwise a query would read one limited micro-batch in each delay, and fall behind."""
    queue.produce()
    driver, start = started(queue, 1_000, **limit)
    queue.produce()
    assert reads(driver, start) == 0
    queue.produce(4)
    assert 0 < reads(driver, start) <= 2


def test_a_query_does_not_wait_for_more_batches_than_it_reads_at_once(
    queue: SourceQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch_stream, "MOST_ENTRIES", 3)
    queue.produce()
    driver, start = started(queue, 1_000)
    queue.produce(2)
    assert reads(driver, start) == 0
    queue.produce(2)
    assert reads(driver, start) == 3


def test_the_records_of_all_partitions_count_together(runtime: ManualRuntime) -> None:
    topic = SourceTopic(runtime, 3)
    first, second, third = topic.topic.description.names
    topic.append(first, b"a")
    driver, start = started(topic, 4)
    topic.append(first, b"b")
    topic.append(second, b"c", b"d")
    assert reads(driver, start) == 0
    topic.append(third, b"e")
    assert reads(driver, start) == 4


def test_a_partition_that_is_added_while_the_query_waits_is_read_with_the_others(
    runtime: ManualRuntime,
) -> None:
    topic = SourceTopic(runtime, 1)
    (first,) = topic.topic.description.names
    topic.append(first, b"a")
    driver, start = started(topic, 3)
    added = topic.topic.expand(2).names[-1]
    topic.append(first, b"b")
    topic.append(added, b"c")
    assert reads(driver, start) == 0
    topic.append(added, b"d")
    assert reads(driver, start) == 3


def test_a_loss_that_is_allowed_does_not_wait(queue: SourceQueue) -> None:
    queue.produce(3)
    _, start = started(queue, failOnDataLoss="false")
    queue.recreate()
    queue.produce()
    end = queue.run(minOffsetsPerTrigger="10", failOnDataLoss="false").latest_offset(start)
    assert end.only.base != start.only.base or end.only.queue != start.only.queue


def test_the_size_of_a_batch_is_looked_up_once(queue: SourceQueue) -> None:
    queue.produce()
    driver, start = started(queue, 1_000)
    queue.produce(20)
    assert reads(driver, start) == 0
    queue.store.gets.clear()
    for _ in range(5):
        assert reads(driver, start) == 0
    footers = [key for key, _ in queue.store.gets if key.endswith(".batch")]
    assert footers == []


def test_records_are_counted_only_up_to_the_minimum(queue: SourceQueue) -> None:
    queue.produce()
    driver, start = started(queue, 5)
    queue.produce(300)
    queue.store.gets.clear()
    end = driver.latest_offset(start)
    assert end != start
    assert len([key for key, _ in queue.store.gets if key.endswith(".batch")]) <= 64


def test_idle_polls_of_a_query_that_waits_are_paced(queue: SourceQueue) -> None:
    queue.produce()
    driver, start = started(queue)
    queue.produce()
    before = queue.runtime.monotonic()
    for _ in range(10):
        assert driver.latest_offset(start) == start
    assert queue.runtime.monotonic() - before > 8 * FIRST_PAUSE_S
