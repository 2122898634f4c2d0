"""A deployment with brokers and workers, whose queue another consumer takes now and then."""

from __future__ import annotations

from tests.simulation.fleet import Fleet, simulate

SHARE = 0.1


def test_workers_that_are_fenced_leave_nothing_behind(seed: int) -> None:
    fleet = simulate(Fleet(seed, producers=4, workers=3, run_s=15, work_s=0.05, fences=True))
    assert fleet.deeds["fence"]
    assert len(fleet.durable) > 50
