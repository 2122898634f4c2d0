"""Where a consumer of a topic begins."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.queue.log import Log
from tests.unit.topic.in_memory import NAMES
from tests.unit.topic.test_consumer import TopicFixture
from tests.unit.topic.test_consumer import drained as drained_records
from tests.unit.topic.test_consumer_readers import LogTopic, drained, small_segments

__all__ = ["small_segments"]


@pytest.fixture
def logs(small_segments: None) -> LogTopic:
    fixture = LogTopic()
    fixture.append(0, *range(0, 40, 2))
    fixture.append(1, *range(1, 40, 2))
    return fixture


def test_a_topic_of_queues_is_not_started_past_unread_batches_in_any_partition() -> None:
    fixture = TopicFixture(2)
    fixture.append(1, b"a")
    running = fixture.consumer()
    for start in ("latest", {1: 1}, datetime(2100, 1, 1, tzinfo=UTC)):
        with pytest.raises(InvalidInput, match=r"1 unread batch from 0 on would be lost"):
            fixture.consumer(start=start)
    assert drained_records(running) == [b"a"], "no partition was taken over"
    latest = fixture.consumer(start="latest")
    fixture.append(0, b"b")
    assert drained_records(latest) == [b"b"]


def test_a_new_reader_begins_in_each_partition_at_the_end(logs: LogTopic) -> None:
    reader = logs.consumer("new", start="latest")
    logs.append(0, 100)
    logs.append(1, 101)
    assert sorted(drained(reader)) == [100, 101]


def test_a_new_reader_begins_at_a_time_or_at_a_place_for_each_partition(logs: LogTopic) -> None:
    logs.runtime.advance(60)
    began = datetime.fromtimestamp(logs.runtime.now_ms() / 1000, UTC)
    logs.append(0, 100)
    assert drained(logs.consumer("time", start=began)) == [100]
    places: dict[Any, Any] = {0: 19, NAMES[1]: "latest"}
    assert drained(logs.consumer("places", start=places)) == [38, 100]
    assert len(drained(logs.consumer("some", start={1: 19}))) == 22, "the others begin at 0"


def test_a_new_reader_begins_at_its_start_in_partitions_that_another_process_reads(
    logs: LogTopic,
) -> None:
    one = logs.consumer("new", start="latest", partitions=[0])
    logs.append(1, 101)
    other = logs.consumer("new", start="latest", partitions=[1])
    assert drained(one) == []
    assert drained(other) == [101], "the first process has registered the reader there"


def test_a_start_that_was_interrupted_keeps_the_place_of_the_partitions_that_it_reached(
    logs: LogTopic,
) -> None:
    logs.store.fail("put_if", f"{NAMES[1]}/_readers/", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        logs.consumer("new", start="latest")
    logs.store.heal()
    logs.append(0, 100)
    logs.append(1, 101)
    assert "new" in Log(logs.store, logs.config(0), logs.runtime).need().readers
    assert drained(logs.consumer("new", start="latest")) == [100], "it is new in partition 1"


def test_a_partition_that_is_added_later_is_read_from_its_first_batch(logs: LogTopic) -> None:
    reader = logs.consumer("new", start="latest")
    logs.topic.expand(3)
    logs.append(2, 102)
    assert drained(reader) + drained(reader) == [102]
    reader.close()
    logs.topic.expand(4)
    logs.append(3, 103)
    assert drained(logs.consumer("new", start="latest")) == [103]


def test_start_does_not_move_a_reader_that_the_topic_knows(
    logs: LogTopic, caplog: pytest.LogCaptureFixture
) -> None:
    logs.consumer("known", start={0: 18, 1: 19}).close()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        logs.consumer("known", start="latest").close()
        assert not caplog.text
        assert sorted(drained(logs.consumer("known", start={0: 5}))) == [36, 38, 39]
    assert "reader 'known' continues at its positions: start applies only to" in caplog.text
