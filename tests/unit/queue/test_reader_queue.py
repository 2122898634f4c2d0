"""A log as one named reader sees it: starts, expiry, and races with its other instances."""

from __future__ import annotations

from contextvars import Context
from typing import Any

import pytest

from opendata_buffer import (
    BatchMissing,
    Consumer,
    ConsumerConfig,
    DataLoss,
    Fenced,
    outcomes,
)
from opendata_buffer.admin.rebuild import rebuild_index
from opendata_buffer.admin.target import Target
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.queue import Queue
from tests.support.log_fixture import DAY_S, KEY, LogFixture, read, small

__all__ = ["small"]


class Killed(Exception):
    """The process is gone."""


def test_f44_an_expired_reader_does_not_hold_the_floor_and_gets_an_error() -> None:
    fixture = LogFixture()
    fixture.append(40)
    slow, quick = fixture.reader("slow"), fixture.reader("quick")
    assert len(read(slow, 10)) == 10
    slow.close()
    fixture.runtime.advance(6 * DAY_S)
    assert len(read(quick)) == 40
    fixture.collect()
    assert fixture.index().floor == 10
    fixture.runtime.advance(2 * DAY_S)
    fixture.append(1)
    read(quick)
    fixture.collect()
    assert (fixture.index().floor, fixture.index().readers) == (41, ("quick",))
    with pytest.raises(DataLoss) as lost:
        fixture.reader("slow")
    for part in ("'slow'", "604800 s", "10", "41"):
        assert part in str(lost.value)
    assert fixture.reader("slow", allow_data_loss=True).first_sequence == 41


def test_f44_a_reader_whose_clock_is_far_behind_does_not_expire_while_it_reads() -> None:
    """The store records when the position was written."""
    fixture = LogFixture()
    fixture.append(40)
    slow, quick = fixture.reader("slow"), fixture.reader("quick")
    read(quick)
    right_ms = fixture.runtime.now_ms()
    fixture.store._now_ms = lambda: right_ms
    fixture.runtime.set_wall_clock(right_ms - 8 * DAY_S * 1000)
    read(slow, 10)
    fixture.runtime.set_wall_clock(right_ms)
    fixture.store._now_ms = fixture.runtime.now_ms
    fixture.collect()
    assert (fixture.index().floor, fixture.index().readers) == (10, ("quick", "slow"))


def test_a_reader_that_was_suspended_until_it_expired_continues_if_its_next_batch_is_retained() -> (
    None
):
    fixture = LogFixture()
    fixture.append(40)
    idle, slow = fixture.reader("idle"), fixture.reader("slow")
    read(idle)
    fixture.runtime.advance(8 * DAY_S)
    read(fixture.reader("quick"))
    fixture.collect()
    assert (fixture.index().floor, fixture.index().readers) == (40, ("quick",))
    fixture.append(1)
    assert read(idle) == [40]
    with pytest.raises(DataLoss, match="'slow' did not move"):
        read(slow)


def test_an_expired_reader_that_continues_in_two_processes_is_fenced_in_one() -> None:
    fixture = LogFixture()
    fixture.append(30)
    old = fixture.reader("reader")
    fixture.runtime.advance(8 * DAY_S)
    quick, write = fixture.reader("quick"), fixture.store.put_if
    fixture.collect()
    assert fixture.index().readers == ("quick",)

    def another_process() -> None:
        assert read(fixture.reader("reader")) == read(quick) == [*range(30)]
        fixture.collect()
        assert fixture.index().floor == 30

    def followed_by_another(key: str, *arguments: Any) -> Any:
        assert key.endswith("/reader.json"), "it first writes that it is alive"
        outcome = write(key, *arguments)
        fixture.store.put_if = write  # type: ignore[method-assign]
        Context().run(another_process)  # without the deadline of this call
        return outcome

    fixture.store.put_if = followed_by_another  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        old.check_fence()


def reader_with_a_long_manifest(monkeypatch: pytest.MonkeyPatch) -> tuple[LogFixture, Consumer]:
    """Return a reader of a log whose producers never move entries, like those of v1."""
    fixture = LogFixture()
    monkeypatch.setattr(Queue, "_move", lambda self, manifest: None)
    fixture.append(60)
    reader = fixture.reader("reader")
    fixture.append(1)
    return fixture, reader


def test_a_reader_can_read_a_manifest_that_it_cannot_shorten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture, reader = reader_with_a_long_manifest(monkeypatch)
    write = fixture.store.put_if

    def put_if(key: str, *rest: Any) -> Any:
        return outcomes.LostRace() if key == KEY else write(key, *rest)

    fixture.store.put_if = put_if  # type: ignore[method-assign]
    assert read(reader) == [*range(61)]


def test_a_reader_that_is_replaced_while_it_moves_entries_is_fenced_without_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture, running = reader_with_a_long_manifest(monkeypatch)
    shorten = Queue.shorten

    def shorten_late(self: Queue, *arguments: Any) -> Any:
        monkeypatch.undo()
        successor = fixture.reader("reader")
        assert read(successor) == [*range(61)]
        successor.close()
        fixture.collect()
        fixture.append(60)
        return shorten(self, *arguments)

    monkeypatch.setattr(Queue, "shorten", shorten_late)
    with pytest.raises(Fenced):
        running.next_descriptors(1)
    assert fixture.index().floor == 61


def test_the_error_about_an_old_saved_position_names_the_instance_that_acknowledged_more() -> None:
    fixture = LogFixture()
    fixture.append(40)
    first = fixture.reader("billing")
    assert len(read(first, 10)) == 10
    fixture.collect()
    assert fixture.index().floor == 10
    with pytest.raises(DataLoss) as lost:
        fixture.reader("billing", 4)  # which the first instance had saved earlier
    text = str(lost.value)
    for part in (
        "Another instance of reader 'billing' has acknowledged them",
        "Python on",
        "up to sequence 9",
        "start without a position",
    ):
        assert part in text
    assert "did not move" not in text
    assert fixture.reader("billing").first_sequence == 10


def test_the_error_about_a_reader_that_the_log_does_not_have_does_not_call_it_expired() -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("quick"))
    fixture.collect()
    with pytest.raises(DataLoss, match="The log has no reader 'new'") as lost:
        fixture.reader("new", 4)
    assert "did not move" not in str(lost.value)


def test_the_error_of_a_reader_that_starts_while_the_floor_rises_says_that_it_rose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector has looked before the reader wrote its position."""
    monkeypatch.setattr(GarbageCollector, "_unnamed_readers", lambda *_: {})
    fixture = LogFixture()
    fixture.append(40)
    quick = fixture.reader("quick")
    write = fixture.store.put_if

    def overtaken(key: str, *arguments: Any) -> Any:
        outcome = write(key, *arguments)
        if key.endswith("/new.json"):
            fixture.store.put_if = write  # type: ignore[method-assign]

            def another_process() -> None:
                read(quick)
                fixture.collect()

            Context().run(another_process)
        return outcome

    fixture.store.put_if = overtaken  # type: ignore[method-assign]
    with pytest.raises(DataLoss, match="rose to 40 after") as lost:
        fixture.reader("new", 4)
    assert "did not move" not in str(lost.value)


@pytest.mark.parametrize("earlier", [True, False])
def test_the_error_after_an_interrupted_first_start_does_not_call_the_reader_expired(
    monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """A collector of an earlier release does not look for positions without a name."""
    if earlier:
        monkeypatch.setattr(GarbageCollector, "_unnamed_readers", lambda *_: {})
    fixture = LogFixture()
    fixture.append(40)
    quick = fixture.reader("quick")
    write = fixture.store.put_if

    def killed(key: str, *arguments: Any) -> Any:
        if key.endswith("_log.json"):
            raise Killed
        return write(key, *arguments)

    fixture.store.put_if = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        fixture.reader("new")
    fixture.store.put_if = write  # type: ignore[method-assign]
    read(quick)
    fixture.collect()
    if not earlier:
        assert read(fixture.reader("new")) == [*range(40)], "it has lost nothing"
        return
    with pytest.raises(DataLoss, match="A start of reader 'new' was interrupted"):
        fixture.reader("new")
    assert fixture.reader("new", allow_data_loss=True).first_sequence == 40


def test_f44_an_expired_reader_gets_an_error_even_after_the_index_was_rebuilt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = LogFixture()
    fixture.append(40)
    slow, quick = fixture.reader("slow"), fixture.reader("quick")
    read(slow, 10)
    slow.close()
    fixture.runtime.advance(8 * DAY_S)
    read(quick)
    fixture.collect()
    assert (fixture.index().floor, fixture.index().readers) == (40, ("quick",))
    fixture.store.delete_many(["ingest/_log.json"])
    config = ConsumerConfig(store=fixture.config.store)
    rebuild_index(Target(fixture.store, config, fixture.runtime))
    floor = fixture.index().floor
    assert floor > 10, "nothing was collected"
    assert "does not name reader 'slow': it needs sequence 10" in caplog.text
    with pytest.raises(DataLoss) as lost:
        fixture.reader("slow")
    assert (lost.value.needed, lost.value.oldest) == (10, floor)


def test_a_batch_can_be_skipped_although_later_ones_are_missing_from_the_log() -> None:
    """An early error about the missing batches would hide the batches in between."""
    fixture = LogFixture()
    fixture.append(20)
    end = fixture.index().end
    assert end > 5, "no entry is in a segment"
    fixture.store.put("ingest/manifest", fixture.manifest().drop_through(19).raw)
    fixture.store.delete_many([fixture.locations[1]])
    reader = fixture.reader("slow", isolation="read_committed")
    assert read(reader, 1) == [0]
    with pytest.raises(BatchMissing):
        reader.next_batch()
    assert reader.skip(1).sequence == 1
    assert read(reader, end - 2) == [*range(2, end)]
    with pytest.raises(DataLoss) as lost:
        reader.next_batch()
    assert (lost.value.needed, lost.value.oldest) == (end, 20)


def test_batches_before_a_gap_are_delivered_before_the_error_about_the_gap() -> None:
    fixture = LogFixture()
    fixture.append(20)
    end = fixture.index().end
    fixture.store.put("ingest/manifest", fixture.manifest().drop_through(19).raw)
    reader = fixture.reader("slow", isolation="read_committed")
    assert [each.sequence for each in reader.next_descriptors(100)] == [*range(end)]
    with pytest.raises(DataLoss):
        reader.next_descriptors(100)
