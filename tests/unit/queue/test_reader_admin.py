"""Operators show, reset, and delete the readers of a log."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from opendata_buffer import DataLoss, Fenced, InvalidInput, QueueReset
from opendata_buffer.admin.readers import readers_of
from opendata_buffer.admin.target import Target
from opendata_buffer.queue.reader_admin import reset_reader, unregister
from tests.support.log_fixture import WEEK_MS, LogFixture, read, small

__all__ = ["small"]


def test_readers_are_described_by_their_lag_in_batches_and_time() -> None:
    fixture = LogFixture()
    fixture.append(40)
    behind, idle = fixture.reader("behind"), fixture.reader("idle")
    read(behind, 5)
    read(idle)
    fixture.runtime.advance(3_600)
    queue = Target(fixture.store, fixture.config, fixture.runtime)
    first, second = readers_of(queue, fixture.view())
    assert (first.name, first.lag, first.next_sequence, first.runs) == ("behind", 35, 5, True)
    assert first.oldest_unread_seconds is not None
    assert 3_600 <= first.oldest_unread_seconds < 3_601
    expires_ms = fixture.runtime.now_ms() + first.expires_seconds * 1000
    assert expires_ms == pytest.approx(first.moved_ms + WEEK_MS)
    assert (second.name, second.lag, second.oldest_unread_seconds) == ("idle", 0, None)
    behind.close()
    assert [each.runs for each in readers_of(queue, fixture.view())] == [False, True]


def test_a_reader_can_be_reset_only_to_a_retained_sequence() -> None:
    fixture = LogFixture()
    fixture.append(40)
    for sequence in (0, 17, 40):
        reset_reader(fixture.view(), "x", sequence)
        consumer = fixture.reader("x")
        assert read(consumer) == list(range(sequence, 40))
        consumer.close()
    with pytest.raises(InvalidInput, match="sequence 41 is not kept: the log has 0 to 39"):
        reset_reader(fixture.view(), "x", 41)
    running = fixture.reader("x")
    reset_reader(fixture.view(), "x", 17)
    with pytest.raises(Fenced):
        running.check_fence()
    fixture.collect()
    with pytest.raises(InvalidInput, match="sequence 0 is not kept"):
        reset_reader(fixture.view(), "x", 0)


def test_a_reset_below_a_floor_that_has_just_risen_is_refused() -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("quick"), 20)
    fixture.collect()
    view = fixture.view()
    read(fixture.reader("quick"))
    fixture.collect()
    with pytest.raises(DataLoss, match="rose to 40 after") as lost:
        reset_reader(view, "quick", 30)
    assert "did not move" not in str(lost.value)


@pytest.mark.parametrize("method", ["delete_many", "put_if"])
def test_a_reader_that_polls_while_it_is_deleted_does_not_register_again(method: str) -> None:
    """A registered name without a position never expires and would retain everything."""
    fixture = LogFixture()
    fixture.append(30)
    reader, write = fixture.reader("reader"), getattr(fixture.store, method)

    def after_a_look(*arguments: Any) -> Any:
        setattr(fixture.store, method, write)
        fixture.runtime.advance(61)
        with suppress(QueueReset):
            reader.check_fence()
        return write(*arguments)

    setattr(fixture.store, method, after_a_look)
    unregister(fixture.store, fixture.view().log, "reader")
    with pytest.raises(QueueReset, match="the reader was deleted"):
        reader.check_fence()
    assert fixture.index().readers == ()


def test_the_consumer_of_a_deleted_reader_does_not_move_a_new_reader_of_that_name() -> None:
    fixture = LogFixture()
    fixture.append(30)
    old = fixture.reader("reader")
    read(old, 10)
    batch = old.next_batch()
    assert batch is not None
    unregister(fixture.store, fixture.view().log, "reader")
    with pytest.raises(QueueReset, match="the reader was deleted"):
        old.ack_through(batch.sequence)
    fixture.runtime.advance(1)
    new = fixture.reader("reader")
    assert new.epoch == old.epoch
    with pytest.raises(QueueReset, match="the reader was deleted"):
        old.ack_through(batch.sequence)
    assert read(fixture.reader("reader")) == [*range(30)]
