"""Reading a queue without consuming it."""

from __future__ import annotations

import logging

import pytest

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.consumer.local import LocalQueue

CONFIG = ConsumerConfig(store="memory://read-only")
RUNTIME = ManualRuntime()


@pytest.fixture
def queue() -> LocalQueue:
    return LocalQueue()


def reader_of(
    queue: LocalQueue, begin: int | None = None, *, allow_data_loss: bool = False
) -> ReadOnlyReader:
    found = ReadOnlyReader(
        CONFIG,
        store=queue.store,
        runtime=RUNTIME,
        allow_data_loss=allow_data_loss,
        advice="Begin at the oldest.",
    )
    found.seek(begin)
    return found


def acknowledge(queue: LocalQueue, through: int) -> None:
    queue.write(queue.manifest().drop_through(through))


def sequences(reader: ReadOnlyReader, count: int = 100) -> list[int]:
    return [each.sequence for each in reader.next_descriptors(count)]


def test_a_read_only_reader_delivers_each_entry_once_and_changes_nothing(queue: LocalQueue) -> None:
    queue.produce(*[b"x"] * 3)
    before = queue.manifest(), queue.store.list("").objects
    reader = reader_of(queue)
    assert sequences(reader, 2) == [0, 1]
    reader.ack_through(1)
    assert sequences(reader) == [2]
    assert (reader.last_acked_sequence, reader.last_handed_out_sequence) == (1, 2)
    assert reader.next_sequence == reader.manifest().next_sequence == 3
    reader.close()
    assert (queue.manifest(), queue.store.list("").objects) == before


def test_reading_without_a_position_starts_at_the_oldest_entry(queue: LocalQueue) -> None:
    queue.produce(*[b"x"] * 3)
    acknowledge(queue, 0)
    reader = ReadOnlyReader(CONFIG, store=queue.store, runtime=RUNTIME)
    assert (reader.last_acked_sequence, reader.last_handed_out_sequence) == (None, None)
    assert sequences(reader) == [1, 2]


def test_f27_reading_starts_only_at_a_position_in_the_queue(queue: LocalQueue) -> None:
    queue.produce(*[b"x"] * 3)
    assert sequences(reader_of(queue, 1)) == [1, 2]
    assert sequences(reader_of(queue, 3)) == []
    with pytest.raises(QueueReset, match=r"cannot resume after sequence 3: .* ends at 2"):
        reader_of(queue, 4)


def test_f28_entries_that_were_consumed_before_they_were_delivered_are_a_loss(
    queue: LocalQueue, caplog: pytest.LogCaptureFixture
) -> None:
    queue.produce(*[b"x"] * 5)
    strict, lenient = reader_of(queue), reader_of(queue, allow_data_loss=True)
    assert sequences(strict, 1) == sequences(lenient, 1) == [0]
    acknowledge(queue, 2)
    with pytest.raises(DataLoss, match=r"sequence 1 is needed but .* starts at 3") as caught:
        sequences(strict)
    assert "consumer was faster" in str(caught.value)
    assert str(caught.value).endswith("Begin at the oldest.")
    with caplog.at_level(logging.WARNING):
        assert sequences(lenient) == [3, 4]
    assert "sequences 1 to 2 are gone unread" in caplog.text
    with pytest.raises(DataLoss):
        reader_of(queue, 1)
    assert sequences(reader_of(queue, 1, allow_data_loss=True)) == [3, 4]


def test_f28_entries_are_read_again_only_while_they_are_queued(queue: LocalQueue) -> None:
    queue.produce(*[b"x"] * 4)
    reader = reader_of(queue)
    assert sequences(reader) == [0, 1, 2, 3]
    assert [each.sequence for each in reader.entries(1, 3)] == [1, 2]
    acknowledge(queue, 1)
    assert sequences(reader) == []
    assert [each.sequence for each in reader.entries(2, 4)] == [2, 3]
    with pytest.raises(DataLoss, match="sequence 1 is needed"):
        reader.entries(1, 3)


def test_the_error_about_a_missing_manifest_has_its_key_and_a_fix(queue: LocalQueue) -> None:
    config = ConsumerConfig(store="memory://read-only", data_path_prefix="a/b")
    with pytest.raises(InvalidInput) as raised:
        ReadOnlyReader(config, store=queue.store, runtime=RUNTIME).manifest()
    for part in ("'a/b/manifest'", queue.store.url, "data_path_prefix", "manifest_path"):
        assert part in str(raised.value)
    assert queue.store.list("").objects == ()


def test_f4_a_lost_manifest_is_distinguished_from_a_missing_queue(queue: LocalQueue) -> None:
    queue.produce(*[b"x"] * 1)
    claim_for_writing(queue.store, CONFIG, runtime=RUNTIME).note(queue.manifest(), now=True)
    reader = ReadOnlyReader(CONFIG, store=queue.store, runtime=RUNTIME)
    queue.store.delete_many(["ingest/manifest"])
    with pytest.raises(QueueReset):
        reader.find()
    lenient = reader_of(queue, allow_data_loss=True)
    assert sequences(lenient) == []
