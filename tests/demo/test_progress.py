"""What the demo counts while it runs."""

from __future__ import annotations

import pytest

from notebooks.demo import progress
from notebooks.demo.progress import Counters


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
