"""Where a consumer begins: ``start``, and the positions that come before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextvars import Context
from datetime import UTC, datetime
from typing import Any

import pytest

from opendata_buffer import DataLoss, InvalidInput, Position
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.reader_admin import register_readers
from opendata_buffer.queue.reader_positions import position_key
from tests.support.log_fixture import LogFixture, read, small
from tests.unit.consumer.local import LocalQueue

__all__ = ["small"]


@pytest.fixture
def queue() -> Iterator[LocalQueue]:
    made = LocalQueue()
    yield made
    made.close()


def at(runtime: Any) -> datetime:
    return datetime.fromtimestamp(runtime.now_ms() / 1000, UTC)


# ---- the only consumer of a queue


@pytest.mark.parametrize("start", ["earliest", 1, None])
def test_a_queue_is_read_from_its_oldest_batch(queue: LocalQueue, start: Any) -> None:
    queue.produce(b"a", b"b", b"c")
    queue.consumer(0).close()
    consumer = queue.consumer(start=start)
    assert [each.sequence for each in consumer.next_descriptors(9)] == [1, 2]


@pytest.mark.parametrize("start", ["latest", 2, "time"])
def test_a_start_that_would_discard_unread_batches_is_refused_before_anyone_is_fenced(
    queue: LocalQueue, start: Any
) -> None:
    queue.produce(b"a", b"b")
    running = queue.consumer()
    queue.runtime.advance(1)
    start = at(queue.runtime) if start == "time" else start
    with pytest.raises(InvalidInput) as refused:
        queue.consumer(start=start)
    message = str(refused.value)
    for part in ("2 unread batches", "from 0 on", "would be lost", "trim", "readers enable"):
        assert part in message
    running.check_fence()
    assert queue.queued() == [0, 1]


@pytest.mark.parametrize("start", ["latest", 2, "time"])
def test_a_queue_without_a_backlog_may_be_started_at_its_end(queue: LocalQueue, start: Any) -> None:
    queue.produce(b"a", b"b")
    queue.consumer(1).close()
    queue.runtime.advance(1)
    consumer = queue.consumer(start=at(queue.runtime) if start == "time" else start)
    queue.produce(b"c")
    assert [each.sequence for each in consumer.next_descriptors(9)] == [2]


def test_a_missing_queue_can_be_created_with_a_start_at_its_end(queue: LocalQueue) -> None:
    consumer = queue.consumer(start="latest")
    queue.produce(b"a")
    assert [each.sequence for each in consumer.next_descriptors(9)] == [0]


def test_a_start_that_was_read_already_is_an_error_or_a_loss_that_is_allowed(
    queue: LocalQueue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.produce(b"a", b"b", b"c")
    queue.consumer(1).close()
    with pytest.raises(InvalidInput, match="sequence 1 has left the queue"):
        queue.consumer(start=1)
    with caplog.at_level(logging.WARNING):
        assert queue.consumer(start=1, allow_data_loss=True).first_sequence == 2
    assert "sequences 1 to 1 are gone unread" in caplog.text


def test_a_position_decides_before_start(queue: LocalQueue) -> None:
    queue.produce(b"a", b"b", b"c")
    assert queue.consumer(after=0, start="latest").first_sequence == 1
    assert queue.consumer(start=Position("", 1)).first_sequence == 2
    with pytest.raises(DataLoss):
        queue.consumer(start=Position("", 0))


def test_after_is_last_acked_sequence_by_another_name(queue: LocalQueue) -> None:
    queue.produce(b"a", b"b", b"c")
    assert queue.consumer(after=0).first_sequence == 1
    assert queue.consumer(after="1").first_sequence == 2
    for both in ({"after": 1}, {"start": Position("", 1)}):
        with pytest.raises(InvalidInput, match="give only one of"):
            queue.consumer(1, **both)
    with pytest.raises(InvalidInput, match="position is -1"):
        queue.consumer(after=-1)
    with pytest.raises(
        InvalidInput, match=r"position is 'latest'.* To begin at a place, use start"
    ):
        queue.consumer("latest")


def test_a_start_that_is_no_place_is_refused(queue: LocalQueue) -> None:
    with pytest.raises(InvalidInput, match="start is 'beginning': use 'earliest', 'latest'"):
        queue.consumer(start="beginning")


# ---- a reader of a log


@pytest.fixture
def log() -> LogFixture:
    fixture = LogFixture()
    fixture.append(40)
    return fixture


@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("latest", 40), (7, 7), (39, 39)])
def test_a_new_reader_begins_at_the_start(log: LogFixture, start: Any, first: int) -> None:
    reader = log.reader("new", start=start)
    log.append(1)
    assert read(reader) == [*range(first, 41)]


def test_a_new_reader_can_begin_at_a_time(log: LogFixture) -> None:
    log.runtime.advance(60)
    began = at(log.runtime)
    log.append(2)
    assert read(log.reader("new", start=began)) == [40, 41]


def test_a_reader_that_is_known_continues_at_its_position(
    log: LogFixture, caplog: pytest.LogCaptureFixture
) -> None:
    known = log.reader("known", start=5)
    assert read(known, 3) == [5, 6, 7]
    known.close()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert log.reader("known", start="latest").first_sequence == 8
        assert not caplog.text
        assert log.reader("known", start=20).first_sequence == 8
    assert "reader 'known' continues at sequence 8: start=20 applies only to a new" in caplog.text


def test_a_registered_reader_is_not_new_even_if_its_position_is_missing(log: LogFixture) -> None:
    register_readers(Log(log.store, log.config, log.runtime), ["registered", "damaged"], "test")
    log.store.delete_many([position_key(log.config, "damaged")])
    for name in ("registered", "damaged"):
        assert log.reader(name, start="latest").first_sequence == 0


def test_a_new_reader_cannot_begin_at_what_is_no_longer_kept(log: LogFixture) -> None:
    read(log.reader("other"))
    log.collect()
    assert log.index().floor == 40
    with pytest.raises(InvalidInput, match="sequence 7 has left the queue"):
        log.reader("new", start=7)
    assert "new" not in log.index().readers
    assert log.reader("new", start=7, allow_data_loss=True).first_sequence == 40


def test_a_collector_that_overtakes_a_new_reader_moves_only_its_start(log: LogFixture) -> None:
    """The collector raises the floor after the reader has read it."""
    read(log.reader("other"), 30)
    log.runtime.advance(3_600)
    write = log.store.put_if

    def overtaken(key: str, *arguments: Any) -> Any:
        if key == position_key(log.config, "new"):
            log.store.put_if = write  # type: ignore[method-assign]
            Context().run(log.collector().run_once)  # without the deadline of this call
        return write(key, *arguments)

    log.store.put_if = overtaken  # type: ignore[method-assign]
    reader = log.reader("new", start=7)
    assert (reader.first_sequence, log.index().floor) == (30, 30)
