"""Running a scenario with a seed, and saying how to run it again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.world import World
from tests.support.simulation import Simulation, SimulationFailed

SHOWN = 80


def run(simulation: Simulation, main: Callable[[], None], where: str) -> None:
    """Run it; a failure shows the end of the history and the command that repeats it."""
    failure = ""
    try:
        simulation.run(main)
    except SimulationFailed as error:
        failure = str(error)
    if failure:
        history = "\n".join(simulation.history[-SHOWN:])
        pytest.fail(
            f"{failure}\n\n{history}\n\n"
            f"OPENDATA_BUFFER_SEED={simulation.seed} ./run test tests/simulation/{where}",
            pytrace=False,
        )


def simulate(seed: int, scenario: Callable[[World], None], where: str) -> World:
    """Run a scenario of one queue."""
    world = World(seed)
    run(world.simulation, lambda: scenario(world), where)
    return world
