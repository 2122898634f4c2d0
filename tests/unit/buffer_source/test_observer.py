"""What reads a queue beside its consumer."""

from __future__ import annotations

import logging

import pytest

from buffer_source.queue_cursor import Observer
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import DataLoss, QueueReset
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.world import World


@pytest.fixture
def world(runtime: ManualRuntime) -> World:
    return World(runtime)


def observer(world: World, last: int | None = None, *, allow_data_loss: bool = False) -> Observer:
    return Observer(
        ConsumerConfig(store="/world"),
        last,
        store=world.store,
        runtime=world.runtime,
        allow_data_loss=allow_data_loss,
    )


def sequences(reader: Observer, count: int = 100) -> list[int]:
    return [each.sequence for each in reader.next_descriptors(count)]


def drop_through(world: World, sequence: int) -> None:
    """The queue's consumer acknowledges."""
    world.store.put("ingest/manifest", world.manifest().drop_through(sequence).raw)


def test_it_hands_out_each_entry_once_and_changes_nothing(world: World) -> None:
    world.produce(3)
    before = world.manifest(), world.store.list("").objects
    reader = observer(world)
    assert sequences(reader, 2) == [0, 1]
    reader.ack_through(1)
    assert sequences(reader) == [2]
    assert (reader.last_acked_sequence, reader.last_handed_out_sequence) == (1, 2)
    reader.close()
    assert (world.manifest(), world.store.list("").objects) == before


def test_a_queue_that_is_not_there_has_nothing(world: World) -> None:
    reader = observer(world)
    assert sequences(reader) == []
    world.produce(1)
    assert sequences(reader) == [0]


def test_it_goes_on_behind_a_position(world: World) -> None:
    world.produce(3)
    assert sequences(observer(world, 0)) == [1, 2]
    assert sequences(observer(world, 2)) == []
    with pytest.raises(QueueReset, match=r"cannot resume after sequence 3: .* ends at 2"):
        observer(world, 3)


def test_entries_that_the_consumer_took_before_they_were_handed_out_are_a_loss(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.produce(5)
    strict, lenient = observer(world), observer(world, allow_data_loss=True)
    assert sequences(strict, 1) == sequences(lenient, 1) == [0]
    drop_through(world, 2)
    with pytest.raises(DataLoss, match=r"sequence 1 is needed but .* starts at 3") as caught:
        sequences(strict)
    assert "consumer was faster" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert sequences(lenient) == [3, 4]
    assert "sequences 1 to 2 are gone unread" in caplog.text
    with pytest.raises(DataLoss):
        observer(world, 0)
    assert sequences(observer(world, 0, allow_data_loss=True)) == [3, 4]


def test_entries_taken_after_they_were_handed_out_are_no_loss(world: World) -> None:
    world.produce(2)
    reader = observer(world)
    assert sequences(reader) == [0, 1]
    drop_through(world, 1)
    world.produce(1)
    assert sequences(reader) == [2]
