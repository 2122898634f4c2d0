"""The index of a log as a value: its bytes, its changes, and gaps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import CorruptData
from opendata_buffer.queue import log_index
from opendata_buffer.queue.log_index import LogIndex, end_of_gap, joined_ranges
from opendata_buffer.queue.log_parts import (
    Part,
)
from opendata_buffer.queue.sidecar import LARGEST

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
        ("levels", [[[0, LARGEST + 1, 1, 1, "a"]]], "'levels' is .*not a list of parts"),
        ("levels", [[[0, 8, 1, 1, "a"], [9, 30, 1, 1, "b"]]], "'levels' .*'b' does not begin at 8"),
        ("end", 31, "'end' is 31, and not 24, where the last segment ends"),
    ],
)
def test_a_field_that_breaks_the_format_is_named(field: str, value: Any, says: str) -> None:
    with pytest.raises(CorruptData, match=says):
        LogIndex.from_json(json.dumps({**FULL_JSON, field: value}).encode())


def test_a_part_may_have_one_entry_and_end_at_the_largest_sequence() -> None:
    last = LARGEST
    index = LogIndex("q", last, 0, ((Part(last - 1, last, 0, 0, "a"),),))
    assert LogIndex.from_json(index.to_json()) == index


def test_every_change_of_an_index_is_counted_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_index, "REMEMBERED", 2)
    monkeypatch.setattr(log_index, "FAN", 1)
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


def test_the_oldest_parts_of_the_lowest_full_level_get_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_index, "FAN", 2)
    parts = tuple(Part(at, at + 1, 0, 0, f"{at}") for at in range(8))
    assert LogIndex("q", 8, 0, (parts[5:], parts[:3])).full_level() is None
    assert LogIndex("q", 8, 0, (parts[4:],)).full_level() == (0, parts[4:6])
    assert LogIndex("q", 8, 0, (parts[4:], parts[:4])).full_level() == (0, parts[4:6])
    assert LogIndex("q", 8, 0, (parts[5:], parts[:5])).full_level() == (1, parts[:2])


@pytest.mark.parametrize(
    ("floor", "kept", "floor_then"),
    [(3, "abc", 4), (9, "abc", 9), (10, "bc", 10), (22, "c", 22), (26, "", 26)],
)
def test_parts_that_end_well_before_the_floor_are_forgotten(
    floor: int, kept: str, floor_then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_index, "REMEMBERED", 2)
    raised = FULL.with_floor(floor)
    assert "".join(part.name for part in raised.parts()) == kept
    assert (raised.floor, raised.changes) == (floor_then, FULL.changes + 1)
    assert raised.lost == FULL.lost


@pytest.mark.parametrize(("floor", "lost"), [(31, ((24, 30),)), (32, ())])
def test_lost_ranges_well_before_the_floor_are_forgotten(
    floor: int, lost: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_index, "REMEMBERED", 2)
    assert FULL.with_floor(floor).lost == lost


def test_gaps_that_overlap_or_touch_are_joined() -> None:
    ranges = [(5, 9), (0, 3), (9, 12), (20, 30), (22, 25)]
    assert joined_ranges(ranges) == [(0, 3), (5, 12), (20, 30)]
    gaps = [(3, 5), (5, 7), (9, 10)]
    found = [end_of_gap(sequence, gaps) for sequence in range(2, 11)]
    assert found == [2, 7, 7, 7, 7, 7, 8, 10, 10]
