"""The index of a log, its parts, and its view as values: bytes, changes, gaps, and counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import CorruptData
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue import log as module
from opendata_buffer.queue.log import (
    Log,
    LogIndex,
    LogView,
    Part,
    _begin_of_part,
    chain_of,
    end_of_gap,
    end_of_part,
    joined_ranges,
    name_ms,
    page_from_json,
    span_of_segment,
)
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.queue.test_log import LogFixture, small

__all__ = ["small"]

ULID = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
ULID_MS = 1_724_233_027_197

PARTS = (Part(0, 8, 5, 9, "a"), Part(8, 20, 0, 7, "b"), Part(20, 24, 3, 3, "c"))
FULL = LogIndex(
    queue_id="q",
    end=30,
    floor=4,
    levels=((PARTS[2],), PARTS[:2]),
    readers=("a", "b"),
    lost=((24, 30),),
    retention_ms=1,
    retention_bytes=2,
    reader_expiry_ms=3,
    changes=4,
    missing={"b": 5},
    others={"later": [6]},
)
FULL_JSON = {
    "version": 1,
    "queue": "q",
    "end": 30,
    "floor": 4,
    "levels": [[[20, 24, 3, 3, "c"]], [[0, 8, 5, 9, "a"], [8, 20, 0, 7, "b"]]],
    "readers": ["a", "b"],
    "lost": [[24, 30]],
    "retention_ms": 1,
    "retention_bytes": 2,
    "reader_expiry_ms": 3,
    "changes": 4,
    "missing": {"b": 5},
    "later": [6],
}


def test_an_index_is_read_and_written_as_in_earlier_releases() -> None:
    assert json.loads(FULL.to_json()) == FULL_JSON
    assert LogIndex.from_json(FULL.to_json()) == FULL
    least = {name: FULL_JSON[name] for name in ("version", "queue", "end", "floor")}
    least |= {"levels": [], "readers": []}
    made = LogIndex.from_json(json.dumps(least).encode())
    assert made == LogIndex("q", 30, 4)
    assert made.reader_expiry_ms == 604_800_000


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("readers", [1], "'readers' is .*not a list of names"),
        ("lost", [7], "'lost' is .*not a list of ranges"),
        ("lost", [[1, 2, 3]], "'lost' is .*not a list of ranges"),
        ("lost", [[1, "2"]], "'lost' is .*not a list of ranges"),
        ("missing", {"b": "5"}, "'missing' is .*not names with times in milliseconds"),
        ("levels", [7], "'levels' is .*not a list of parts"),
        ("levels", [[[0, 0, 1, 1, "a"]]], "'levels' is .*not a list of parts"),
        ("levels", [[[-1, 8, 1, 1, "a"]]], "'levels' is .*not a list of parts"),
        ("levels", [[[0, 8, 1, 1, ""]]], "'levels' is .*not a list of parts"),
        ("levels", [[[0, 8, 1, 1, "../a"]]], "'levels' is .*not a list of parts"),
        ("levels", [[[0, module.LARGEST + 1, 1, 1, "a"]]], "'levels' is .*not a list of parts"),
        ("end", 31, "'end' is 31, and not 24, where the last segment ends"),
    ],
)
def test_a_field_that_breaks_the_format_is_named(field: str, value: Any, says: str) -> None:
    with pytest.raises(CorruptData, match=says):
        LogIndex.from_json(json.dumps({**FULL_JSON, field: value}).encode())


def test_a_part_may_have_one_entry_and_end_at_the_largest_sequence() -> None:
    last = module.LARGEST
    index = LogIndex("q", last, 0, ((Part(last - 1, last, 0, 0, "a"),),))
    assert LogIndex.from_json(index.to_json()) == index


def test_a_page_lists_parts_in_order_and_refuses_invalid_values() -> None:
    rows = [[0, 8, 5, 9, "a"], [8, 20, 0, 7, "b"]]
    data = json.dumps({"version": 1, "parts": rows}).encode()
    assert page_from_json(data) == PARTS[:2]
    with pytest.raises(CorruptData, match="field 'parts' is 7, and not a list of parts"):
        page_from_json(json.dumps({"version": 1, "parts": [7]}).encode())


def test_a_part_stores_the_oldest_name_and_the_latest_record_time_of_its_entries() -> None:
    names = [f"p/{ULID}.batch", f"p/{ULID[:-16]}0000000000000000.batch", "p/by hand"]
    entries = [
        NewEntry(names[0], (Metadata(0, 70), Metadata(1, 90))),
        NewEntry(names[1], (Metadata(0, 80),)),
    ]
    manifest = Manifest.starting_at(40, 0).append(entries)
    assert Part.of(manifest, "x") == Part(40, 42, ULID_MS, 90, "x")
    before = Manifest.starting_at(40, 0).append([NewEntry(names[2], (Metadata(0, -5),))])
    assert Part.of(before, "x") == Part(40, 41, 0, 0, "x")
    assert Part.page(PARTS, "p") == Part(0, 24, 0, 9, "p")


@pytest.mark.parametrize(
    ("location", "time_ms"),
    [(f"p/{ULID}.batch", ULID_MS), (f"p/{ULID}/00000000000000fe", 0), ("p/by hand", 0)],
)
def test_only_the_name_of_a_batch_of_this_library_has_a_time(location: str, time_ms: int) -> None:
    assert name_ms(location) == time_ms


def test_every_change_of_an_index_is_counted_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    monkeypatch.setattr(module, "FAN", 1)
    changes = FULL.changes + 1
    assert FULL.changed() == replace(FULL, changes=changes)
    assert FULL.with_reader("0") == replace(FULL, changes=changes, readers=("0", "a", "b"))
    assert FULL.with_reader("b") == replace(FULL, changes=changes, missing={})
    assert FULL.without_readers(["a"]) == replace(FULL, changes=changes, readers=("b",))
    gone = FULL.without_readers(["a", "b"])
    assert gone == replace(FULL, changes=changes, readers=(), missing={})

    added = Part(30, 40, 1, 1, "d")
    levels = ((PARTS[2], added), PARTS[:2])
    assert FULL.with_segment(added) == replace(FULL, changes=changes, end=40, levels=levels)
    late = Part(33, 40, 1, 1, "d")
    assert FULL.with_segment(late).lost == ((24, 30), (30, 33))
    assert LogIndex("q", 0, 0).with_segment(PARTS[0]).levels == ((PARTS[0],),)

    page = Part(20, 24, 3, 3, "p")
    levels = ((), (*PARTS[:2], page))
    assert FULL.with_page(0, page) == replace(FULL, changes=changes, levels=levels)
    assert FULL.with_page(1, page).levels == ((PARTS[2],), PARTS[1:2], (page,))


@pytest.mark.parametrize(
    ("floor", "kept", "floor_then"),
    [(3, "abc", 4), (9, "abc", 9), (10, "bc", 10), (22, "c", 22), (26, "", 26)],
)
def test_parts_that_end_well_before_the_floor_are_forgotten(
    floor: int, kept: str, floor_then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    raised = FULL.with_floor(floor)
    assert "".join(part.name for part in raised.parts()) == kept
    assert (raised.floor, raised.changes) == (floor_then, FULL.changes + 1)
    assert raised.lost == FULL.lost


@pytest.mark.parametrize(("floor", "lost"), [(31, ((24, 30),)), (32, ())])
def test_lost_ranges_well_before_the_floor_are_forgotten(
    floor: int, lost: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    assert FULL.with_floor(floor).lost == lost


@pytest.mark.parametrize(
    ("key", "span", "end"),
    [
        ("i/_log/00-08-x.segment", (0, 8), 8),
        ("i/_log/07-08-x.segment", (7, 8), 8),
        ("i/_log/08-08-x.segment", None, 8),
        ("i/_log/00-08-x.page", None, 8),
        ("00-08-x.segment", (0, 8), 8),
        ("a-1/b-2/_log/00-08-x.segment", (0, 8), 8),
        ("i/_log/a-08-x.segment", None, 8),
        ("i/_log/\u0661-08-x.segment", None, 8),
        ("i/_log/00-\u0661-x.segment", None, None),
        ("i/_log/00-a-x.segment", None, None),
        ("i/_log/00-08.segment", None, None),
        ("i/_log/00-08-", None, None),
        ("i/_log/00-08", None, None),
        ("i/_log/note", None, None),
    ],
)
def test_the_name_of_a_segment_has_its_range_of_sequences(
    key: str, span: tuple[int, int] | None, end: int | None
) -> None:
    assert span_of_segment(key) == span
    assert end_of_part(key) == (module.LARGEST if end is None else end)


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("i/_log/07-08-x.segment", 7),
        ("07-08-x.page", 7),
        ("a-1/b-2/_log/07-08-x.page", 7),
        ("i/_log/note", -1),
        ("i/_log/\u0661-08-x.page", -1),
        ("i/_log/-08-x.page", -1),
    ],
)
def test_the_name_of_a_part_has_its_first_sequence(key: str, first: int) -> None:
    assert _begin_of_part(key) == first


@pytest.mark.parametrize(
    ("spans", "end", "chain"),
    [
        ([(0, 10), (10, 20), (15, 25)], 20, [(0, 10), (10, 20)]),
        ([(0, 20), (0, 30)], 20, [(0, 30)]),
        ([(0, 10), (20, 30)], 20, [(0, 10)]),
        ([(0, 10), (0, 12), (12, 20), (20, 30), (12, 25)], 30, [(0, 12), (12, 20), (20, 30)]),
    ],
)
def test_segments_that_lost_a_race_are_left_out_of_the_chain(
    spans: list[tuple[int, int]], end: int, chain: list[tuple[int, int]]
) -> None:
    assert chain_of(spans, end) == chain


def test_stored_segments_are_found_by_their_range_of_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LISTED", 2)
    store = MemoryStore()
    log = Log(store, QueueConfig(store="memory://x"), ManualRuntime())
    keys = [f"ingest/_log/{at:020d}-{at + 8:020d}-x.segment" for at in range(0, 64, 8)]
    page = f"ingest/_log/{8:020d}-{24:020d}-x.page"
    for key in (*keys, page, "ingest/_log/note", "ingest/a.batch"):
        store.put(key, b"")
    spans = [(at, at + 8, keys[at // 8]) for at in range(0, 64, 8)]
    assert log.stored_between(0, 64) == spans
    assert log.stored_between(8, 24) == spans[1:3]
    assert log.stored_between(7, 25) == spans[0:4]
    assert log.stored_between(15, 16) == spans[1:2]
    assert log.stored_between(64, 99) == []


def test_an_index_is_put_back_only_over_the_one_that_was_read() -> None:
    fixture = LogFixture()
    fixture.append(40)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    old = log.need()
    restored = old.changed(floor=3)
    log.put_back(old, restored)
    assert log.need() == restored
    with pytest.raises(TransientStorageError, match=r"_log.json' in memory://log was changed mean"):
        log.put_back(old, old.changed(floor=5))
    assert fixture.index() == restored
    # The owner marker has it too, so an older copy is refused from now on.
    fixture.store.put("ingest/_log.json", old.to_json())
    with pytest.raises(
        CorruptData, match=r"_log.json' in memory://log went backwards: it had .* run"
    ):
        fixture.index()


def test_each_segment_from_the_floor_on_is_read_or_reported_with_its_fault() -> None:
    fixture = LogFixture()
    fixture.append(200)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    index = log.need()
    whole = list(log.segments(index))
    assert [part.first for part, _ in whole] == sorted(part.first for part, _ in whole)
    assert all(isinstance(found, Manifest) for _, found in whole)
    assert sum(found.entry_count for _, found in whole if isinstance(found, Manifest)) == index.end
    fifth, last = whole[4][0], whole[-1][0]
    fixture.store.delete_many([f"ingest/_log/{fifth.name}"])
    log = Log(fixture.store, fixture.config, fixture.runtime)
    later = list(log.segments(replace(index, floor=fifth.first)))
    assert [part for part, _ in later] == [part for part, _ in whole[4:]]
    assert isinstance(later[0][1], CorruptData)
    assert all(isinstance(found, Manifest) for _, found in later[1:])
    after, _ = next(log.segments(replace(index, floor=fifth.end)))
    assert after == whole[5][0]
    assert list(log.segments(replace(index, floor=last.end))) == []


def test_gaps_that_overlap_or_touch_are_joined() -> None:
    ranges = [(5, 9), (0, 3), (9, 12), (20, 30), (22, 25)]
    assert joined_ranges(ranges) == [(0, 3), (5, 12), (20, 30)]
    gaps = [(3, 5), (5, 7), (9, 10)]
    found = [end_of_gap(sequence, gaps) for sequence in range(2, 11)]
    assert found == [2, 7, 7, 7, 7, 7, 8, 10, 10]


def view(
    first: int, index: LogIndex, manifest: Manifest, missing: tuple[tuple[int, int], ...] = ()
) -> LogView:
    runtime = ManualRuntime()
    log = Log(MemoryStore(), QueueConfig(store="memory://x"), runtime)
    return LogView(log, index, manifest, first, 3, "ingest/manifest", missing=missing)


def queued(first: int, count: int) -> Manifest:
    entries = [NewEntry(f"p/{ULID}.batch", (Metadata(0, 1_000 + n),)) for n in range(count)]
    return Manifest.starting_at(first, 0).append(entries)


def test_a_view_counts_the_present_entries_and_lists_the_missing_ranges() -> None:
    index = LogIndex(
        "q", 20, 4, ((Part(0, 8, 0, 0, "a"), Part(10, 20, 0, 0, "b")),), lost=((8, 10),)
    )
    found = view(4, index, queued(23, 7), missing=((9, 12), (15, 16)))
    assert found.lost == ((8, 10), (20, 23))
    assert list(found.gaps) == [(8, 12), (15, 16), (20, 23)]
    assert (found.next_sequence, found.entry_count) == (30, 26 - 4 - 1 - 3)
    assert found.count(9, 15) == 3
    assert found.count(9, 11) == 0
    assert found.count(20, 24) == 1
    assert found.count(30, 20) == 0
    available = [found.available_from(needed) for needed in (0, 7, 8, 11, 15, 22, 29)]
    assert available == [4, 7, 12, 12, 16, 23, 29]
    whole = view(4, replace(index, end=23, lost=()), queued(23, 7))
    assert list(whole.gaps) == []
    later = found.starting_at(26)
    assert (later.first_sequence, later.entry_count) == (26, 4)
    assert found.starting_at(2).first_sequence == 4


def test_a_view_of_a_manifest_alone_reads_its_entries() -> None:
    found = view(24, LogIndex("q", 23, 23), queued(23, 7))
    assert [each.sequence for each in found.entries()] == [*range(24, 30)]
    assert [each.sequence for each in found.entries(26, 2)] == [26, 27]
    for nothing in (found.entries(30), found.entries(31), found.entries(24, 0)):
        assert nothing == ()
    assert found.entries(24, -1) == ()
    assert not found.sealed
    assert view(0, LogIndex("q", 0, 0), Manifest.starting_at(0, 2**63 - 1)).sealed
    since = [found.since(time_ms) for time_ms in (0, 1_001, 1_002, 1_006, 1_007)]
    assert since == [24, 24, 25, 29, 30]
    assert found.find(f"p/{ULID}.batch", 23) == 23
    assert found.find("p/none", 23) is None


def test_the_age_of_a_segment_is_the_age_of_its_oldest_name() -> None:
    index = LogIndex("q", 20, 0, ((Part(0, 8, 1_000, 0, "a"), Part(8, 20, 0, 0, "b")),))
    found = view(0, index, queued(20, 2))
    assert found.age_s(3_500) == found.age_s(3_500, 7) == 2.5
    assert found.age_s(500, 7) == 0.0
    assert found.age_s(3_500, 8) is None
    assert found.age_s(3_500, 20) == 2.5
    assert found.age_s(3_501, 21) == 2.5
    assert found.age_s(3_500, 22) is None
    assert view(0, LogIndex("q", 20, 0), queued(20, 2)).age_s(3_500, 3) is None


def test_a_location_is_found_in_segments_and_in_the_manifest() -> None:
    fixture = LogFixture()
    fixture.append(60)
    found = fixture.view()
    assert found.index.parts()[0].end <= 20 < found.manifest.first_sequence < 59
    assert [found.find(fixture.locations[at], 0) for at in (3, 19, 59)] == [3, 19, 59]
    assert found.find(fixture.locations[59], 59) == 59
    assert found.find(fixture.locations[3], 20) is None, "earlier segments are not read"
    assert found.starting_at(20).find(fixture.locations[3], 0) is None
    assert found.find("ingest/other.batch", 0) is None
