"""What operators do with the readers of a log: show, set, and delete them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from opendata_buffer import DataLoss, Fenced, InvalidInput, QueueReset
from opendata_buffer.admin.readers import readers_of
from opendata_buffer.admin.target import Target
from opendata_buffer.queue.reader_admin import reset_reader, unregister
from tests.unit.queue.test_log import WEEK_MS, House, read, small

__all__ = ["small"]


def test_readers_are_described_by_what_waits_and_for_how_long() -> None:
    house = House()
    house.append(40)
    behind, idle = house.reader("behind"), house.reader("idle")
    read(behind, 5)
    read(idle)
    house.runtime.advance(3_600)
    queue = Target(house.store, house.config, house.runtime)
    first, second = readers_of(queue, house.view())
    assert (first.name, first.lag, first.next_sequence, first.runs) == ("behind", 35, 5, True)
    assert first.oldest_unread_seconds is not None
    assert 3_600 <= first.oldest_unread_seconds < 3_601
    expires_ms = house.runtime.now_ms() + first.expires_seconds * 1000
    assert expires_ms == pytest.approx(first.moved_ms + WEEK_MS)
    assert (second.name, second.lag, second.oldest_unread_seconds) == ("idle", 0, None)
    behind.close()
    assert [each.runs for each in readers_of(queue, house.view())] == [False, True]


def test_a_reader_is_set_to_any_sequence_that_is_kept_and_to_no_other() -> None:
    house = House()
    house.append(40)
    for sequence in (0, 17, 40):
        reset_reader(house.view(), "x", sequence)
        consumer = house.reader("x")
        assert read(consumer) == list(range(sequence, 40))
        consumer.close()
    with pytest.raises(InvalidInput, match="sequence 41 is not kept: the log has 0 to 39"):
        reset_reader(house.view(), "x", 41)
    running = house.reader("x")
    reset_reader(house.view(), "x", 17)
    with pytest.raises(Fenced):
        running.check_fence()
    house.collect()
    with pytest.raises(InvalidInput, match="sequence 0 is not kept"):
        reset_reader(house.view(), "x", 0)


def test_a_reset_below_a_floor_that_has_just_risen_says_so() -> None:
    house = House()
    house.append(40)
    read(house.reader("quick"), 20)
    house.collect()
    view = house.view()
    read(house.reader("quick"))
    house.collect()
    with pytest.raises(DataLoss, match="rose to 40 after") as lost:
        reset_reader(view, "quick", 30)
    assert "did not move" not in str(lost.value)


@pytest.mark.parametrize("method", ["delete_many", "put_if"])
def test_a_reader_that_looks_while_it_is_deleted_does_not_register_again(method: str) -> None:
    """Its name would hold everything for ever: without a position it never expires."""
    house = House()
    house.append(30)
    reader, write = house.reader("reader"), getattr(house.store, method)

    def after_a_look(*arguments: Any) -> Any:
        setattr(house.store, method, write)
        house.runtime.advance(61)
        with suppress(QueueReset):
            reader.check_fence()
        return write(*arguments)

    setattr(house.store, method, after_a_look)
    unregister(house.store, house.view().log, "reader")
    with pytest.raises(QueueReset, match="the reader was deleted"):
        reader.check_fence()
    assert house.index().readers == ()


def test_the_consumer_of_a_deleted_reader_does_not_move_the_next_of_that_name() -> None:
    house = House()
    house.append(30)
    old = house.reader("reader")
    read(old, 10)
    batch = old.next_batch()
    assert batch is not None
    unregister(house.store, house.view().log, "reader")
    with pytest.raises(QueueReset, match="the reader was deleted"):
        old.ack_through(batch.sequence)
    house.runtime.advance(1)
    new = house.reader("reader")
    assert new.epoch == old.epoch
    with pytest.raises(QueueReset, match="the reader was deleted"):
        old.ack_through(batch.sequence)
    assert read(house.reader("reader")) == [*range(30)]
