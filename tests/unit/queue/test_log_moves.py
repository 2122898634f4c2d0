"""Movers and collectors of a log that are killed or overtaken."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from opendata_buffer import CorruptData, InvalidInput
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.batch import batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.queue import log_moves
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_moves import move_entries
from opendata_buffer.queue.log_segments import SegmentGone, Segments
from tests.support.log_fixture import Counting, LogFixture, read, small

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
    monkeypatch.setattr("tests.support.log_fixture.Counting", Dying)
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


# What moves, and how far.


class Moved:
    """A log whose manifest has entries that were not moved yet."""

    def __init__(self, count: int) -> None:
        self.fixture = LogFixture()
        self.log = Log(self.fixture.store, self.fixture.config, self.fixture.runtime)
        self.locations = [self.location() for _ in range(count)]

    def location(self, message: uuid.UUID | None = None) -> str:
        return batch_key("ingest", self.fixture.runtime.ulid(), message=message)

    def begin(self, sequence: int, producer: bytes = b"\1AAAAA") -> None:
        """Let a producer's transaction begin with this entry."""
        self.locations[sequence] = self.location(build_uuid(producer, 2, CONTINUE_TXN))

    def roll_back(self, sequence: int, producer: bytes = b"\1AAAAA") -> None:
        self.locations[sequence] = self.location(build_uuid(producer, 1, ACK_TXN))

    def manifest(self, first: int = 0) -> Manifest:
        entries = [NewEntry(location) for location in self.locations[first:]]
        return Manifest.starting_at(first, 7).append(entries)

    def end(self, first: int = 0) -> int:
        """Move entries, and return the end of the last segment."""
        index = move_entries(self.log, self.manifest(first))
        assert index is not None
        assert index == self.log.need()
        return index.end

    def stored(self) -> list[str]:
        return [info.key for info in self.fixture.store.list("ingest/").objects]


@pytest.mark.parametrize(("count", "end"), [(15, 0), (16, 0), (17, 13), (40, 36)])
def test_the_oldest_entries_of_a_long_manifest_are_moved_and_a_few_are_left(
    count: int, end: int
) -> None:
    assert Moved(count).end() == end


def test_entries_that_are_in_segments_do_not_count_as_the_length_of_a_manifest() -> None:
    queue = Moved(40)
    assert queue.end() == 36
    queue.locations += [queue.location() for _ in range(12)]
    assert queue.end() == queue.end(30) == queue.end(36) == 36, "16 entries are not moved"
    queue.locations.append(queue.location())
    assert queue.end() == 49


def test_many_entries_are_moved_into_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segments, "most_entries", 10)
    queue = Moved(40)
    assert queue.end() == 30, "16 entries need not be moved"
    spans = [(part.first, part.end) for part in queue.log.need().parts()]
    assert spans == [(0, 10), (10, 20), (20, 30)]


def test_a_queue_that_is_not_a_log_has_its_entries_left_in_its_manifest() -> None:
    queue = Moved(40)
    queue.fixture.store.delete_many(["ingest/_log.json"])
    assert move_entries(queue.log, queue.manifest()) is None
    assert not any(key.startswith("ingest/_log") for key in queue.stored())


def test_entries_are_moved_up_to_the_first_transaction_that_is_open() -> None:
    queue = Moved(60)
    queue.begin(20)
    queue.begin(30, b"\1BBBBB")
    assert queue.end() == 20
    assert queue.end() == 20, "the transaction is still open"
    assert queue.end(20) == 20
    queue.roll_back(40)
    assert queue.end() == 30
    queue.roll_back(50, b"\1BBBBB")
    assert queue.end(10) == 56


def test_an_open_transaction_whose_first_entry_was_moved_by_an_earlier_release_is_passed() -> None:
    queue = Moved(40)
    assert queue.end() == 36
    queue.begin(3)
    queue.locations += [queue.location() for _ in range(20)]
    assert queue.end() == 56


def test_a_manifest_without_messages_is_not_searched_for_transactions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def searched(entries: object, prefix: str) -> None:
        raise AssertionError

    monkeypatch.setattr(log_moves, "undecided", searched)
    assert Moved(40).end() == 36


def test_f42_entries_that_were_removed_before_they_were_moved_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = Moved(60)
    assert queue.end() == 56
    assert caplog.messages == []
    queue.locations += [queue.location() for _ in range(40)]
    assert queue.end(58) == 96
    assert queue.log.need().lost == ((56, 58),)
    (said,) = caplog.messages
    assert said.startswith(
        "sequences 56 to 57 were removed from manifest 'ingest/manifest' by a consumer that does "
        "not know logs (the manifest has epoch 7)."
    )


@pytest.mark.parametrize(
    ("skipped", "says"),
    [
        (
            [30, 58],
            "manifest 'ingest/manifest' was rebuilt: the log continues at sequence 58 after 55",
        ),
        ([30, 57], "sequences 56 to 57 were removed from manifest 'ingest/manifest'"),
    ],
)
def test_sequences_that_a_repair_skipped_are_not_reported_as_removed(
    skipped: list[int], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Moved(100)
    queue.locations, later = queue.locations[:60], queue.locations
    assert queue.end() == 56
    store = queue.fixture.store
    marker = json.loads(store.get("ingest/_owner.json").data)
    store.put("ingest/_owner.json", json.dumps({**marker, "skipped": [skipped]}).encode())
    queue.locations = later
    assert queue.end(58) == 96
    (said,) = caplog.messages
    assert said.startswith(says)


def test_a_move_without_a_gap_does_not_ask_which_sequences_a_repair_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(*queue: object) -> None:
        raise AssertionError

    monkeypatch.setattr(log_moves, "skipped_ranges", asked)
    assert Moved(40).end() == 36


def test_a_log_with_many_segments_gets_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segments, "most_entries", 4)
    queue = Moved(60)
    assert queue.end() == 44
    index = queue.log.need()
    assert [len(level) for level in index.levels] == [5, 2]
    spans = [(part.first, part.end) for part, _ in queue.log.segments.each(index)]
    assert spans == [(at, at + 4) for at in range(0, 44, 4)]


def test_a_move_that_has_nothing_to_move_reads_the_marker_and_the_index_once() -> None:
    queue = Moved(40)
    queue.end()
    requests = queue.fixture.store.requests
    requests.clear()
    move_entries(queue.log, queue.manifest())
    assert requests == {("get", "ingest/_owner.json"): 1, ("get", "ingest/_log.json"): 1}
