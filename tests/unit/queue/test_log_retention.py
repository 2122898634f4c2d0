"""What a retention keeps where the clock of a producer is wrong."""

from __future__ import annotations

import pytest

from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from tests.unit.queue.test_log import DAY_S, House, read, small

__all__ = ["small"]

YEAR_MS = 365 * DAY_S * 1000


class Clocks(House):
    """A log with a retention of a day, and producers whose clocks differ."""

    def __init__(self) -> None:
        super().__init__(retention_ms=DAY_S * 1000)

    def append_dated(self, *, ahead_ms: int, named: bool) -> None:
        """A batch whose record has a time that is ahead, and also its name if it is ``named``."""
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
    world = Clocks()
    reader = world.reader("reader")
    world.append(5)
    world.append_dated(ahead_ms=YEAR_MS, named=named)
    world.append(later)
    assert len(read(reader)) == 6 + later
    assert (world.index().end > 5) == (later == 40)
    assert world.floor_after(0.5) == 0
    assert world.floor_after(1) == 6 + later
    assert world.view().since(world.runtime.now_ms()) == world.view().next_sequence


def test_f50_a_batch_whose_times_are_all_ahead_is_as_old_as_the_next_one() -> None:
    world = Clocks()
    reader = world.reader("reader")
    world.append(1)
    world.append_dated(ahead_ms=YEAR_MS, named=True)
    world.append_dated(ahead_ms=YEAR_MS, named=True)
    world.runtime.advance(0.75 * DAY_S)
    world.append(1)
    world.runtime.advance(0.5 * DAY_S)
    read(reader)
    assert world.floor_after(0) == 1, "they may be as young as the batch after them"
    assert world.floor_after(0.75) == 4


def test_f50_batches_of_a_producer_that_is_ahead_stay_until_another_one_appends() -> None:
    world = Clocks()
    reader = world.reader("reader")
    for _ in range(30):
        world.append_dated(ahead_ms=YEAR_MS, named=True)
    read(reader)
    assert world.floor_after(3) == 0, "nothing says how old they are"
    world.append(1)
    read(reader)
    assert world.floor_after(0) == 0
    assert world.floor_after(1.5) == 31


def test_f50_old_segments_after_a_batch_from_the_future_say_that_it_is_old() -> None:
    world = Clocks()
    reader = world.reader("reader")
    world.append_dated(ahead_ms=YEAR_MS, named=True)
    world.append(60)
    read(reader)
    assert world.manifest().first_sequence > 13
    assert world.floor_after(2) == 61


def test_a_clock_that_is_a_little_ahead_changes_nothing() -> None:
    """A late batch of another producer must not make a young one look old."""
    world = Clocks()
    reader = world.reader("reader")
    world.append_dated(ahead_ms=60_000, named=True)
    world.append_dated(ahead_ms=-2 * DAY_S * 1000, named=True)
    read(reader)
    assert world.floor_after(0.5) == 0


def test_a_start_at_a_time_counts_the_times_of_records_as_they_are() -> None:
    world = Clocks()
    world.append(5)
    now_ms = world.runtime.now_ms()
    world.append_dated(ahead_ms=YEAR_MS, named=False)
    world.append(40)
    assert world.view().since(now_ms + YEAR_MS // 2) == 5
