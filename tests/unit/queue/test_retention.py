"""The floor of a log: what readers and the retention keep, even with wrong clocks."""

from __future__ import annotations

import pytest

from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import Part
from opendata_buffer.queue.retention import AHEAD_MS, floor_of, full_since, kept_since
from tests.support.log_fixture import DAY_S, LogFixture, read, small
from tests.unit.queue.test_log_view import view

__all__ = ["small"]

YEAR_MS = 365 * DAY_S * 1000


class LogWithRetention(LogFixture):
    """A log with a retention of a day, and producers whose clocks differ."""

    def __init__(self) -> None:
        super().__init__(retention_ms=DAY_S * 1000)

    def append_dated(self, *, ahead_ms: int, named: bool) -> None:
        """Append a batch whose record time is ahead, and also the time in its name if ``named``."""
        now_ms = self.runtime.now_ms()
        if named:
            self.runtime.set_wall_clock(now_ms + ahead_ms)
        location = f"ingest/{self.runtime.ulid()}.batch"
        self.runtime.set_wall_clock(now_ms)
        self.store.put(location, encode_batch([b"x"]))
        self.locations.append(location)
        self.queue.append([NewEntry(location, (Metadata(0, now_ms + ahead_ms, b""),))])

    def floor_after(self, days: float) -> int:
        self.runtime.advance(days * DAY_S)
        self.collect()
        return self.index().floor


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("later", [3, 40])  # in the manifest, in a segment
def test_f50_a_record_from_the_future_does_not_stop_the_retention(named: bool, later: int) -> None:
    fixture = LogWithRetention()
    reader = fixture.reader("reader")
    fixture.append(5)
    fixture.append_dated(ahead_ms=YEAR_MS, named=named)
    fixture.append(later)
    assert len(read(reader)) == 6 + later
    assert (fixture.index().end > 5) == (later == 40)
    assert fixture.floor_after(0.5) == 0
    assert fixture.floor_after(1) == 6 + later
    assert fixture.view().since(fixture.runtime.now_ms()) == fixture.view().next_sequence


def test_f50_a_batch_whose_times_are_all_ahead_gets_the_age_of_the_next_batch() -> None:
    fixture = LogWithRetention()
    reader = fixture.reader("reader")
    fixture.append(1)
    fixture.append_dated(ahead_ms=YEAR_MS, named=True)
    fixture.append_dated(ahead_ms=YEAR_MS, named=True)
    fixture.runtime.advance(0.75 * DAY_S)
    fixture.append(1)
    fixture.runtime.advance(0.5 * DAY_S)
    read(reader)
    assert fixture.floor_after(0) == 1, "the batches may be as young as the one after them"
    assert fixture.floor_after(0.75) == 4


def test_f50_batches_of_a_producer_that_is_ahead_are_kept_until_another_producer_appends() -> None:
    fixture = LogWithRetention()
    reader = fixture.reader("reader")
    for _ in range(30):
        fixture.append_dated(ahead_ms=YEAR_MS, named=True)
    read(reader)
    assert fixture.floor_after(3) == 0, "their age is unknown"
    fixture.append(1)
    read(reader)
    assert fixture.floor_after(0) == 0
    assert fixture.floor_after(1.5) == 31


def test_f50_old_segments_after_a_batch_from_the_future_show_its_age() -> None:
    fixture = LogWithRetention()
    reader = fixture.reader("reader")
    fixture.append_dated(ahead_ms=YEAR_MS, named=True)
    fixture.append(60)
    read(reader)
    assert fixture.manifest().first_sequence > 13
    assert fixture.floor_after(2) == 61


def test_a_clock_that_is_a_little_ahead_changes_nothing() -> None:
    """A late batch of another producer must not make a young batch look old."""
    fixture = LogWithRetention()
    reader = fixture.reader("reader")
    fixture.append_dated(ahead_ms=60_000, named=True)
    fixture.append_dated(ahead_ms=-2 * DAY_S * 1000, named=True)
    read(reader)
    assert fixture.floor_after(0.5) == 0


def test_a_start_at_a_time_uses_the_record_times_as_written() -> None:
    fixture = LogWithRetention()
    fixture.append(5)
    now_ms = fixture.runtime.now_ms()
    fixture.append_dated(ahead_ms=YEAR_MS, named=False)
    fixture.append(40)
    assert fixture.view().since(now_ms + YEAR_MS // 2) == 5


NOW_MS = 100 * AHEAD_MS
SINCE_MS = NOW_MS - 10 * AHEAD_MS


@pytest.mark.parametrize(
    ("times", "kept", "why"),
    [
        ([SINCE_MS - 1, SINCE_MS], 21, "the first batch that is young enough"),
        ([SINCE_MS - 1, SINCE_MS - 1], 22, "no batch is young enough"),
        ([None, SINCE_MS], 21, "a batch without any time is old"),
        ([None, None], 22, "a batch without any time is old"),
        ([NOW_MS, SINCE_MS - 1], 20, "an old batch of another producer came late"),
        ([NOW_MS + AHEAD_MS, SINCE_MS - 1], 20, "a clock may be an hour ahead"),
        ([NOW_MS + AHEAD_MS + 1, SINCE_MS - 1], 22, "a clock is wrong, and the next batch is old"),
        ([NOW_MS + AHEAD_MS + 1, SINCE_MS], 20, "a clock is wrong, and the next batch is young"),
    ],
)
def test_a_retention_keeps_the_batches_from_the_first_young_one_on(
    times: list[int | None], kept: int, why: str
) -> None:
    entries = [
        NewEntry("ingest/by hand", () if time_ms is None else (Metadata(0, time_ms, b""),))
        for time_ms in times
    ]
    old = Part(0, 20, 0, SINCE_MS - 1, "not read")
    log = view(0, LogIndex("q", 20, 0, ((old,),)), Manifest.starting_at(20, 0).append(entries))
    assert kept_since(log, SINCE_MS, NOW_MS) == kept, why


INDEX = LogIndex("q", end=80, floor=10)


@pytest.mark.parametrize(
    ("positions", "retained_from", "floor", "why"),
    [
        ({}, None, 10, "without readers and retention nothing is deleted"),
        ({"a": 30}, None, 30, "all readers have acknowledged"),
        ({"a": 30, "b": 20}, None, 20, "the slowest reader decides"),
        ({"a": 30, "b": 20}, 15, 15, "the retention keeps more than the readers"),
        ({"a": 30}, 50, 30, "unread batches are kept after the retention"),
        ({}, 50, 50, "without readers the retention decides alone"),
        ({"a": 100}, None, 100, "everything was read"),
        ({"a": 120}, 130, 100, "never beyond the end"),
        ({"a": 5}, None, 10, "a floor never falls"),
        ({}, 5, 10, "the floor does not fall for a longer retention either"),
    ],
)
def test_the_floor_is_the_lowest_sequence_that_readers_or_the_retention_need(
    positions: dict[str, int], retained_from: int | None, floor: int, why: str
) -> None:
    assert floor_of(INDEX, positions, 100, retained_from) == floor, why


@pytest.mark.parametrize(
    ("wanted", "since"),
    [(0, 11), (1, 11), (30, 11), (31, 9), (50, 9), (51, 4), (60, 4), (61, None)],
)
def test_full_since_finds_the_latest_minute_with_enough_bytes_after_it(
    wanted: int, since: int | None
) -> None:
    sizes = {5: 10, 12: 30, 10: 20}
    # One minute earlier: a batch gets its name after its first records were ingested.
    assert full_since(sizes, wanted) == (None if since is None else since * 60_000)
