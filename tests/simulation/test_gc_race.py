"""The collector races with batches that are uploaded but not queued yet (failures F5, F6)."""

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
from tests.simulation.cluster import MAX_SKEW_MS, Cluster
from tests.simulation.scenario import simulated

SHARE = 0.5
"""Share of the seeds; see conftest.py."""


@simulated
def test_f5_collector_never_deletes_what_becomes_durable(cluster: Cluster) -> None:
    """Processes freeze between upload and append, for about the grace period."""
    cluster.grace_s = 60
    cluster.disturbances = ("long pause", "clock", "outage", "kill")
    cluster.request_faults = 0.08
    actors = [
        PlainProducer(cluster, "plain", 25),
        TransactionalProducer(cluster, "app", 15),
        SinkDriver(cluster, "query", 6),
    ]
    run_readers(cluster)
    if cluster.chance(0.5):
        cluster.supervise("cron", lambda node: collect_garbage(cluster, node), lambda: False)
    run_services(cluster, cluster.simulation.random.sample(actors, 2))
    cluster.finish()
    assert cluster.model.counts["collected"], "nothing was collected: the scenario tests nothing"
    assert sum(cluster.happened.values()), "no process was disturbed: the scenario tests nothing"


@simulated
def test_f6_a_store_with_a_wrong_clock_never_makes_the_collector_delete_young_batches(
    cluster: Cluster,
) -> None:
    """The store's clock is always wrong, or some of its answers have a wrong date."""
    cluster.grace_s = 60
    cluster.disturbances = ("short pause", "outage")
    # A store that is far ahead makes young batches look old.
    error_ms = round(cluster.uniform(2, 20) * cluster.grace_s * 1000)
    cluster.plan = replace(
        cluster.plan, wrong_dates=cluster.uniform(0.2, 1), date_error_ms=error_ms
    )
    if cluster.chance(0.5):
        cluster.store_skew_ms = error_ms if cluster.chance(0.5) else -error_ms
        cluster.plan = replace(cluster.plan, wrong_dates=0)
    actors = [PlainProducer(cluster, "plain", 40), TransactionalProducer(cluster, "app", 20)]
    run_readers(cluster)
    cluster.supervise("cron", lambda node: collect_garbage(cluster, node), lambda: False)
    run_services(cluster, list(actors))
    cluster.store_skew_ms = 0
    cluster.finish()
    assert cluster.listed, "no collector listed the store: the scenario tests nothing"


@simulated
def test_f5_late_appends_lose_nothing_that_is_durable(cluster: Cluster) -> None:
    """Appends land after the grace period, which a producer can only detect afterwards.

    It then writes the transactions again. By that time the collector may have deleted some of the
    first batches. The consumer may have skipped those, and may have read others.
    """
    cluster.grace_s = 60
    cluster.disturbances = ("clock", "short pause")
    cluster.request_faults = 0.15
    cluster.faulty_requests = ("put_if",)
    cluster.fault_pause_s = (1.05 * cluster.grace_s, 2 * cluster.grace_s)
    cluster.idle_s = 0.02
    cluster.plan = replace(cluster.plan, delete_errors=0.5, put_errors=0.3)
    # One upload per micro-batch. If a reader has read part of a larger group, it drops the repeat.
    app: TransactionalProducer | SinkDriver = SinkDriver(cluster, "query", 12, most_uploads=1)
    if cluster.chance(0.5):
        app = TransactionalProducer(cluster, "app", 15)
    run_readers(cluster)
    run_services(cluster, [app])
    cluster.finish()
    cluster.model.check_complete(app.name, app.records)


@simulated
def test_f5_a_micro_batch_of_three_grace_periods_gets_through(cluster: Cluster) -> None:
    """Micro-batches take three grace periods while collectors run and clocks are wrong."""
    cluster.grace_s = 60
    cluster.disturbances = ("clock", "outage", "short pause")
    cluster.idle_s = 1
    # A committer takes an upload that a listing lacks for deleted, which is safe but not tested
    # here.
    cluster.plan = replace(cluster.plan, partial_lists=0)
    # The clock that dates the names may be slow, and may be set back between two uploads.
    cluster.write_s = 3 * cluster.grace_s + 2 * MAX_SKEW_MS / 1000
    query = SinkDriver(cluster, "query", 3, slow_s=3 * cluster.grace_s)
    run_readers(cluster)
    cluster.supervise("cron", lambda node: collect_garbage(cluster, node), lambda: False)
    run_services(cluster, [query])
    cluster.finish()
    cluster.model.check_complete(query.name, query.records)
    assert len(query.waited_s) == 3
    assert min(query.waited_s) >= 3 * cluster.grace_s - 1, (
        "a micro-batch took less than three grace periods"
    )
    assert query.refused == 0
