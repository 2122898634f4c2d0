"""The collector against batches that are uploaded and not yet queued (failures F5, F6)."""

from __future__ import annotations

from tests.simulation.actors import (
    PlainProducer,
    SinkDriver,
    TransactionalProducer,
    run_readers,
    run_services,
)
from tests.simulation.scenario import simulate
from tests.simulation.world import World


def race(world: World) -> None:
    """Processes freeze between upload and append, for about the grace period."""
    world.grace_s = 60
    world.torments = ("long pause", "clock", "outage", "kill")
    world.ambushes = 0.08
    actors = [
        PlainProducer(world, "plain", 25),
        TransactionalProducer(world, "app", 15),
        SinkDriver(world, "query", 6),
    ]
    run_readers(world)
    run_services(world, world.simulation.random.sample(actors, 2))
    world.finish()


def test_f5_collector_never_deletes_what_becomes_durable(seed: int) -> None:
    simulate(seed, race, "test_gc_race.py")
