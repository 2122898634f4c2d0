"""The fleet at its full size: a hundred producers, twenty workers."""

from __future__ import annotations

import pytest

from tests.simulation.fleet import Fleet, simulate

pytestmark = pytest.mark.slow
SHARE = 0.005


def test_a_hundred_producers_and_twenty_workers(seed: int) -> None:
    fleet = simulate(Fleet(seed, producers=100, workers=20, run_s=20))
    assert len(fleet.durable) > 2_000
