"""Transactions over partitions stay atomic when publishers and queries are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial
from typing import Any

from tests.simulation.publishing import (
    BATCHES,
    NAMES,
    QUERIES,
    PublishingCluster,
    assert_all_happen,
    faults,
)
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan, HarshStore
from tests.support.simulation import SimRuntime, SimTask

SHARE = 0.15
"""Share of the seeds; see conftest.py."""

WRITERS = [("billing", "billing"), ("shipping", "shipping"), (None, "unnamed"), *QUERIES]
"""Publishers, as name and name of their processes, and queries."""


def live(cluster: PublishingCluster) -> None:
    """Start writers, and kill, freeze, or fence them, while operators change the topic."""
    topic = cluster.create()
    over = False
    readers: dict[str, SimTask] = {}

    def read_all() -> None:
        for name in topic.read().names:
            if name not in readers:
                process, store = cluster.node(f"reader of {name}")
                readers[name] = process.spawn(
                    partial(cluster.read, process, store, name, lambda: over), "main"
                )

    def start(writer: Any) -> tuple[SimRuntime, HarshStore, SimTask]:
        if writer in QUERIES:
            process, store = cluster.node(writer)
            life = partial(cluster.run_query, process, store, writer)
        else:
            process, store = cluster.node(writer[1])
            life = partial(cluster.run_publisher, process, store, *writer)
        return process, store, process.spawn(life, "main")

    read_all()
    dead = []
    for _ in range(22):
        writer = WRITERS[cluster.draw(len(WRITERS))]
        process, store, task = start(writer)
        # An unnamed publisher runs alone. A named one fences the previous instance of its name.
        alone = writer == WRITERS[2]
        if alone or cluster.chance(0.7):
            task.join(cluster.uniform(0.5, 20))
            if task.is_alive() and (alone or cluster.chance(0.6)):
                cluster.happened["killed"] += 1
                cluster.simulation.kill(process)
                dead.append(store)
            elif task.is_alive() and cluster.chance(0.7):
                cluster.happened["frozen"] += 1
                cluster.simulation.pause(process, cluster.uniform(1, 150))
        if dead and cluster.chance(0.3):
            # Writes that were on their way to the store when their process was killed.
            store = dead.pop(cluster.draw(len(dead)))
            cluster.happened["landed late"] += store.late_puts
            store.land_late_puts()
        if cluster.chance(0.2):
            operator, operator_store = cluster.node("operator")
            cluster.end_some(operator, operator_store, everything=False)
        cluster.change(topic)
        read_all()
    cluster.plan = HarshPlan()
    # Writers that still run end, or the last instance of their name fences them.
    cluster.director.sleep(400)
    for writer in WRITERS:
        start(writer)[2].join()
    operator, operator_store = cluster.node("operator")
    cluster.end_some(operator, operator_store, everything=True)
    read_all()
    cluster.director.sleep(30)
    over = True
    for task in readers.values():
        task.join()
    assert set(cluster.committed.values()) == {BATCHES}
    cluster.check_empty()
    cluster.check()


def play(seed: int) -> PublishingCluster:
    cluster = PublishingCluster(seed)
    cluster.plan = faults(cluster.simulation.random)
    run(cluster.simulation, lambda: live(cluster))
    return cluster


def test_a_transaction_is_delivered_whole_or_not_at_all_despite_faults_of_publishers(
    seed: int,
) -> None:
    cluster = play(seed)
    assert [transaction.fate for transaction in cluster.transactions].count("committed") >= 5


def test_the_seeds_cover_every_event_of_publishers() -> None:
    expected = {"killed", "frozen", "Superseded", "landed late", "aborted", "a single was durable"}
    expected |= {"expanded", "drained", "left", "refused", "query: Superseded"}

    def events(seed: int) -> Counter[str]:
        cluster = play(seed)
        cluster.happened["a single was durable"] += any(s.durable for s in cluster.singles.values())
        return cluster.happened

    assert_all_happen(expected, events, first=(4, 7))


def one_transaction(cluster: PublishingCluster, kill_at: int | None) -> int:
    """Kill a named publisher at a write, and let the next instance end its transaction.

    Returns:
        The number of its writes.
    """
    cluster.create()
    process, store = cluster.node("billing")
    cluster.kill_at_write(process, kill_at)

    def publish(runtime: SimRuntime, store: Any) -> None:
        publisher = cluster.open_publisher(runtime, store, "billing")
        cluster.publish(publisher, runtime, "billing", roll_back=False, parts=NAMES)

    for runtime, its_store in ((process, store), cluster.node("billing")):
        runtime.spawn(partial(publish, runtime, its_store), "main").join()
    for name in NAMES:
        reader, reader_store = cluster.node(f"reader of {name}")
        end = cluster.simulation.now + 10
        over = partial(lambda end: cluster.simulation.now > end, end)
        reader.spawn(partial(cluster.read, reader, reader_store, name, over), "main").join()
    cluster.check_empty()
    cluster.check()
    return cluster.writes


def run_once(kill_at: int | None) -> tuple[PublishingCluster, int]:
    cluster = PublishingCluster(7)
    points: list[int] = []
    cluster.simulation.run(lambda: points.append(one_transaction(cluster, kill_at)))
    return cluster, points[0]


def test_a_transaction_whose_publisher_is_killed_at_any_step_is_completed_or_rolled_back() -> None:
    cluster, points = run_once(None)
    assert [transaction.fate for transaction in cluster.transactions] == ["committed", "committed"]
    fates = []
    for kill_at in range(points):
        cluster, _ = run_once(kill_at)
        found = {record for name in NAMES for record in cluster.delivered[name]}
        # The first transaction may be committed. The one of the next instance always is.
        fates.append(b"0 0" in found and len(cluster.transactions) == 2)
        assert b"%d 0" % (len(cluster.transactions) - 1) in found
    assert fates == sorted(fates), "a transaction is committed from one write on"
    assert fates.count(True) > 10
    assert fates.count(False) > 20


def locations_of_a_closed_publisher() -> list[str]:
    """Let a publisher write to all partitions and close, which writes to all of them again.

    Returns:
        The queued locations. Their names depend on the order of the random choices.
    """
    cluster = PublishingCluster(7)

    def main() -> None:
        cluster.create()
        process, store = cluster.node("billing")
        publisher = cluster.open_publisher(process, store, "billing")
        for name in NAMES:
            publisher.publish_committed([b"record"], partition=name).result()
        publisher.close(30.0)

    cluster.simulation.run(main)
    return [name for manifest in cluster.manifests().values() for name in manifest.locations()]


def test_a_seed_gives_the_same_history_whatever_python_s_hash_seed_is() -> None:
    """The order of a set of texts differs from process to process."""
    program = "from tests.simulation import test_publisher as test"
    program += "; print(test.locations_of_a_closed_publisher())"
    written = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "3")
    ]
    assert all(name in written[0] for name in NAMES)
    assert written[0] == written[1]
