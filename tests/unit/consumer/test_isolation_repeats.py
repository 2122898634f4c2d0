"""Every reader delivers a location once that a v1 writer queued twice, even across restarts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from buffer_source.partitions import SourceOffset
from opendata_buffer import Consumer, metrics, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer import isolation as module
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.errors import PermanentStorageError, TransientStorageError
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import partition_config
from tests.unit.buffer_source.source_queue import (
    SourceQueue,
    batches_of,
    committed_before,
    report_of,
)
from tests.unit.consumer.local import LocalQueue
from tests.unit.topic import test_consumer as topics
from tests.unit.topic.in_memory import NAMES, consuming

NOTE = "ingest/_acknowledged.json"


@pytest.fixture
def queue() -> Iterator[LocalQueue]:
    made = LocalQueue()
    yield made
    made.close()


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    monkeypatch.setattr(metrics.repeats_dropped, "add", counted.append)
    return counted


def drained(consumer: Consumer) -> list[tuple[int, bytes]]:
    found = []
    while (batch := consumer.next_batch()) is not None:
        found.append((batch.sequence, batch.entries[0]))
        consumer.ack(batch.sequence)
    return found


def test_f41_a_repeat_of_a_waiting_batch_is_dropped(queue: LocalQueue, dropped: list[int]) -> None:
    a, b = queue.produce(b"a", b"b")
    queue.enqueue(a, b, a)
    queue.produce(b"c")
    with queue.consumer() as consumer:
        assert [each.sequence for each in consumer.next_descriptors(3)] == [0, 1]
        assert [each.sequence for each in consumer.next_descriptors(3)] == [5]
        assert len(consumer) == 6
    with queue.consumer() as consumer:
        assert drained(consumer) == [(0, b"a"), (1, b"b"), (5, b"c")]
    assert (queue.queued(), sum(dropped)) == ([], 6)


def test_f41_a_repeat_at_the_end_is_not_a_backlog_and_moves_no_position(queue: LocalQueue) -> None:
    queue.enqueue(*queue.produce(b"a"))
    consumer = queue.consumer()
    assert drained(consumer) == [(0, b"a")]
    position = consumer.position
    owned = consumer._entries._owned
    assert (len(consumer), owned.lag_s(), owned.unacked_s()) == (0, 0.0, 0.0)
    consumer.close()
    assert queue.queued() == [1], "it is after the position, so a dequeue would look like a loss"
    assert drained(queue.consumer(position)) == []


@pytest.mark.parametrize("how", ["closed", "after a position", "killed"])
def test_f41_a_repeat_after_the_acknowledgement_is_known_across_restarts(
    queue: LocalQueue, how: str, dropped: list[int]
) -> None:
    (a,) = queue.produce(b"a")
    consumer = queue.consumer(ack_interval=1 if how == "killed" else 100)
    assert drained(consumer) == [(0, b"a")]
    if how == "closed":
        consumer.close()
    elif how == "after a position":  # which dequeues the batch
        queue.consumer(consumer.position)
    assert queue.queued() == []
    queue.enqueue(a)
    queue.produce(b"b")
    assert drained(queue.consumer()) == [(2, b"b")]
    assert sum(dropped) == 1


def test_f41_a_note_whose_acknowledgement_was_not_written_hides_nothing(queue: LocalQueue) -> None:
    queue.produce(b"a")
    consumer = queue.consumer()
    batch = consumer.next_batch()
    assert batch is not None
    consumer._entries._owned.repeats.note(1)  # and then it is killed
    assert drained(queue.consumer()) == [(0, b"a")]


def test_a_batch_that_was_skipped_and_queued_again_is_delivered(queue: LocalQueue) -> None:
    (a,) = queue.produce(b"a")
    consumer = queue.consumer(ack_interval=1)
    consumer.skip(0)
    queue.enqueue(a)
    assert drained(consumer) == [(1, b"a")]
    assert drained(queue.consumer()) == []


def test_a_batch_that_was_read_then_skipped_and_queued_again_is_delivered(
    queue: LocalQueue,
) -> None:
    (a,) = queue.produce(b"a")
    consumer = queue.consumer(ack_interval=1)
    assert consumer.next_batch() is not None
    consumer.skip(0)
    queue.enqueue(a)
    assert drained(consumer) == [(1, b"a")]
    # It counts as delivered from now on.
    queue.enqueue(a)
    assert drained(queue.consumer()) == []


def test_a_lost_batch_that_is_queued_again_does_not_stop_the_notes_of_others(
    queue: LocalQueue,
) -> None:
    a, b = queue.produce(b"a", b"b")
    consumer = queue.consumer(ack_interval=1)
    consumer.next_descriptors(2)
    consumer.skip(0)
    queue.enqueue(a)
    consumer.next_descriptors(1)
    consumer.ack_through(1)
    queue.enqueue(b)
    assert drained(queue.consumer()) == [(2, b"a")]


def test_a_batch_that_was_noted_and_then_lost_is_delivered(queue: LocalQueue) -> None:
    (a,) = queue.produce(b"a")
    noted = queue.consumer()
    assert noted.next_batch() is not None
    noted._entries._owned.repeats.note(1)  # and then it is killed before the acknowledgement
    consumer = queue.consumer(ack_interval=1)
    consumer.skip(0)
    queue.enqueue(a)
    assert drained(consumer) == [(1, b"a")]


def test_only_entries_before_the_acknowledgement_are_noted(queue: LocalQueue) -> None:
    queue.produce(b"a", b"b", b"c")
    consumer = queue.consumer(ack_interval=1)
    consumer.next_descriptors(3)
    for through in range(3):
        consumer.ack_through(through)
        note = json.loads(read_bytes(queue.store, NOTE))["batches"]
        assert list(note.values()) == list(range(through + 1))


def test_a_note_has_the_format_of_earlier_releases(queue: LocalQueue) -> None:
    location = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
    queue.store.put(location, encode_batch([b"a"]))
    queue.enqueue(location)
    drained(queue.consumer(ack_interval=1))
    assert json.loads(read_bytes(queue.store, NOTE))["batches"] == {"XLFr6KhuSWsQh+Kj": 0}


def test_waiting_entries_do_not_make_the_reader_forget_earlier_ones(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_NOTED", 2)
    a, *_ = queue.produce(b"a", b"b", b"c", b"d")
    consumer = queue.consumer(ack_interval=1)
    consumer.next_descriptors(4)
    consumer.ack_through(1)
    queue.enqueue(a)
    (repeat,) = consumer._entries._owned.repeats.described(queue.manifest().entries()[-1:])
    assert repeat.repeats == 0


@pytest.mark.parametrize(
    "name",
    [
        batch_key("ingest", "01J5T4R3KXBMZ7QV9N2WG8YDHP", Transaction("app", 7)),
        batch_key(
            "ingest", "01J5T4R3KXBMZ7QV9N2WG8YDHP", None, build_uuid(b"123456", 5, CONTINUE_TXN)
        ),
    ],
    ids=["transaction", "message"],
)
def test_entries_with_an_identity_in_their_name_are_left_to_the_transaction_rule(
    queue: LocalQueue, name: str
) -> None:
    # Their repeat must be delivered if the first one was skipped.
    queue.enqueue(name, name)
    consumer = queue.consumer()
    assert [entry.sequence for entry in consumer.next_descriptors(3)] == [0, 1]
    consumer.ack_through(1)
    assert NOTE not in [info.key for info in queue.store.list("").objects]


def test_f41_a_repeat_under_a_prefix_with_an_equals_sign_is_dropped() -> None:
    queue = LocalQueue()
    config = QueueConfig(store="memory://", data_path_prefix="tenant=1")
    repeats = Repeats(queue.store, config, queue.runtime, "")
    name = batch_key("tenant=1", queue.runtime.ulid())
    entries = Manifest.empty().append([NewEntry(name), NewEntry(name)]).entries()
    assert [entry.repeats for entry in repeats.described(entries)] == [None, 0]


def test_the_oldest_locations_are_forgotten(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_NOTED", 2)
    a, b, c = queue.produce(b"a", b"b", b"c")
    consumer = queue.consumer(ack_interval=1)
    drained(consumer)
    assert len(consumer._entries._owned.repeats._first) == 2
    queue.enqueue(b, c, a)
    assert drained(queue.consumer(ack_interval=1)) == [(5, b"a")]
    assert list(json.loads(read_bytes(queue.store, NOTE))["batches"].values()) == [2, 5]


def test_a_batch_is_not_acknowledged_if_its_note_cannot_be_written(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue.produce(b"a", b"b")
    consumer = queue.consumer()
    descriptors = consumer.next_descriptors(2)
    put_if, failing = queue.store.put_if, True

    def refused(key: str, *rest: Any) -> Any:
        if key == NOTE and failing:
            raise PermanentStorageError("403")
        return put_if(key, *rest)

    monkeypatch.setattr(queue.store, "put_if", lambda key, *_: outcomes.Unknown(f"{key} lost"))
    with pytest.raises(TransientStorageError, match=r"_acknowledged.json' in .* was not written"):
        consumer.ack_through(0)
    assert queue.queued() == [0, 1]
    # Without write access to the note, acknowledgements continue. Later everything is noted.
    monkeypatch.setattr(queue.store, "put_if", refused)
    consumer.ack_through(0)
    assert "batches queued a second time may be delivered twice: 403" in caplog.text
    failing = False
    consumer.ack_through(1)
    assert len(json.loads(read_bytes(queue.store, NOTE))["batches"]) == len(descriptors)


@pytest.mark.parametrize(
    "text", [b"{}", b'{"version":1,"queue":"x","batches":{"a":""}}', b"\xff", b" " * 2**20]
)
def test_a_note_that_cannot_be_read_is_replaced(
    queue: LocalQueue, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    queue.store.put(NOTE, text)
    queue.produce(b"a")
    with caplog.at_level(logging.WARNING), queue.consumer() as consumer:
        assert drained(consumer) == [(0, b"a")]
        queue.store.delete_many([NOTE])  # also a note that was deleted meanwhile
    assert len(json.loads(read_bytes(queue.store, NOTE))["batches"]) == 1
    assert "repeats of acknowledged batches are not recognised: " in caplog.text
    assert "is not readable" in caplog.text
    if b"batches" in text:
        assert "field 'batches' is {'a': ''}, and not a sequence for each hash" in caplog.text


def test_a_note_that_is_too_large_is_not_downloaded(queue: LocalQueue) -> None:
    limits: list[int] = []
    get = queue.store.get

    def limited(key: str, **options: Any) -> Any:
        if key == NOTE:
            limits.append(options["max_bytes"])
        return get(key, **options)

    queue.store.get = limited  # type: ignore[method-assign]
    queue.produce(b"a")
    with queue.consumer() as consumer:
        assert drained(consumer) == [(0, b"a")]
    assert set(limits) == {256 * 1024}


def test_f41_a_topic_delivers_a_location_once() -> None:
    topic = topics.TopicFixture(1)
    name = NAMES[0]
    config = partition_config(name, consuming())
    queue = Queue(topic.store, config, runtime=topic.runtime, role="writer")
    first = topic.append(0, b"a")
    queue.append([NewEntry(first)], read_first=True)
    topic.append(0, b"b")
    consumer = topic.consumer()
    batch = consumer.next_batch()
    assert batch is not None
    saved = {name: str(consumer.position_of(batch))}
    consumer.ack(batch)
    del consumer  # killed
    queue.append([NewEntry(first)], read_first=True)
    resumed = topic.consumer(saved)
    assert topics.drained(resumed) == [b"b"]
    resumed.flush()
    topic.append(0, b"c")
    assert topics.drained(topic.consumer()) == [b"c"]
    assert topic.queued(0) == 0


def test_f41_a_query_delivers_a_location_once(runtime: ManualRuntime, dropped: list[int]) -> None:
    source = SourceQueue(runtime)
    source.produce(2)
    a, b = (entry.location for entry in source.manifest().entries())
    source._queue.append([NewEntry(b)])
    driver = source.run()
    start = committed_before(driver, None)
    assert [each.location for each in batches_of(driver, None, start)] == [a, b]
    assert report_of(driver)["droppedRepeats"] == 1
    driver.commit(start)
    source._queue.append([NewEntry(a)])
    source.produce(1)
    end = driver.latest_offset(start)
    first, again = batches_of(driver, start, end), batches_of(source.run(), start, end)
    assert [each.sequence for each in first] == [each.sequence for each in again] == [4]
    beside = source.run(acknowledge="false")
    assert [each.sequence for each in batches_of(beside, None, beside.latest_offset(None))] == [4]
    assert SourceOffset.from_json(end.to_json()) == end
    assert sum(dropped) == 4  # each run counts: two runs, the replay, and the reader
