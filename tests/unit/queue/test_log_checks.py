"""The index object of a log: how it is read, checked against the marker, and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer import CorruptData, InvalidInput, TransientStorageError
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import name_time_ms
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.hints import Action
from opendata_buffer.queue.log import Log, OldIndex
from opendata_buffer.queue.log_index import INDEX as INDEX_KIND
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import Part
from opendata_buffer.queue.log_segments import SegmentGone
from opendata_buffer.stores.base import Listing
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

INDEX = "ingest/_log.json"
MARKER = "ingest/_owner.json"
CONFIG = QueueConfig(store="memory://x")


class Watched(MemoryStore):
    """Records requests."""

    def __init__(self) -> None:
        super().__init__("x")
        self.requests: list[tuple[str, str]] = []
        self.limits: dict[str, int | None] = {}
        self.before_listing: Callable[[], None] = lambda: None

    def get(self, key: str, **options: Any) -> Any:
        self.requests.append(("get", key))
        self.limits[key] = options.get("max_bytes")
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: Any) -> Any:
        self.requests.append(("put_if", key))
        return super().put_if(key, data, condition)

    def list(self, prefix: str, **options: Any) -> Listing:
        self.requests.append(("list", prefix))
        self.before_listing()
        return super().list(prefix, **options)


class Fixture:
    """A log with segments up to sequence 8, and its marker."""

    def __init__(self) -> None:
        self.store = Watched()
        self.index = LogIndex("q", 8, 0, ((Part(0, 8, 0, 0, "a"),),), changes=5)
        self.put(self.index)
        self.mark(5)

    def put(self, index: LogIndex) -> None:
        self.store.put(INDEX, index.to_json())

    def mark(self, changes: int | None, queue_id: str = "q") -> None:
        marker: dict[str, Any] = {"version": 1, "manifest": "manifest", "id": queue_id}
        if changes is not None:
            marker["index_changes"] = changes
        self.store.put(MARKER, json.dumps(marker).encode())

    def marked(self) -> int | None:
        found = self.store.get(MARKER)
        assert found is not None
        changes: int | None = json.loads(found.data).get("index_changes")
        return changes

    def log(self, *queue_id: str, **reader: str) -> Log:
        return Log(self.store, CONFIG, ManualRuntime(), *queue_id, **reader)

    def requests(self) -> list[tuple[str, str]]:
        made, self.store.requests = self.store.requests, []
        return made


@pytest.fixture
def stored() -> Fixture:
    return Fixture()


def test_a_read_asks_for_the_marker_and_then_for_the_index(stored: Fixture) -> None:
    log = stored.log("q")
    assert log.last_seen is None
    assert log.read() == stored.index
    assert stored.requests() == [("get", MARKER), ("get", INDEX)]
    assert log.last_seen == stored.index


def test_no_more_than_an_index_may_have_is_read(stored: Fixture) -> None:
    stored.log().read()
    assert stored.store.limits[INDEX] == INDEX_KIND.max_bytes


@pytest.mark.parametrize("reader", ["billing", ""])
def test_the_errors_of_segments_give_advice_to_the_reader_of_the_log(
    stored: Fixture, reader: str
) -> None:
    log = stored.log(reader=reader) if reader else stored.log()
    assert log.reader == reader
    with pytest.raises(SegmentGone) as caught:
        log.segments.entries(log.need(), 0, 1)
    assert caught.value.hints[0].readers == ((reader,) if reader else ())


def test_the_segments_of_a_log_are_named_by_its_clock(stored: Fixture) -> None:
    log = stored.log()
    part = log.segments.add(Manifest.starting_at(8, 0).append([NewEntry("ingest/a.batch")]))
    ulid = part.name.removesuffix(".segment")[-26:]
    assert name_time_ms(f"ingest/{ulid}.batch") == log.runtime.now_ms()


@pytest.mark.parametrize(
    ("changes", "queue_id", "old"),
    [(6, "q", True), (5, "q", False), (None, "q", False), (6, "another", False)],
)
def test_f46_an_index_with_fewer_changes_than_the_marker_of_its_queue_is_old(
    stored: Fixture, changes: int | None, queue_id: str, old: bool
) -> None:
    stored.mark(changes, queue_id)
    log = stored.log()
    if not old:
        assert log.need() == stored.index
        return
    says = "'ingest/_log.json' in memory://x went backwards: it had 6 changes, and now 5"
    with pytest.raises(OldIndex, match=says) as read:
        log.need()
    with pytest.raises(OldIndex, match=says):
        log.change(lambda before: before and before.changed(floor=1))
    (hint,) = read.value.hints
    assert hint.action is Action.REPAIR_OLD_INDEX
    assert "fsck memory://x --repair" in str(read.value)


def test_f46_an_index_with_fewer_changes_than_were_read_before_is_old(stored: Fixture) -> None:
    stored.mark(None)
    log = stored.log()
    log.read()
    stored.put(LogIndex("q", 8, 0, stored.index.levels, changes=4))
    with pytest.raises(OldIndex, match="memory://x went backwards: it had 5 changes, and now 4"):
        log.read()


def test_the_latest_copy_of_an_index_can_be_restored(stored: Fixture) -> None:
    log = stored.log()
    log.read()
    stored.store.put(INDEX, stored.index.to_json() + b" ")
    assert log.read() == stored.index


def test_an_index_without_a_marker_can_be_read_and_changed(stored: Fixture) -> None:
    stored.store.delete_many([MARKER])
    log = stored.log()
    assert log.read() == log.need() == log.read_unclaimed() == stored.index
    assert log.queue_id == ""
    changed = log.change(lambda before: before and before.changed(floor=1))
    assert (changed.floor, log.need()) == (1, changed)


def test_a_queue_without_an_index_is_not_a_log(stored: Fixture) -> None:
    stored.store.delete_many([INDEX])
    log = stored.log()
    assert log.read() is None
    stored.requests()
    assert log.read_unclaimed() is None
    assert stored.requests() == [("get", MARKER), ("get", INDEX)] * 2
    says = "the queue with manifest 'ingest/manifest' in memory://x is not a log"
    with pytest.raises(InvalidInput, match=says) as plain:
        log.need()
    assert "readers enable memory://x" in str(plain.value)
    with pytest.raises(CorruptData, match=r"'ingest/_log\.json' in memory://x is gone") as gone:
        log.need(marked=True)
    assert "fsck memory://x --repair" in str(gone.value)


def test_f45_an_index_that_is_deleted_while_it_is_used_is_gone(stored: Fixture) -> None:
    log = stored.log()
    log.read()
    stored.store.delete_many([INDEX])
    with pytest.raises(CorruptData, match=r"'ingest/_log\.json' in memory://x is gone"):
        log.read()


def test_f45_the_index_of_another_queue_is_refused(stored: Fixture) -> None:
    says = "'ingest/_log.json' in memory://x is of queue q, and the queue is new: it was started"
    with pytest.raises(CorruptData, match=says) as caught:
        stored.log("new").read()
    assert "everything below 'ingest/_log/'" in str(caught.value)
    assert "'ingest/_owner.json' was lost" in str(caught.value)
    stored.mark(None, "new")
    unclaimed = stored.log()
    with pytest.raises(CorruptData, match=says):
        unclaimed.read_unclaimed()
    assert unclaimed.queue_id == "new"


def test_f46_stored_segments_of_the_gap_show_that_the_index_is_old(stored: Fixture) -> None:
    for first, end in ((8, 20), (20, 24), (24, 31)):
        stored.store.put(f"ingest/_log/{first:020d}-{end:020d}-x.segment", b"")
    log = stored.log()
    says = "it ends at 8, and segments of 8 to 30 are stored"
    with pytest.raises(OldIndex, match=says):
        log.check_gap(stored.index, Manifest.starting_at(28, 0))


def test_f46_a_gap_of_the_first_entry_is_searched_for_segments(stored: Fixture) -> None:
    stored.store.put(f"ingest/_log/{0:020d}-{1:020d}-x.segment", b"")
    empty = LogIndex("q", 0, 0)
    stored.mark(None)
    stored.put(empty)
    with pytest.raises(OldIndex, match="it ends at 0, and segments of 0 to 0 are stored"):
        stored.log().check_gap(empty, Manifest.starting_at(1, 0))


def test_a_gap_is_searched_once_and_only_if_there_is_one(stored: Fixture) -> None:
    log = stored.log()
    for first in (7, 8):
        log.check_gap(stored.index, Manifest.starting_at(first, 0))
        assert stored.requests() == []
    for first, listings in ((9, 1), (9, 0), (10, 1)):
        log.check_gap(stored.index, Manifest.starting_at(first, 0))
        assert stored.requests() == [("list", "ingest/_log/")] * listings


@pytest.mark.parametrize("deleted", [True, False])
def test_an_index_that_changes_during_a_gap_check_is_not_called_old(
    stored: Fixture, deleted: bool
) -> None:
    log = stored.log()
    index = log.need()
    part = Part(8, 20, 0, 0, "x")
    stored.store.put(f"ingest/_log/{8:020d}-{20:020d}-x.segment", b"")

    def change() -> None:
        if deleted:
            stored.store.delete_many([INDEX])
        else:
            stored.put(index.with_segment(part))

    stored.store.before_listing = change
    says = "'ingest/_log.json' in memory://x was changed while it was read: try again"
    with pytest.raises(TransientStorageError, match=says):
        log.check_gap(index, Manifest.starting_at(20, 0))


@pytest.mark.parametrize(("before", "after"), [(None, 6), (5, 6), (3, 6)])
def test_a_change_is_written_and_its_number_is_noted_in_the_marker(
    stored: Fixture, before: int | None, after: int
) -> None:
    stored.mark(before)
    log = stored.log()
    changed = log.change(lambda known: known and known.changed(floor=3))
    assert (changed.floor, changed.changes) == (3, 6)
    assert log.need() == stored.log().need() == changed
    assert stored.marked() == after


def test_the_first_change_of_an_index_is_noted_in_the_marker(stored: Fixture) -> None:
    stored.mark(None)
    stored.put(LogIndex("q", 0, 0))
    assert stored.log().change(lambda known: known and known.changed()).changes == 1
    assert stored.marked() == 1


def test_a_change_of_nothing_writes_nothing(stored: Fixture) -> None:
    log = stored.log()
    assert log.change(lambda known: known) == stored.index
    assert stored.requests() == [("get", MARKER), ("get", INDEX)]


def test_an_index_is_replaced_only_if_it_is_the_known_one(stored: Fixture) -> None:
    log = stored.log()
    new = stored.index.changed(floor=3)
    stale = LogIndex("q", 8, 1, stored.index.levels, changes=4)
    assert log.replace(stale, new) == stored.index
    assert log.need() == stored.index
    assert log.replace(stored.index, new) == new
    assert log.need() == new


def test_f46_an_index_is_put_back_over_one_that_is_old_or_gone(stored: Fixture) -> None:
    stored.mark(9)
    new = LogIndex("q", 8, 2, stored.index.levels, changes=10)
    stored.log().put_back(stored.index, new)
    assert stored.log().need() == new
    assert stored.marked() == 10
    stored.store.delete_many([INDEX])
    newer = new.changed(floor=3)
    stored.log().put_back(None, newer)
    assert (stored.log().need(), stored.marked()) == (newer, 11)
    with pytest.raises(
        TransientStorageError,
        match=r"_log\.json' in memory://x was changed meanwhile\. Stop producers",
    ):
        stored.log().put_back(None, new)
    assert (stored.log().need(), stored.marked()) == (newer, 11)
