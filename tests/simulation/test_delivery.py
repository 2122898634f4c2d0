"""Producers, a consumer with its collector, crashes, pauses, wrong clocks, lost answers."""

from __future__ import annotations

from opendata_buffer.config import ProducerConfig
from tests.simulation.actors import PlainProducer, Reader, SinkDriver, TransactionalProducer
from tests.simulation.scenario import simulate
from tests.simulation.world import Node, World

Actor = PlainProducer | TransactionalProducer | SinkDriver


def service(world: World, actors: list[Actor], config: ProducerConfig, node: Node) -> None:
    """A process in which several producers share one committer."""
    tasks = [
        node.runtime.spawn(lambda actor=actor: actor.live(node, config), actor.name)
        for actor in actors
        if not actor.done
    ]
    for task in tasks:
        task.join()


def deliver(world: World) -> None:
    plain = [PlainProducer(world, f"plain{n}", 50) for n in range(world.draw(3))]
    transactional = [TransactionalProducer(world, f"app{n}", 25) for n in range(1 + world.draw(2))]
    sinks = [SinkDriver(world, f"query{n}", 10) for n in range(world.draw(2))]
    world.supervise(
        "reader",
        lambda node: Reader(world, node).live(world.consumer_config()),
        lambda: False,
        zombies=True,
    )
    processes: list[list[Actor]] = [[]]
    for actor in (*plain, *transactional, *sinks):
        if processes[-1] and world.chance(0.6):
            processes.append([])
        processes[-1].append(actor)
    supervisors = [
        world.supervise(
            f"service{n}",
            lambda node, actors=actors: service(world, actors, world.producer_config(), node),
            lambda actors=actors: all(actor.done for actor in actors),
        )
        for n, actors in enumerate(processes)
    ]
    for supervisor in supervisors:
        supervisor.join()
    world.heal()
    world.await_drained()
    world.model.check_delivered()
    for actor in (*transactional, *sinks):
        world.model.check_complete(actor.name, actor.records)
    world.check_no_leaks()


def test_everything_durable_arrives_once_and_in_order(seed: int) -> None:
    simulate(seed, deliver, "test_delivery.py")
