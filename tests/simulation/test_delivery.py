"""Producers of two kinds of clients, one consumer with its collector; crashes, wrong clocks."""

from __future__ import annotations

from tests.simulation.actors import (
    GoProducer,
    PlainProducer,
    SinkDriver,
    TransactionalProducer,
    run_readers,
    run_services,
)
from tests.simulation.scenario import simulate
from tests.simulation.world import World


def deliver(world: World) -> None:
    plain = [PlainProducer(world, f"plain{n}", 50) for n in range(world.draw(3))]
    transactional = [TransactionalProducer(world, f"app{n}", 25) for n in range(1 + world.draw(2))]
    sinks = [SinkDriver(world, f"query{n}", 10) for n in range(world.draw(2))]
    others = [GoProducer(world, f"go{n}", 20) for n in range(world.draw(2))]
    run_readers(world)
    run_services(world, [*plain, *transactional, *sinks, *others])
    world.finish()
    for actor in (*transactional, *sinks):
        world.model.check_complete(actor.name, actor.records)


def test_everything_durable_arrives_once_and_in_order(seed: int) -> None:
    simulate(seed, deliver)
