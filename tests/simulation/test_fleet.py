"""Producers, workers and brokers as they are in production, and everything that happens to them."""

from __future__ import annotations

import os

import pytest

from tests.simulation.fleet import Fleet, simulate

NIGHT = "OPENDATA_BUFFER_SEEDS" in os.environ


@pytest.mark.seeds(0.5, 200)
def test_nothing_is_lost_and_nothing_is_done_twice_for_no_reason(seed: int) -> None:
    # Three brokers, and small enough for many seeds: three to a dozen deeds in five seconds.
    fleet = simulate(Fleet(seed, producers=3, workers=3, run_s=5, work_s=0.05))
    assert len(fleet.durable) > 20
    assert sum(fleet.done.values()) > 20
    assert sum(fleet.deeds.values()) > 2


@pytest.mark.seeds(0.1)
def test_workers_that_are_fenced_leave_nothing_behind(seed: int) -> None:
    """Another consumer takes the queue now and then."""
    fleet = simulate(Fleet(seed, producers=4, workers=3, run_s=15, work_s=0.05, fences=True))
    assert fleet.deeds["fence"]
    assert len(fleet.durable) > 50


@pytest.mark.slow
@pytest.mark.seeds(0.005)
def test_ten_producers_and_four_workers_lose_nothing(seed: int) -> None:
    """A minute of processor time for each seed at most; and of the next test."""
    fleet = simulate(Fleet(seed))
    assert len(fleet.durable) > 200
    assert sum(fleet.done.values()) > 50
    assert sum(fleet.deeds.values()) > 10


@pytest.mark.slow
@pytest.mark.seeds(0.005)
def test_a_hundred_producers_and_twenty_workers_lose_nothing(seed: int) -> None:
    # By day for a moment: most of the time goes to records, not to processes.
    fleet = simulate(Fleet(seed, producers=100, workers=20, run_s=30 if NIGHT else 3))
    assert len(fleet.durable) > (1_500 if NIGHT else 500)
    assert sum(fleet.done.values()) > (1_000 if NIGHT else 300)
