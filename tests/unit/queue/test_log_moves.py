"""Movers and collectors of a log that are killed or overtaken."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import CorruptData, InvalidInput
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_segments import SegmentGone, Segments
from tests.unit.queue.test_log import Counting, LogFixture, read, small

__all__ = ["small"]


class Killed(Exception):
    """The process is gone."""


class Dying(Counting):
    """Dies at a numbered write of the log's own objects, before or after it is applied."""

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


def append_until_killed(fixture: LogFixture) -> set[str]:
    """Append until the process dies, and return the names in the index before the last append."""
    while True:
        named = {f"ingest/_log/{each.name}" for each in fixture.index().parts()}
        try:
            fixture.append(1)
        except Killed:
            return named


@pytest.mark.parametrize("applied", [False, True])
def test_f43_a_mover_that_dies_between_any_two_writes_neither_loses_nor_repeats_an_entry(
    applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.queue.test_log.Counting", Dying)
    killed_in_segment = killed_in_index = 0
    for number in range(15, 40):  # the first moves are among these writes
        fixture = LogFixture()
        store = fixture.store
        assert isinstance(store, Dying)
        store.left, store.applied = number, applied
        before = append_until_killed(fixture)
        store.left = None
        segments = [each.key for each in store.list("ingest/_log/").objects]
        named = {f"ingest/_log/{each.name}" for each in fixture.index().parts()}
        killed_in_segment += len(set(segments) - named)
        killed_in_index += bool(named - before)
        durable = [each.location for each in fixture.view().entries()]
        fixture.queue = fixture.writer()
        fixture.append(30)
        got = fixture.reader("x")
        assert read(got) == list(range(fixture.manifest().next_sequence))
        locations = [each.location for each in fixture.view().entries()]
        assert len(set(locations)) == len(locations)
        assert locations[: len(durable)] == durable
    assert killed_in_segment
    assert killed_in_index or not applied


@pytest.mark.parametrize("another", [True, False])
def test_a_collector_that_was_overtaken_does_not_report_a_damaged_log(
    monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    fixture = LogFixture()
    fixture.append(60)

    def part_is_gone(self: Segments, index: object) -> None:
        monkeypatch.undo()
        if another:
            assert read(fixture.reader("reader")) == [*range(60)]
        raise SegmentGone("gone")

    monkeypatch.setattr(Segments, "oldest_name_ms", part_is_gone)
    with pytest.raises(
        TransientStorageError if another else SegmentGone,
        match="another collector has shortened the log" if another else "gone",
    ):
        fixture.collector().run_once()


def test_a_lost_index_is_distinguished_from_a_queue_that_was_never_a_log() -> None:
    fixture = LogFixture()
    fixture.store.delete_many(["ingest/_log.json"])
    log = Log(fixture.store, fixture.config, fixture.runtime)
    with pytest.raises(InvalidInput, match="is not a log"):
        log.need()
    with pytest.raises(CorruptData, match=r"is gone\. Restore its latest version"):
        log.need(marked=True)
    with pytest.raises(CorruptData, match="is gone"):
        fixture.reader("x")
