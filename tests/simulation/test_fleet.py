"""Producers, workers and brokers as they are in production, and everything that happens to them."""

from __future__ import annotations

from tests.simulation.fleet import Fleet, simulate

SHARE = 0.5
DEFAULT_SEEDS = 200


def test_nothing_is_lost_and_nothing_is_done_twice_for_no_reason(seed: int) -> None:
    # Three brokers, and small enough for many seeds: three to a dozen deeds in five seconds.
    fleet = simulate(Fleet(seed, producers=3, workers=3, run_s=5, work_s=0.05))
    assert len(fleet.durable) > 20
    assert sum(fleet.done.values()) > 20
    assert sum(fleet.deeds.values()) > 2
