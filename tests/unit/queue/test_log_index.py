"""The index of a log, and the floor: functions of values."""

from __future__ import annotations

import pytest

from opendata_buffer.queue.log_index import LogIndex, Part, chain_of, floor_of

INDEX = LogIndex("q", end=80, floor=10)


@pytest.mark.parametrize(
    ("positions", "retained_from", "floor", "why"),
    [
        ({}, None, 10, "without readers and retention nothing goes"),
        ({"a": 30}, None, 30, "all readers have acknowledged"),
        ({"a": 30, "b": 20}, None, 20, "the slowest reader holds"),
        ({"a": 30, "b": 20}, 15, 15, "the retention holds, too"),
        ({"a": 30}, 50, 30, "a retention that is over lets nothing go that is not read"),
        ({}, 50, 50, "without readers the retention decides alone"),
        ({"a": 100}, None, 100, "all is read"),
        ({"a": 120}, 130, 100, "never beyond the end"),
        ({"a": 5}, None, 10, "a floor never falls"),
        ({}, 5, 10, "nor for a longer retention"),
    ],
)
def test_the_floor_is_the_lowest_of_what_readers_and_retention_need(
    positions: dict[str, int], retained_from: int | None, floor: int, why: str
) -> None:
    assert floor_of(INDEX, positions, 100, retained_from) == floor, why


@pytest.mark.parametrize(
    ("spans", "end", "chain"),
    [
        ([], 0, []),
        ([(0, 10), (10, 20)], 20, [(0, 10), (10, 20)]),
        ([(0, 10), (0, 15), (10, 20)], 20, [(0, 10), (10, 20)]),
        ([(0, 10), (5, 12), (10, 20), (20, 25)], 25, [(0, 10), (10, 20), (20, 25)]),
        ([(5, 30), (14, 28), (28, 42)], 42, [(14, 28), (28, 42)]),
        ([(0, 10), (14, 20), (15, 18)], 20, [(0, 10), (14, 20)]),
        ([(0, 10), (10, 20), (20, 30)], 15, [(0, 10), (10, 20)]),
    ],
    ids=[
        "none",
        "in order",
        "a lost race",
        "overlapping",
        "older",
        "a gap",
        "in the manifest, too",
    ],
)
def test_segments_of_a_lost_index_are_put_in_a_row(
    spans: list[tuple[int, int]], end: int, chain: list[tuple[int, int]]
) -> None:
    assert chain_of(spans, end) == chain


def test_what_is_missing_before_a_segment_is_noted_as_lost() -> None:
    index = INDEX.with_segment(Part(95, 99, 1, 1, "95-99-x.segment"))
    assert index.lost == ((80, 95),)
    assert LogIndex.from_json(index.to_json()) == index
