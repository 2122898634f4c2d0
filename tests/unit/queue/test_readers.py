"""Readers of a log as an operator has them: described, set, expired; and movers that die."""

from __future__ import annotations

from contextlib import suppress
from contextvars import Context
from typing import Any

import pytest

from opendata_buffer import CorruptData, DataLoss, Fenced, InvalidInput, QueueReset, outcomes
from opendata_buffer.admin.readers import readers_of
from opendata_buffer.admin.target import Target
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.queue.log import Log, SegmentGone
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.readers import reset_reader, unregister
from tests.unit.queue.test_log import DAY_S, KEY, WEEK_MS, Counting, House, read, small

__all__ = ["small"]


class Killed(Exception):
    """The process is gone."""


class Dying(Counting):
    """Dies at a numbered write of the log's own objects: before it, or after it was applied."""

    left: int | None = None
    applied = False

    def _counted(self, key: str, write: Any) -> Any:
        is_due = False
        if self.left is not None and ("_log" in key or key.endswith("manifest")):
            self.left -= 1
            is_due = self.left == 0
        if is_due and not self.applied:
            raise Killed
        outcome = write()
        if is_due:
            raise Killed
        return outcome

    def put(self, key: str, data: Any) -> None:
        self._counted(key, lambda: super(Dying, self).put(key, data))

    def put_if(self, key: str, data: bytes, condition: Any) -> Any:
        return self._counted(key, lambda: super(Dying, self).put_if(key, data, condition))


def append_until_killed(house: House) -> set[str]:
    """The names that the index had before the last append."""
    while True:
        named = {f"ingest/_log/{each.name}" for each in house.index().parts()}
        try:
            house.append(1)
        except Killed:
            return named


@pytest.mark.parametrize("applied", [False, True])
def test_f43_a_mover_that_dies_between_any_two_writes_loses_and_repeats_nothing(
    applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.queue.test_log.Counting", Dying)
    killed_in_segment = killed_in_index = 0
    for number in range(15, 40):  # the first moves are among these writes
        house = House()
        store = house.store
        assert isinstance(store, Dying)
        store.left, store.applied = number, applied
        before = append_until_killed(house)
        store.left = None
        segments = [each.key for each in store.list("ingest/_log/").objects]
        named = {f"ingest/_log/{each.name}" for each in house.index().parts()}
        killed_in_segment += len(set(segments) - named)
        killed_in_index += bool(named - before)
        durable = [each.location for each in house.view().entries()]
        house.queue = house.writer()
        house.append(30)
        got = house.reader("x")
        assert read(got) == list(range(house.manifest().next_sequence))
        locations = [each.location for each in house.view().entries()]
        assert len(set(locations)) == len(locations)
        assert locations[: len(durable)] == durable
    assert killed_in_segment
    assert killed_in_index or not applied


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


@pytest.mark.parametrize("another", [True, False])
def test_a_collector_that_another_one_overtook_says_so_and_not_that_the_log_is_damaged(
    monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    house = House()
    house.append(60)

    def part_is_gone(self: Log, index: object) -> None:
        monkeypatch.undo()
        if another:
            assert read(house.reader("reader")) == [*range(60)]
        raise SegmentGone("gone")

    monkeypatch.setattr(Log, "oldest_name_ms", part_is_gone)
    with pytest.raises(TransientStorageError if another else SegmentGone):
        house.collector().run_once()


def test_an_index_that_is_gone_is_told_from_a_queue_that_never_was_a_log() -> None:
    house = House()
    house.store.delete_many(["ingest/_log.json"])
    log = Log(house.store, house.config, house.runtime)
    with pytest.raises(InvalidInput, match="is no log"):
        log.need()
    with pytest.raises(CorruptData, match=r"is gone\. Restore its latest version"):
        log.need(marked=True)
    with pytest.raises(CorruptData, match="is gone"):
        house.reader("x")


def half_deleted(house: House, name: str) -> None:
    """Delete a reader, and die between the two writes."""
    house.store.delete_many([f"ingest/_readers/{name}.json"])
    assert name in house.index().readers


def test_f44_a_reader_whose_deletion_was_interrupted_expires_as_any_other() -> None:
    house = House()
    house.append(40)
    read(house.reader("gone"), 10)
    quick = house.reader("quick")
    read(quick)
    house.collect()
    half_deleted(house, "gone")
    for day in range(6):
        house.append(1)
        read(quick)
        house.collect()
        assert house.index().floor == 10, f"what it had not read is kept on day {day}"
        house.runtime.advance(DAY_S)
    house.runtime.advance(2 * DAY_S)
    read(quick)
    house.collect()
    assert (house.index().floor, house.index().readers) == (46, ("quick",))
    assert not house.index().missing
    assert house.reader("gone").first_sequence == 46


def test_f44_a_reader_whose_position_comes_back_is_counted_from_its_position_again() -> None:
    house = House()
    house.append(40)
    slow, quick = house.reader("slow"), house.reader("quick")
    read(slow, 10)
    read(quick)
    saved = house.store.get("ingest/_readers/slow.json").data
    for _ in range(2):  # it is lost, and restored, twice
        half_deleted(house, "slow")
        house.runtime.advance(DAY_S)
        house.collect()
        assert [*house.index().missing] == ["slow"]
        house.store.put("ingest/_readers/slow.json", saved)
        house.runtime.advance(6 * DAY_S)
        read(quick)
        house.collect()
        assert not house.index().missing
    assert "slow" in house.index().readers
    half_deleted(house, "slow")
    house.collect()
    again = house.reader("slow")
    assert again.first_sequence == 10
    assert not house.index().missing, "a reader that starts has a position again"


def test_f44_a_missing_position_is_noted_with_one_write() -> None:
    house = House()
    house.append(40)
    read(house.reader("slow"), 10)
    house.collect()
    half_deleted(house, "slow")
    house.collect()
    before = house.index()
    house.collect()
    assert house.index() == before
    (found,) = readers_of(Target(house.store, house.config, house.runtime), house.view())
    assert found.position_missing
    assert 0 < found.expires_seconds < 7 * DAY_S


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
