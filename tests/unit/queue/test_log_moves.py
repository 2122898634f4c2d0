"""Movers and collectors of a log that are killed or overtaken."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import CorruptData, InvalidInput
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.queue.log import Log, SegmentGone
from tests.unit.queue.test_log import Counting, House, read, small

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
    with pytest.raises(InvalidInput, match="is not a log"):
        log.need()
    with pytest.raises(CorruptData, match=r"is gone\. Restore its latest version"):
        log.need(marked=True)
    with pytest.raises(CorruptData, match="is gone"):
        house.reader("x")
