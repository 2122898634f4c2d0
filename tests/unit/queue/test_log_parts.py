"""The parts of a log as values: their names, their bytes, and their order."""

from __future__ import annotations

import json

import pytest

from opendata_buffer import CorruptData
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.log_parts import (
    Part,
    begin_of_part,
    chain_of,
    end_of_part,
    name_ms,
    page_from_json,
    span_of_segment,
)
from opendata_buffer.queue.sidecar import LARGEST

ULID = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
ULID_MS = 1_724_233_027_197

PARTS = (Part(0, 8, 5, 9, "a"), Part(8, 20, 0, 7, "b"), Part(20, 24, 3, 3, "c"))


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
    assert end_of_part(key) == (LARGEST if end is None else end)


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
    assert begin_of_part(key) == first


@pytest.mark.parametrize(
    ("spans", "end", "chain"),
    [
        ([], 0, []),
        ([(0, 10), (10, 20)], 20, [(0, 10), (10, 20)]),
        ([(0, 10), (0, 15), (10, 20)], 20, [(0, 10), (10, 20)]),  # a lost race
        ([(0, 10), (5, 12), (10, 20), (20, 25)], 25, [(0, 10), (10, 20), (20, 25)]),  # overlapping
        ([(5, 30), (14, 28), (28, 42)], 42, [(14, 28), (28, 42)]),  # older
        ([(0, 10), (14, 20), (15, 18)], 20, [(0, 10), (14, 20)]),  # a gap
        ([(0, 10), (10, 20), (20, 30)], 15, [(0, 10), (10, 20)]),  # also in the manifest
    ],
)
def test_segments_of_a_lost_index_are_put_back_in_order(
    spans: list[tuple[int, int]], end: int, chain: list[tuple[int, int]]
) -> None:
    assert chain_of(spans, end) == chain


@pytest.mark.parametrize(
    ("spans", "end", "chain"),
    [
        ([(0, 10), (10, 20), (15, 25)], 20, [(0, 10), (10, 20)]),
        ([(0, 20), (0, 30)], 20, [(0, 30)]),
        ([(0, 10), (0, 20), (10, 15)], 12, [(0, 20)]),
        ([(0, 10), (20, 30)], 20, [(0, 10)]),
        ([(0, 10), (0, 12), (12, 20), (20, 30), (12, 25)], 30, [(0, 12), (12, 20), (20, 30)]),
    ],
)
def test_segments_that_lost_a_race_are_left_out_of_the_chain(
    spans: list[tuple[int, int]], end: int, chain: list[tuple[int, int]]
) -> None:
    assert chain_of(spans, end) == chain
