"""Running a scenario with a seed, and saying how to run it again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.world import World
from tests.support.simulation import SimulationFailed

SHOWN = 80


def simulate(seed: int, scenario: Callable[[World], None], where: str) -> World:
    """Run it; a failure shows the end of the history and the command that repeats it."""
    world = World(seed)
    failure = ""
    try:
        world.simulation.run(lambda: scenario(world))
    except SimulationFailed as error:
        failure = str(error)
    if failure:
        history = "\n".join(world.simulation.history[-SHOWN:])
        pytest.fail(
            f"{failure}\n\n{history}\n\n"
            f"OPENDATA_BUFFER_SEED={seed} ./run test tests/simulation/{where}",
            pytrace=False,
        )
    return world
