"""Move a running reader of a log to another place, and ask how far behind a consumer is."""

from __future__ import annotations

import asyncio
from contextvars import Context
from datetime import UTC, datetime
from typing import Any

import pytest

from opendata_buffer import Fenced, InvalidInput, Position, TransientStorageError
from opendata_buffer.consumer.lag import Lag, TopicLag
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import index_key
from opendata_buffer.queue.reader_positions import position_key, position_object
from tests.support.log_fixture import LogFixture, read, small
from tests.unit.consumer.local import LocalQueue
from tests.unit.topic.test_consumer_readers import LogTopic, drained, small_segments

__all__ = ["small", "small_segments"]


@pytest.fixture
def log() -> LogFixture:
    fixture = LogFixture(retention_ms=86_400_000)
    fixture.append(40)
    return fixture


def stored(log: LogFixture, name: str) -> int:
    found = position_object(Log(log.store, log.config, log.runtime), name).read()
    return found.next  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("place", "first"),
    [("earliest", 0), (7, 7), (30, 30), ("latest", 40), (Position("", 19), 20)],
)
def test_a_reader_reads_from_the_place_that_it_was_moved_to(
    log: LogFixture, place: Any, first: int
) -> None:
    reader = log.reader("reader")
    read(reader, 25)
    reader.seek(place)
    assert stored(log, "reader") == first, "the position is written at once"
    log.append(1)
    assert read(reader) == [*range(first, 41)]
    assert stored(log, "reader") == 41


def test_a_reader_can_replay_from_a_time(log: LogFixture) -> None:
    log.runtime.advance(60)
    since = datetime.fromtimestamp(log.runtime.now_ms() / 1000, UTC)
    log.append(3)
    reader = log.reader("reader")
    assert len(read(reader)) == 43
    reader.seek(since)
    assert read(reader) == [40, 41, 42]


@pytest.mark.parametrize(("place", "message"), [(10, "not handed out"), (30, "is acknowledged")])
def test_a_batch_that_was_delivered_before_a_seek_cannot_be_acknowledged(
    log: LogFixture, place: int, message: str
) -> None:
    reader = log.reader("reader")
    read(reader, 20)
    batches = [reader.next_batch() for _ in range(3)]
    reader.seek(place)
    for batch in batches:
        assert batch is not None
        with pytest.raises(InvalidInput, match=message):
            batch.ack()
    assert read(reader) == [*range(place, 40)]


def test_a_batch_that_a_cancelled_call_had_fetched_is_not_delivered_after_a_seek(
    log: LogFixture,
) -> None:
    reader = log.reader("reader")

    async def cancelled() -> None:
        call = asyncio.ensure_future(reader.next_batch_async(None))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while not reader._returned:
            await asyncio.sleep(0.001)
        reader.seek(30)
        batch = await reader.next_batch_async()
        assert batch is not None
        assert batch.sequence == 30

    asyncio.run(cancelled())


def test_a_place_that_is_not_kept_moves_nothing(log: LogFixture) -> None:
    reader = log.reader("reader")
    read(reader, 20)
    for place, message in ((41, "beyond the end"), ("soon", "place is 'soon'")):
        with pytest.raises(InvalidInput, match=message):
            reader.seek(place)
    assert stored(log, "reader") == 20
    assert read(reader) == [*range(20, 40)]


def test_a_fenced_reader_does_not_move_its_successor(log: LogFixture) -> None:
    old = log.reader("reader")
    read(log.reader("reader"), 30)
    with pytest.raises(Fenced):
        old.seek("earliest")
    assert stored(log, "reader") == 30


def test_a_collector_that_has_read_the_old_position_deletes_nothing_that_a_seek_returns_to() -> (
    None
):
    log = LogFixture()
    log.append(40)
    reader = log.reader("reader")
    read(reader, 30)
    log.runtime.advance(3_600)
    write = log.store.put_if

    def moved_meanwhile(key: str, *arguments: Any) -> Any:
        if key == index_key(log.config):
            log.store.put_if = write  # type: ignore[method-assign]
            Context().run(reader.seek, 5)
        return write(key, *arguments)

    log.store.put_if = moved_meanwhile  # type: ignore[method-assign]
    log.collector().run_once()
    assert log.store.put_if == write, "the collector wrote the index"
    assert log.index().floor <= 5
    assert read(reader) == [*range(5, 40)]


def test_a_reader_whose_place_the_collector_deleted_first_stays_where_it_was() -> None:
    log = LogFixture()
    log.append(40)
    reader = log.reader("reader")
    read(reader, 30)
    log.runtime.advance(3_600)
    write = log.store.put_if

    def collected_before(key: str, *arguments: Any) -> Any:
        if key == position_key(log.config, "reader"):
            log.store.put_if = write  # type: ignore[method-assign]
            Context().run(log.collector().run_once)
        return write(key, *arguments)

    log.store.put_if = collected_before  # type: ignore[method-assign]
    with pytest.raises(InvalidInput, match="sequence 5 has left"):
        reader.seek(5)
    assert (log.index().floor, stored(log, "reader")) == (30, 30)
    assert read(reader) == [*range(30, 40)]
    reader.seek("earliest")
    assert read(reader) == [*range(30, 40)]


def test_a_position_never_has_the_bytes_of_an_earlier_one_after_a_seek(log: LogFixture) -> None:
    """The clock stands still, and S3 compares versions by a hash of the bytes."""
    key = position_key(log.config, "reader")
    seen = []
    reader = log.reader("reader")
    for _ in range(3):
        reader.seek(5)
        seen.append(log.store.get(key).data)
        reader.seek(7)
        seen.append(log.store.get(key).data)
    assert len(seen) == len({*seen})


def test_a_seek_that_failed_can_be_repeated(
    log: LogFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = log.reader("reader")
    read(reader, 30)

    def down(*_: Any, **__: Any) -> Any:
        raise TransientStorageError("down")

    with monkeypatch.context() as patch:
        patch.setattr(log.store, "put_if", down)
        with pytest.raises(TransientStorageError):
            reader.seek(5)
    reader.seek(5)
    assert read(reader) == [*range(5, 40)]


def test_transactions_are_delivered_again_after_a_seek() -> None:
    logs = LogTopic()
    producer = b"one..."
    logs.append(0, 1, message=(producer, 1, CONTINUE_TXN))
    logs.append(0, 2)
    logs.append(0, 3, message=(producer, 2, CONTINUE_TXN))
    logs.append(0, message=(producer, 3, ACK_TXN))
    reader = logs.consumer("reader", partitions=[0])
    first = drained(reader)
    assert sorted(first) == [1, 2, 3]
    reader.seek("earliest")
    assert drained(reader) == first


def test_the_consumer_of_a_queue_cannot_seek_and_learns_what_it_can_do() -> None:
    queue = LocalQueue()
    queue.produce(b"a", b"b")
    consumer = queue.consumer()
    with pytest.raises(InvalidInput) as refused:
        consumer.seek(1)
    for part in ("is not a log", "make a new one", "skip()", "readers enable"):
        assert part in str(refused.value)
    assert [each.sequence for each in consumer.next_descriptors(9)] == [0, 1]


# ---- a topic


def test_a_reader_of_a_topic_moves_in_all_partitions_or_in_some() -> None:
    logs = LogTopic()
    logs.append(0, *range(0, 40, 2))
    logs.append(1, *range(1, 40, 2))
    reader = logs.consumer("reader")
    assert len(drained(reader)) == 40
    reader.seek({0: 18})
    assert drained(reader) == [36, 38]
    reader.seek("earliest")
    assert reader.next_batch() is not None, "others are fetched ahead"
    reader.seek({0: "latest", 1: 19})
    assert drained(reader) == [39]
    with pytest.raises(InvalidInput, match=r"place is 7, and each partition counts its own"):
        reader.seek(7)


# ---- lag


def test_lag_counts_what_is_not_acknowledged_with_one_read() -> None:
    queue = LocalQueue()
    consumer = queue.consumer()
    assert consumer.lag() == Lag(batches=0, seconds=0.0, bytes=0, records=0)
    queue.produce(b"a", b"b")
    queue.runtime.advance(30)
    queue.produce(b"c")
    consumer.next_descriptors(1)
    lag = consumer.lag()
    assert (lag.batches, lag.bytes, lag.records) == (3, None, None)
    assert lag.seconds == pytest.approx(30, abs=0.1)
    consumer.ack_through(0)
    assert consumer.lag().batches == len(consumer) == 2


def test_the_lag_of_a_reader_counts_from_its_position(log: LogFixture) -> None:
    reader = log.reader("reader")
    read(reader, 30)
    log.runtime.advance(60)
    lag = reader.lag()
    assert lag.batches == 10
    assert lag.seconds == pytest.approx(60, abs=5)


def test_the_lag_of_a_topic_is_that_of_each_partition_and_their_sum() -> None:
    logs = LogTopic()
    logs.append(0, 1)
    logs.runtime.advance(60)
    logs.append(1, 2, 3)
    lag = logs.consumer("reader").lag()
    assert isinstance(lag, TopicLag)
    assert [each.batches for each in lag.partitions.values()] == [1, 2]
    assert lag.total.batches == 3
    assert lag.total.seconds == pytest.approx(60, abs=1)
