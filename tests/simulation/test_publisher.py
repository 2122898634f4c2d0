"""Transactions over partitions, whose publishers and queries are killed, are all or nothing."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from tests.simulation.publishing import (
    BATCHES,
    NAMES,
    QUERIES,
    PublishingWorld,
    faults,
    until_all_happened,
)
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan, HarshStore
from tests.support.simulation import SimRuntime, SimTask

SHARE = 0.15
"""Of the seeds; see conftest.py."""

WRITERS = [("billing", "billing"), ("shipping", "shipping"), (None, "nameless"), *QUERIES]
"""Publishers, by name and what their processes are called; and queries."""


def live(world: PublishingWorld) -> None:
    """Writers come, are killed, frozen or fenced, and come again; operators meddle."""
    topic = world.create()
    over = False
    readers: dict[str, SimTask] = {}

    def read_all() -> None:
        for name in topic.read().names:
            if name not in readers:
                process, store = world.node(f"reader of {name}")
                readers[name] = process.spawn(
                    partial(world.read, process, store, name, lambda: over), "main"
                )

    def start(writer: Any) -> tuple[SimRuntime, HarshStore, SimTask]:
        if writer in QUERIES:
            process, store = world.node(writer)
            life = partial(world.run_query, process, store, writer)
        else:
            process, store = world.node(writer[1])
            life = partial(world.run_publisher, process, store, *writer)
        return process, store, process.spawn(life, "main")

    read_all()
    dead = []
    for _ in range(22):
        writer = WRITERS[world.draw(len(WRITERS))]
        process, store, task = start(writer)
        # A nameless publisher runs alone. Of the others an older one is fenced, whatever it does.
        alone = writer == WRITERS[2]
        if alone or world.chance(0.7):
            task.join(world.uniform(0.5, 20))
            if task.is_alive() and (alone or world.chance(0.6)):
                world.deeds["killed"] += 1
                world.simulation.kill(process)
                dead.append(store)
            elif task.is_alive() and world.chance(0.7):
                world.deeds["frozen"] += 1
                world.simulation.pause(process, world.uniform(1, 150))
        if dead and world.chance(0.3):
            # What was on its way to the store when its process was killed.
            store = dead.pop(world.draw(len(dead)))
            world.deeds["landed late"] += store.late_puts
            store.land_late_puts()
        if world.chance(0.2):
            operator, way = world.node("operator")
            world.end_some(operator, way, everything=False)
        world.change(topic)
        read_all()
    world.plan = HarshPlan()
    # Writers that still run end, or are fenced by the last instance of their name.
    world.director.sleep(400)
    for writer in WRITERS:
        start(writer)[2].join()
    operator, way = world.node("operator")
    world.end_some(operator, way, everything=True)
    read_all()
    world.director.sleep(30)
    over = True
    for task in readers.values():
        task.join()
    assert set(world.committed.values()) == {BATCHES}
    world.check_empty()
    world.check()


def played(seed: int) -> PublishingWorld:
    world = PublishingWorld(seed)
    world.plan = faults(world.simulation.random)
    run(world.simulation, lambda: live(world))
    return world


def test_whatever_happens_to_publishers_a_transaction_is_there_whole_or_not_at_all(
    seed: int,
) -> None:
    world = played(seed)
    assert [each.fate for each in world.transactions].count("committed") >= 5


def test_all_that_may_happen_to_publishers_does() -> None:
    missing = {"killed", "frozen", "Superseded", "landed late", "aborted", "a single was durable"}
    missing |= {"expanded", "drained", "left", "refused", "query: Superseded"}

    def play(seed: int) -> Counter[str]:
        world = played(seed)
        world.deeds["a single was durable"] += any(s.durable for s in world.singles.values())
        return world.deeds

    until_all_happened(missing, play)


def one_transaction(world: PublishingWorld, kill_at: int | None) -> int:
    """A publisher with a name is killed before or after a write; the next instance ends it all.

    Returns:
        How many such points there are.
    """
    world.create()
    process, store = world.node("billing")
    world.kill_at_write(process, kill_at)

    def publish(runtime: SimRuntime, way: Any) -> None:
        publisher = world.open_publisher(runtime, way, "billing")
        world.publish(publisher, runtime, "billing", roll_back=False, parts=NAMES)

    for runtime, way in ((process, store), world.node("billing")):
        runtime.spawn(partial(publish, runtime, way), "main").join()
    for name in NAMES:
        reader, way = world.node(f"reader of {name}")
        end = world.simulation.now + 10
        over = partial(lambda end: world.simulation.now > end, end)
        reader.spawn(partial(world.read, reader, way, name, over), "main").join()
    world.check_empty()
    world.check()
    return world.writes


def run_once(kill_at: int | None) -> tuple[PublishingWorld, int]:
    world = PublishingWorld(7)
    points: list[int] = []
    world.simulation.run(lambda: points.append(one_transaction(world, kill_at)))
    return world, points[0]


def test_killed_between_any_two_steps_a_transaction_is_completed_or_rolled_back() -> None:
    world, points = run_once(None)
    assert [each.fate for each in world.transactions] == ["committed", "committed"]
    fates = []
    for kill_at in range(points):
        world, _ = run_once(kill_at)
        found = {record for name in NAMES for record in world.delivered[name]}
        # The first one, if it had come so far; and surely the one of the next instance.
        fates.append(b"0 0" in found and len(world.transactions) == 2)
        assert b"%d 0" % (len(world.transactions) - 1) in found
    assert fates == sorted(fates), "committed once the record is written, and from there on"
    assert fates.count(True) > 10
    assert fates.count(False) > 20
