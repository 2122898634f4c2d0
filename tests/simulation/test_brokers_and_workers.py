"""Producers, workers, and brokers as in production, with every kind of fault."""

from __future__ import annotations

import os

import pytest

from tests.simulation.broker_cluster import BrokerCluster, simulate

NIGHT = "OPENDATA_BUFFER_SEEDS" in os.environ


@pytest.mark.seeds(0.5, 200)
def test_nothing_is_lost_done_twice_or_taken_from_a_worker_without_reason(seed: int) -> None:
    # Small enough for many seeds: three brokers, and 3 to 12 faults in five seconds.
    cluster = simulate(BrokerCluster(seed, producers=3, workers=3, run_s=5, work_s=0.05))
    assert len(cluster.durable) > 20
    assert sum(cluster.done.values()) > 20
    assert sum(cluster.happened.values()) > 2


@pytest.mark.seeds(0.1)
def test_workers_that_are_fenced_leave_nothing_behind(seed: int) -> None:
    """Another consumer takes the queue over now and then."""
    cluster = simulate(
        BrokerCluster(seed, producers=4, workers=3, run_s=15, work_s=0.05, fences=True)
    )
    assert cluster.happened["fence"]
    assert len(cluster.durable) > 50


@pytest.mark.full
@pytest.mark.seeds(0.005)
def test_ten_producers_and_four_workers_lose_nothing(seed: int) -> None:
    """Takes up to a minute of processor time per seed, as the next test does."""
    cluster = simulate(BrokerCluster(seed))
    assert len(cluster.durable) > 200
    assert sum(cluster.done.values()) > 50
    assert sum(cluster.happened.values()) > 10


@pytest.mark.full
@pytest.mark.seeds(0.005)
def test_a_hundred_producers_and_twenty_workers_lose_nothing(seed: int) -> None:
    # Three seconds unless it is night, because records take most of the time, not processes.
    cluster = simulate(BrokerCluster(seed, producers=100, workers=20, run_s=30 if NIGHT else 3))
    assert len(cluster.durable) > (1_500 if NIGHT else 500)
    assert sum(cluster.done.values()) > (1_000 if NIGHT else 300)
