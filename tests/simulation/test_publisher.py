"""Transactions over four partitions, whose publishers are killed anywhere, are all or nothing."""

from __future__ import annotations

from collections import Counter

from opendata_buffer.testing.faults import FaultPlan
from tests.simulation.publishing import NAMES, PublishingWorld, faults
from tests.simulation.scenario import run
from tests.support.simulation import SimRuntime, SimTask

SHARE = 0.15
"""Of the seeds; see conftest.py."""

PUBLISHERS = [("billing", "billing"), ("shipping", "shipping"), (None, "nameless")]


def live(world: PublishingWorld) -> None:
    """Publishers come, are killed, frozen or fenced, and come again; operators meddle."""
    topic = world.create()
    over = False
    readers: dict[str, SimTask] = {}

    def read_all() -> None:
        for name in topic.read().names:
            if name not in readers:
                process, store = world.node(f"reader of {name}")
                readers[name] = process.spawn(
                    lambda p=process, s=store, n=name: world.read(p, s, n, lambda: over),  # type: ignore[misc]
                    "main",
                )

    read_all()
    dead = []
    for _ in range(14):
        name, writer = PUBLISHERS[world.draw(3)]
        process, store = world.node(writer)
        task = process.spawn(
            lambda p=process, s=store, n=name, w=writer: world.run_publisher(p, s, n, w),  # type: ignore[misc]
            "main",
        )
        # With a name there may be an older one still: it is fenced, whatever it is at.
        if name is None or world.chance(0.7):
            task.join(world.simulation.random.uniform(0.5, 20))
            if task.is_alive() and (name is None or world.chance(0.6)):
                world.deeds["killed"] += 1
                world.simulation.kill(process)
                dead.append(store)
            elif task.is_alive() and world.chance(0.7):
                world.deeds["frozen"] += 1
                world.simulation.pause(process, world.simulation.random.uniform(1, 150))
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
    world.plan = FaultPlan()
    # Publishers that still run end, or are fenced by the last instance of their name.
    world.director.sleep(400)
    for name, writer in PUBLISHERS:
        process, store = world.node(writer)
        process.spawn(
            lambda p=process, s=store, n=name, w=writer: world.run_publisher(p, s, n, w),  # type: ignore[misc]
            "main",
        ).join()
    operator, way = world.node("operator")
    world.end_some(operator, way, everything=True)
    read_all()
    world.director.sleep(30)
    over = True
    for task in readers.values():
        task.join()
    world.check()


def test_whatever_happens_to_publishers_a_transaction_is_there_whole_or_not_at_all(
    seed: int,
) -> None:
    world = PublishingWorld(seed)
    world.plan = faults(world.simulation.random)
    run(world.simulation, lambda: live(world), "test_publisher.py")
    shares = world.shares()
    assert shares.get("committed", 0) >= 5, shares


def test_all_that_may_happen_to_publishers_does() -> None:
    # Any change of the program shifts what a seed does: they are tried until all has happened.
    missing = {"killed", "frozen", "Superseded", "landed late", "aborted"}
    missing |= {"expanded", "drained", "left", "refused"}
    deeds = Counter[str]()
    for seed in range(60):
        world = PublishingWorld(seed)
        world.plan = faults(world.simulation.random)
        world.simulation.run(lambda: live(world))  # noqa: B023
        deeds += world.deeds
        if missing <= deeds.keys():
            assert any(each.durable for each in world.singles.values())
            return
    raise AssertionError(deeds)


def one_transaction(world: PublishingWorld, kill_at: int | None) -> int:
    """A publisher with a name is killed before or after a write; the next instance ends it all.

    Returns:
        How many such points there are.
    """
    points = 0
    world.create()
    process, store = world.node("billing")

    def at_access(writer: SimRuntime, operation: str) -> None:
        nonlocal points
        if writer is process and operation in ("put", "put_if"):
            points += 1
            if points - 1 == kill_at:
                world.simulation.kill(process)

    world.on_access = at_access

    def publish() -> None:
        publisher = world.open_publisher(process, store, "billing")
        world.publish(publisher, process, "billing", roll_back=False, parts=NAMES)

    process.spawn(publish, "main").join()
    again, way = world.node("billing")
    again.spawn(
        lambda: world.publish(
            world.open_publisher(again, way, "billing"),
            again,
            "billing",
            roll_back=False,
            parts=NAMES,
        ),
        "main",
    ).join()
    for name in NAMES:
        reader, its = world.node(f"reader of {name}")
        until = world.simulation.now + 10
        reader.spawn(
            lambda r=reader, s=its, n=name, end=until: world.read(  # type: ignore[misc]
                r, s, n, lambda: world.simulation.now > end
            ),
            "main",
        ).join()
    world.check()
    return points


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
