"""The same deployment at its full size: a minute of processor time for each seed at most."""

from __future__ import annotations

import os

import pytest

from tests.simulation.fleet import Fleet, simulate

SHARE = 0.005
NIGHT = "OPENDATA_BUFFER_SEEDS" in os.environ

pytestmark = pytest.mark.slow


def test_ten_producers_and_four_workers_lose_nothing(seed: int) -> None:
    fleet = simulate(Fleet(seed))
    assert len(fleet.durable) > 200
    assert sum(fleet.done.values()) > 50
    assert sum(fleet.deeds.values()) > 10


def test_a_hundred_producers_and_twenty_workers_lose_nothing(seed: int) -> None:
    # By day for a moment: most of the time goes to records, not to processes.
    fleet = simulate(Fleet(seed, producers=100, workers=20, run_s=30 if NIGHT else 3))
    assert len(fleet.durable) > (1_500 if NIGHT else 500)
    assert sum(fleet.done.values()) > (1_000 if NIGHT else 300)
