"""Consumers take over from each other; zombies do not know it yet (failures F8, F9)."""

from __future__ import annotations

from tests.simulation.actors import PlainProducer, Reader, SinkDriver, run_readers, run_services
from tests.simulation.cluster import Cluster
from tests.simulation.scenario import simulated

SHARE = 0.5
"""Share of the seeds; see conftest.py."""


@simulated
def test_f8_fenced_consumers_acknowledge_nothing(cluster: Cluster) -> None:
    """Readers are replaced at any moment, while they still run."""
    cluster.grace_s = 60
    cluster.disturbances = ("zombie", "zombie", "zombie", "short pause", "long pause", "kill")
    cluster.request_faults = 0.02
    run_readers(cluster)
    rivals = cluster.director.spawn(lambda: _rivals(cluster), "rivals")
    run_services(cluster, [PlainProducer(cluster, f"plain{n}", 40) for n in range(2)])
    rivals.join()
    cluster.finish()
    assert cluster.model.counts["claims"] >= 2, "no one was fenced: the scenario tests nothing"
    # The collectors of fenced consumers have ended, also if it never noticed (failure F9).
    collecting = {name for name, at in cluster.listed.items() if cluster.simulation.now - at < 300}
    assert collecting == {cluster.model.owner}, "only the queue's owner may collect"


def _rivals(cluster: Cluster) -> None:
    """Start further readers next to the supervised one. Each runs until it is fenced."""
    for _ in range(1 + cluster.draw(5)):
        cluster.director.sleep(cluster.uniform(0, 5))
        node = cluster.node("rival")
        reader = Reader(cluster, node)
        hangs = cluster.chance(0.3)
        node.runtime.spawn(
            lambda reader=reader, hangs=hangs: reader.live(cluster.consumer_config(), hangs=hangs),
            "main",
        )
    # Long enough for the last one to reach the store.
    cluster.director.sleep(300)


@simulated
def test_two_drivers_of_one_query_write_each_batch_once(cluster: Cluster) -> None:
    """A query is restarted while its old driver, believed dead, still commits."""
    query = SinkDriver(cluster, "query", 10)
    run_readers(cluster)
    run_services(cluster, [query], zombies=True)
    cluster.finish()
    cluster.model.check_complete(query.name, query.records)
