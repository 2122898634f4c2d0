"""Run a scenario with a seed. A failure prints the command that repeats it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.simulation.cluster import Cluster
from tests.support.simulation import Simulation, SimulationFailed

SHOWN = 80


def run(simulation: Simulation, main: Callable[[], None]) -> None:
    """Run a simulation. A failure shows the end of its history and the command that repeats it."""
    try:
        simulation.run(main)
    except SimulationFailed as error:
        failure = str(error)
    else:
        return
    history = "\n".join(simulation.history[-SHOWN:])
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0]
    again = f"OPENDATA_BUFFER_SEED={simulation.seed} ./run test {test}"
    pytest.fail(f"{failure}\n\n{history}\n\n{again}", pytrace=False)


def simulate(seed: int, scenario: Callable[[Cluster], None]) -> Cluster:
    """Run a scenario of one queue with one seed."""
    cluster = Cluster(seed)
    run(cluster.simulation, lambda: scenario(cluster))
    return cluster


def simulated(scenario: Callable[[Cluster], None]) -> Callable[[int], None]:
    """Make a test that runs a scenario of one queue with each seed.

    The scenario's assertions run inside the simulation, so a failure shows the history.
    """

    def test(seed: int) -> None:
        simulate(seed, scenario)

    test.__doc__ = scenario.__doc__
    return test
