"""Consumers that take over from each other, and those that do not know it yet (failures F8, F9)."""

from __future__ import annotations

from tests.simulation.actors import PlainProducer, Reader, SinkDriver, run_readers, run_services
from tests.simulation.scenario import simulated
from tests.simulation.world import World

SHARE = 0.5
"""Of the seeds; see conftest.py."""


@simulated
def test_f8_fenced_consumers_acknowledge_nothing(world: World) -> None:
    """Readers are replaced while they still run, in the middle of whatever they do."""
    world.grace_s = 60
    world.disturbances = ("zombie", "zombie", "zombie", "short pause", "long pause", "kill")
    world.ambushes = 0.02
    run_readers(world)
    rivals = world.director.spawn(lambda: _rivals(world), "rivals")
    run_services(world, [PlainProducer(world, f"plain{n}", 40) for n in range(2)])
    rivals.join()
    world.finish()
    if world.model.counts["claims"] < 2:
        world.fail("nobody was fenced: the scenario tests nothing")
    # failure F9: the collectors of fenced consumers have ended, also where the consumer never
    # noticed.
    collecting = {name for name, at in world.listed.items() if world.simulation.now - at < 300}
    if collecting != {world.model.owner}:
        world.fail(f"{collecting} collect, but the queue belongs to {world.model.owner}")


def _rivals(world: World) -> None:
    """Start further readers beside the one that is kept alive; each lives until it is fenced."""
    for _ in range(1 + world.draw(5)):
        world.director.sleep(world.uniform(0, 5))
        node = world.node("rival")
        reader = Reader(world, node)
        hangs = world.chance(0.3)
        node.runtime.spawn(
            lambda reader=reader, hangs=hangs: reader.live(world.consumer_config(), hangs=hangs),
            "main",
        )
    # Long enough for the last one to get through to the store.
    world.director.sleep(300)


@simulated
def test_two_drivers_of_one_query_write_each_batch_once(world: World) -> None:
    """A query is started again while its old driver, thought dead, goes on committing."""
    query = SinkDriver(world, "query", 10)
    run_readers(world)
    run_services(world, [query], zombies=True)
    world.finish()
    world.model.check_complete(query.name, query.records)
