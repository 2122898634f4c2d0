"""A log as one named reader sees it: starts, expiry, and races with others of its name."""

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
from opendata_buffer.queue.queue import Queue
from tests.unit.queue.test_log import DAY_S, KEY, House, read, small

__all__ = ["small"]


class Killed(Exception):
    """The process is gone."""


def test_f44_a_reader_that_expires_is_left_out_of_the_floor_and_told_so() -> None:
    house = House()
    house.append(40)
    slow, quick = house.reader("slow"), house.reader("quick")
    assert len(read(slow, 10)) == 10
    slow.close()
    house.runtime.advance(6 * DAY_S)
    assert len(read(quick)) == 40
    house.collect()
    assert house.index().floor == 10
    house.runtime.advance(2 * DAY_S)
    house.append(1)
    read(quick)
    house.collect()
    assert (house.index().floor, house.index().readers) == (41, ("quick",))
    with pytest.raises(DataLoss) as lost:
        house.reader("slow")
    for part in ("'slow'", "604800 s", "10", "41"):
        assert part in str(lost.value)
    assert house.reader("slow", allow_data_loss=True).first_sequence == 41


def test_f44_a_reader_whose_clock_is_far_behind_does_not_expire_while_it_reads() -> None:
    """The store knows when its position was written."""
    house = House()
    house.append(40)
    slow, quick = house.reader("slow"), house.reader("quick")
    read(quick)
    right_ms = house.runtime.now_ms()
    house.store._now_ms = lambda: right_ms
    house.runtime.set_wall_clock(right_ms - 8 * DAY_S * 1000)
    read(slow, 10)
    house.runtime.set_wall_clock(right_ms)
    house.store._now_ms = house.runtime.now_ms
    house.collect()
    assert (house.index().floor, house.index().readers) == (10, ("quick", "slow"))


def test_a_reader_that_was_suspended_until_it_expired_goes_on_where_that_is_kept() -> None:
    house = House()
    house.append(40)
    idle, slow = house.reader("idle"), house.reader("slow")
    read(idle)
    house.runtime.advance(8 * DAY_S)
    read(house.reader("quick"))
    house.collect()
    assert (house.index().floor, house.index().readers) == (40, ("quick",))
    house.append(1)
    assert read(idle) == [40]
    with pytest.raises(DataLoss, match="'slow' did not move"):
        read(slow)


def test_a_reader_that_expired_and_goes_on_in_two_processes_is_fenced_in_one() -> None:
    house = House()
    house.append(30)
    old = house.reader("reader")
    house.runtime.advance(8 * DAY_S)
    quick, write = house.reader("quick"), house.store.put_if
    house.collect()
    assert house.index().readers == ("quick",)

    def another_process() -> None:
        assert read(house.reader("reader")) == read(quick) == [*range(30)]
        house.collect()
        assert house.index().floor == 30

    def followed_by_another(key: str, *arguments: Any) -> Any:
        assert key.endswith("/reader.json"), "it says first that it is alive"
        outcome = write(key, *arguments)
        house.store.put_if = write  # type: ignore[method-assign]
        Context().run(another_process)  # the deadline of the call here is not its own
        return outcome

    house.store.put_if = followed_by_another  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        old.check_fence()


def behind_a_long_manifest(monkeypatch: pytest.MonkeyPatch) -> tuple[House, Consumer]:
    """A reader of a log whose producers move nothing, as those of v1."""
    house = House()
    monkeypatch.setattr(Queue, "_move", lambda self, manifest: None)
    house.append(60)
    reader = house.reader("reader")
    house.append(1)
    return house, reader


def test_a_reader_reads_a_manifest_that_it_cannot_make_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house, reader = behind_a_long_manifest(monkeypatch)
    write = house.store.put_if

    def put_if(key: str, *rest: Any) -> Any:
        return outcomes.Conflict() if key == KEY else write(key, *rest)

    house.store.put_if = put_if  # type: ignore[method-assign]
    assert read(reader) == [*range(61)]


def test_a_reader_that_is_replaced_while_it_moves_entries_is_fenced_and_lost_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house, running = behind_a_long_manifest(monkeypatch)
    shorten = Queue.shorten

    def shorten_late(self: Queue, *arguments: Any) -> Any:
        monkeypatch.undo()
        successor = house.reader("reader")
        assert read(successor) == [*range(61)]
        successor.close()
        house.collect()
        house.append(60)
        return shorten(self, *arguments)

    monkeypatch.setattr(Queue, "shorten", shorten_late)
    with pytest.raises(Fenced):
        running.next_descriptors(1)
    assert house.index().floor == 61


def test_a_position_that_was_read_too_early_names_the_instance_that_acknowledged_more() -> None:
    house = House()
    house.append(40)
    first = house.reader("billing")
    assert len(read(first, 10)) == 10
    house.collect()
    assert house.index().floor == 10
    with pytest.raises(DataLoss) as lost:
        house.reader("billing", 4)  # as the first instance had saved it before
    text = str(lost.value)
    for part in (
        "Another instance of reader 'billing' has acknowledged them",
        "Python on",
        "up to sequence 9",
        "start without a position",
    ):
        assert part in text
    assert "did not move" not in text
    assert house.reader("billing").first_sequence == 10


def test_a_saved_position_of_a_reader_that_the_log_does_not_have_is_not_called_expired() -> None:
    house = House()
    house.append(40)
    read(house.reader("quick"))
    house.collect()
    with pytest.raises(DataLoss, match="The log has no reader 'new'") as lost:
        house.reader("new", 4)
    assert "did not move" not in str(lost.value)


def test_a_reader_that_starts_while_the_floor_rises_says_so() -> None:
    """A collector does not know it yet: its name is not in the index."""
    house = House()
    house.append(40)
    quick = house.reader("quick")
    write = house.store.put_if

    def overtaken(key: str, *arguments: Any) -> Any:
        outcome = write(key, *arguments)
        if key.endswith("/new.json"):
            house.store.put_if = write  # type: ignore[method-assign]

            def another_process() -> None:
                read(quick)
                house.collect()

            Context().run(another_process)
        return outcome

    house.store.put_if = overtaken  # type: ignore[method-assign]
    with pytest.raises(DataLoss, match="rose to 40 after") as lost:
        house.reader("new", 4)
    assert "did not move" not in str(lost.value)


def test_a_first_start_that_was_interrupted_is_not_called_expired() -> None:
    house = House()
    house.append(40)
    quick = house.reader("quick")
    write = house.store.put_if

    def killed(key: str, *arguments: Any) -> Any:
        if key.endswith("_log.json"):
            raise Killed
        return write(key, *arguments)

    house.store.put_if = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        house.reader("new")
    house.store.put_if = write  # type: ignore[method-assign]
    read(quick)
    house.collect()
    with pytest.raises(DataLoss, match="A start of reader 'new' was interrupted"):
        house.reader("new")
    assert house.reader("new", allow_data_loss=True).first_sequence == 40


def test_f44_a_reader_that_expired_is_told_so_although_the_index_was_rebuilt_since() -> None:
    house = House()
    house.append(40)
    slow, quick = house.reader("slow"), house.reader("quick")
    read(slow, 10)
    slow.close()
    house.runtime.advance(8 * DAY_S)
    read(quick)
    house.collect()
    assert (house.index().floor, house.index().readers) == (40, ("quick",))
    house.store.delete_many(["ingest/_log.json"])
    config = ConsumerConfig(store=house.config.store)
    rebuild_index(Target(house.store, config, house.runtime))
    floor = house.index().floor
    assert floor > 10, "nothing was collected"
    with pytest.raises(DataLoss) as lost:
        house.reader("slow")
    assert (lost.value.needed, lost.value.oldest) == (10, floor)


def test_a_batch_is_skipped_although_later_ones_were_taken_off_the_log() -> None:
    """The batches between the two are there: an error about the later ones would pass them by."""
    house = House()
    house.append(20)
    end = house.index().end
    assert end > 5, "nothing is in a segment"
    house.store.put("ingest/manifest", house.manifest().drop_through(19).raw)
    house.store.delete_many([house.locations[1]])
    reader = house.reader("slow", isolation="read_committed")
    assert read(reader, 1) == [0]
    with pytest.raises(BatchMissing):
        reader.next_batch()
    assert reader.skip(1).sequence == 1
    assert read(reader, end - 2) == [*range(2, end)]
    with pytest.raises(DataLoss) as lost:
        reader.next_batch()
    assert (lost.value.needed, lost.value.oldest) == (end, 20)


def test_batches_before_a_gap_are_handed_out_before_the_error_about_the_gap() -> None:
    house = House()
    house.append(20)
    end = house.index().end
    house.store.put("ingest/manifest", house.manifest().drop_through(19).raw)
    reader = house.reader("slow", isolation="read_committed")
    assert [each.sequence for each in reader.next_descriptors(100)] == [*range(end)]
    with pytest.raises(DataLoss):
        reader.next_descriptors(100)
