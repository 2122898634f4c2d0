"""What the demo counts while it runs."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from notebooks.demo import plot, progress
from notebooks.demo.findings import Delay, weeks
from notebooks.demo.progress import Counters, Mark


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_a_micro_batch_that_is_repeated_after_a_stop_counts_once() -> None:
    counters = Counters(1_000, {"EWR": 500}, {7: 200})
    assert counters.written == 200
    counters.on_batch(7, 200)
    counters.on_batch(8, 300)
    assert counters.written == 500
    assert counters.has_batch


def test_lag_is_the_age_of_the_oldest_row_that_is_not_in_parquet(clock: Clock) -> None:
    counters = Counters(1_000, {"EWR": 0}, {})
    counters._started = clock.now
    for seconds, durable in ((1, 100), (2, 200), (3, 300)):
        clock.now = 100.0 + seconds
        counters.on_durable("EWR", durable)
        counters.sample()
    assert counters.sample().lag_s == 2.0, "durable since second 1"
    counters.on_batch(0, 150)
    assert counters.sample().lag_s == 1.0, "row 151 came with those of second 2"
    assert counters.samples[-1].backlog == 150
    counters.on_batch(1, 150)
    assert counters.sample().lag_s == 0.0


def test_no_query_ran_before_it_was_ready_and_while_it_was_stopped() -> None:
    marks = [Mark(10, plot.READY, ""), Mark(30, plot.STOPPED, ""), Mark(36, plot.AGAIN, "")]
    assert plot.away(marks, 60) == [(0, 10), (30, 36)]
    assert plot.away(marks[:2], 60) == [(0, 10), (30, 60)], "interrupted there"
    assert plot.away([], 60) == [(0, 60)]


def test_a_week_weighs_each_flight_the_same_and_the_last_day_of_a_year_makes_none() -> None:
    first = date(2013, 1, 1)
    days = [Delay(first + timedelta(i), 1, 0.0) for i in range(365)]
    days[0] = Delay(first, 4, 10.0)
    found = weeks(days)
    assert len(found) == 52
    assert found[0] == Delay(first, 10, 4.0)
    assert (found[-1].begin, found[-1].departed) == (date(2013, 12, 24), 8)
    assert weeks([]) == []
    assert weeks(days[:3]) == [Delay(first, 6, 40 / 6)]
