"""Running a scenario with a seed, and saying how to run it again."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.simulation.world import World
from tests.support.simulation import Simulation, SimulationFailed

SHOWN = 80


def run(simulation: Simulation, main: Callable[[], None]) -> None:
    """Run it; a failure shows the end of the history and the command that repeats it."""
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


def simulate(seed: int, scenario: Callable[[World], None]) -> World:
    """Run a scenario of one queue."""
    world = World(seed)
    run(world.simulation, lambda: scenario(world))
    return world


def simulated(scenario: Callable[[World], None]) -> Callable[[int], None]:
    """A test that runs a scenario of one queue with each seed."""

    def test(seed: int) -> None:
        simulate(seed, scenario)

    test.__doc__ = scenario.__doc__
    return test
