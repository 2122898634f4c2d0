"""Producers, workers and brokers as they are in production, and everything that happens to them."""

from __future__ import annotations

from tests.simulation.fleet import Fleet, simulate

SHARE = 0.015


def test_nothing_is_lost_and_nothing_is_done_twice_for_no_reason(seed: int) -> None:
    fleet = simulate(Fleet(seed))
    assert len(fleet.durable) > 200
    assert sum(fleet.done.values()) > 50
    assert sum(fleet.deeds.values()) > 10


def test_workers_that_are_fenced_leave_nothing_behind(seed: int) -> None:
    fleet = simulate(Fleet(seed, fences=True))
    assert fleet.deeds["fence"]
    assert len(fleet.durable) > 200
