"""The collector against batches that are uploaded and not yet queued (failures F5, F6)."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.actors import (
    PlainProducer,
    SinkDriver,
    TransactionalProducer,
    collect_garbage,
    run_readers,
    run_services,
)
from tests.simulation.scenario import simulated
from tests.simulation.world import MAX_SKEW_MS, World

SHARE = 0.5
"""Of the seeds; see conftest.py."""


@simulated
def test_f5_collector_never_deletes_what_becomes_durable(world: World) -> None:
    """Processes freeze between upload and append, for about the grace period."""
    world.grace_s = 60
    world.disturbances = ("long pause", "clock", "outage", "kill")
    world.ambushes = 0.08
    actors = [
        PlainProducer(world, "plain", 25),
        TransactionalProducer(world, "app", 15),
        SinkDriver(world, "query", 6),
    ]
    run_readers(world)
    if world.chance(0.5):
        world.supervise("cron", lambda node: collect_garbage(world, node), lambda: False)
    run_services(world, world.simulation.random.sample(actors, 2))
    world.finish()
    if not world.model.counts["collected"]:
        world.fail("nothing was collected: the scenario tests nothing")
    if not sum(world.deeds.values()):
        world.fail("no process was held up: the scenario tests nothing")


@simulated
def test_f6_a_store_with_a_wrong_clock_never_makes_the_collector_delete_young_batches(
    world: World,
) -> None:
    """The store's clock is wrong for hours, or its answers tell a wrong time now and then."""
    world.grace_s = 60
    world.disturbances = ("short pause", "outage")
    # Far ahead is what makes young batches look old.
    error_ms = round(world.uniform(2, 20) * world.grace_s * 1000)
    world.plan = replace(world.plan, wrong_dates=world.uniform(0.2, 1), date_error_ms=error_ms)
    if world.chance(0.5):
        world.store_skew_ms = error_ms if world.chance(0.5) else -error_ms
        world.plan = replace(world.plan, wrong_dates=0)
    actors = [PlainProducer(world, "plain", 40), TransactionalProducer(world, "app", 20)]
    run_readers(world)
    world.supervise("cron", lambda node: collect_garbage(world, node), lambda: False)
    run_services(world, list(actors))
    world.store_skew_ms = 0
    world.finish()
    if not world.listed:
        world.fail("nobody listed the store: the scenario tests nothing")


@simulated
def test_f5_late_appends_lose_nothing_that_is_durable(world: World) -> None:
    """Appends that land after the grace period: the one race a producer can only report.

    It finds out afterwards and writes the transactions again; by then the collector may have
    deleted some of the first ones, and the consumer may have skipped those and passed others.
    """
    world.grace_s = 60
    world.disturbances = ("clock", "short pause")
    world.ambushes = 0.15
    world.ambushed = ("put_if",)
    world.ambush_pause_s = (1.05 * world.grace_s, 2 * world.grace_s)
    world.idle_s = 0.02
    world.plan = replace(world.plan, delete_errors=0.5, put_errors=0.3)
    # One upload each: of a torn group the reader has passed a part, and drops the repeat.
    app: TransactionalProducer | SinkDriver = SinkDriver(world, "query", 12, most_uploads=1)
    if world.chance(0.5):
        app = TransactionalProducer(world, "app", 15)
    run_readers(world)
    run_services(world, [app])
    world.finish()
    world.model.check_complete(app.name, app.records)


@simulated
def test_f5_a_micro_batch_of_three_grace_periods_gets_through(world: World) -> None:
    """Micro-batches of three grace periods, beside collectors; clocks are wrong by minutes."""
    world.grace_s = 60
    world.disturbances = ("clock", "outage", "short pause")
    world.idle_s = 1
    # An upload that a listing lacks is taken to be gone, which is safe, and is not what this asks.
    world.plan = replace(world.plan, partial_lists=0)
    # The clock that names may be behind, and set back further between two uploads.
    world.write_s = 3 * world.grace_s + 2 * MAX_SKEW_MS / 1000
    query = SinkDriver(world, "query", 3, slow_s=3 * world.grace_s)
    run_readers(world)
    world.supervise("cron", lambda node: collect_garbage(world, node), lambda: False)
    run_services(world, [query])
    world.finish()
    world.model.check_complete(query.name, query.records)
    assert len(query.waited_s) == 3
    assert min(query.waited_s) >= 3 * world.grace_s - 1, "a micro-batch was quick"
    assert query.refused == 0
