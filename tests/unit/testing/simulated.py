"""A process in a simulation of its own, for tests of the simulation."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.simulation import SimRuntime, Simulation


def simulate(main: Callable[[Simulation, SimRuntime], None], seed: int = 1) -> Simulation:
    simulation = Simulation(seed, max_steps=20_000)
    runtime = simulation.process("p")
    simulation.run(lambda: main(simulation, runtime))
    return simulation
