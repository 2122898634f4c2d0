"""Read, process, write: each record is processed once, wherever a worker is killed or frozen."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from opendata_buffer import Consumer, Producer, Publisher, TopicConsumer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, QueueConfig, StoreOptions
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import Closed, DataLoss, Fenced, ObjectNotFound, Superseded
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic import consumer as topic_consumer
from opendata_buffer.topic.topic import Topic, partition_config
from tests.simulation.publishing import (
    CONFIG,
    TROUBLE,
    URL,
    NodeStore,
    Processes,
    assert_all_happen,
    faults,
)
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan, HarshStore
from tests.support.simulation import SimRuntime

SHARE = 0.15
"""Share of the seeds; see conftest.py."""

ENDS = (*TROUBLE, Superseded, Fenced, Closed)


@pytest.fixture(autouse=True)
def no_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the prefetch, whose generator would take a lock after its process was killed."""
    monkeypatch.setattr(topic_consumer, "MAX_PREFETCH", 1)


class ProcessingCluster(Processes):
    """A queue or topic to read and another one to write, in two stores."""

    def __init__(self, seed: int, source: str, target: str) -> None:
        super().__init__(seed)
        self.director = self.simulation.process("director")
        self.stores = [
            MemoryStore(name, now_ms=self.simulation.now_ms) for name in ("source", "target")
        ]
        self.kinds = (source, target)
        self.happened: Counter[str] = Counter()

    def begin(self) -> None:
        self.names = []
        for store, kind in zip(self.stores, self.kinds, strict=True):
            if kind == "topic":
                config = QueueConfig(store=URL)
                made = Topic.create(config, 2, store=store, runtime=self.director)
                self.names.append(made.description.names)
            else:
                Producer(CONFIG, store=store, runtime=self.director).close()
                self.names.append(["ingest"])
        self.records: list[list[bytes]] = [[] for _ in self.names[0]]

    def fill(self, batches: int) -> None:
        for part, name in enumerate(self.names[0]):
            config = partition_config(name, CONFIG)
            with Producer(config, store=self.stores[0], runtime=self.director) as producer:
                for _ in range(batches):
                    number = len(self.records[part])
                    new = [b"%d/%d" % (part, number + n) for n in range(1 + self.draw(3))]
                    self.records[part] += new
                    producer.produce(new).result()

    def open_worker(self, name: str) -> tuple[SimRuntime, list[HarshStore]]:
        process = self.simulation.process(f"{name}#{len(self.nodes)}")
        made = []
        for store in self.stores:
            inner: Any = NodeStore(self, process, store)
            made.append(HarshStore(inner, process, self.plan, seed=self.draw(2**32)))
        self.nodes += made
        return process, made

    def work(self, process: SimRuntime, stores: list[HarshStore]) -> None:
        """Run one worker, which reads until no batch arrives for a while."""
        try:
            publisher = Publisher(
                URL, "enrich", config=CONFIG, store=stores[1], runtime=process,
                entropy=self.simulation.random.randbytes,
            )  # fmt: skip
            config = ConsumerConfig(
                store=URL,
                gc=GarbageCollectorConfig(enabled=False),
                ack_interval=1 + self.draw(3),
                store_options=StoreOptions(timeout_ms=20_000),
            )
            kind: Any = TopicConsumer if len(self.names[0]) > 1 else Consumer
            options = {} if kind is TopicConsumer or self.chance(0.5) else {
                "isolation": "read_committed"
            }  # fmt: skip
            try:
                consumer = kind(
                    config, publisher.positions, store=stores[0], runtime=process, **options
                )
            except DataLoss:
                # A later instance with this name has read on since this one got its positions.
                if publisher._coordinator._owned["publisher.enrich"].is_owned():
                    raise
                self.happened["overtaken"] += 1
                return
            while (batch := consumer.next_batch(timeout=5)) is not None:
                taken = [batch]
                while self.chance(0.3) and (more := consumer.next_batch()) is not None:
                    taken.append(more)
                if self.chance(0.2):
                    with pytest.raises(ZeroDivisionError):
                        self.process_batches(publisher, taken, fails=True)
                    self.happened["aborted"] += 1
                self.process_batches(publisher, taken)
                if self.chance(0.2):
                    process.sleep(self.simulation.random.uniform(0, 10))
            consumer.close()
            publisher.close(30.0)
            self.happened["done"] += 1
        except ENDS as error:
            self.simulation.log(f"{process.name}: {error!r:.200}")
            self.happened[type(error).__name__] += 1

    def process_batches(
        self, publisher: Publisher, batches: list[Any], fails: bool = False
    ) -> None:
        with publisher.transaction() as txn:
            for batch in batches:
                if self.chance(0.9):  # otherwise write to one partition only
                    for name in self.names[1]:
                        txn.produce([b"of " + record for record in batch.entries], partition=name)
                else:
                    txn.produce(batch.entries, partition=self.names[1][0])
                txn.ack(batch)
            if fails:
                raise ZeroDivisionError

    def check(self) -> None:
        first, *others = [self.delivered(name) for name in self.names[1]]
        for part, records in enumerate(self.records):
            # The first partition gets every record, and the others get most of them.
            if [record for record in first if record.startswith(b"%d/" % part)] != records:
                self.simulation.fail(f"processed {first} of {records}")
        for other in others:
            if len(set(other)) != len(other):
                self.simulation.fail(f"a record is in {other} twice")
        for name in self.names[0]:
            blob: Any = self.stores[0].get(f"{name}/manifest")
            if Manifest.parse(blob.data).entry_count:
                self.simulation.fail(f"{name} was not read completely")

    def delivered(self, name: str) -> list[bytes]:
        """Return the records that a read-committed reader receives from a written partition."""
        try:
            blob: Any = self.stores[1].get(f"{name}/manifest")
        except ObjectNotFound:
            return []
        entries = list(enumerate(Manifest.parse(blob.data).locations()))
        rule = ReadCommitted(name)
        found: list[bytes] = []
        for sequence, location in entries:
            for offered in rule.offer(sequence, location, lambda begin, end: entries[begin:end]):
                data: Any = self.stores[1].get(entries[offered][1])
                found += [record.removeprefix(b"of ") for record in decode_batch(data.data)]
        if rule.stable_end(len(entries)) != len(entries):
            self.simulation.fail(f"{name}: a transaction was never decided")
        return found


def live(cluster: ProcessingCluster) -> None:
    """Start workers with the same name, and kill, freeze, or fence them."""
    cluster.begin()
    dead = []
    for _ in range(12):
        cluster.fill(cluster.draw(3))
        process, stores = cluster.open_worker("worker")
        task = process.spawn(partial(cluster.work, process, stores), "main")
        task.join(cluster.uniform(0.5, 20))
        if task.is_alive() and cluster.chance(0.6):
            cluster.happened["killed"] += 1
            cluster.simulation.kill(process)
            dead += stores
        elif task.is_alive() and cluster.chance(0.7):
            cluster.happened["frozen"] += 1
            cluster.simulation.pause(process, cluster.uniform(1, 150))
        if dead and cluster.chance(0.3):
            dead.pop(cluster.draw(len(dead))).land_late_puts()
    cluster.plan = HarshPlan()
    cluster.director.sleep(400)
    process, stores = cluster.open_worker("last")
    process.spawn(partial(cluster.work, process, stores), "main").join()
    cluster.check()


KINDS = [("queue", "queue"), ("topic", "queue"), ("queue", "topic")]


def play(seed: int) -> Counter[str]:
    cluster = ProcessingCluster(seed, *KINDS[seed % 3])
    cluster.plan = faults(cluster.simulation.random)
    run(cluster.simulation, lambda: live(cluster))
    return cluster.happened


def test_each_record_is_processed_once_despite_faults_of_workers(seed: int) -> None:
    happened = play(seed)
    assert happened["done"] >= 1, "no worker read to the end"


def test_the_seeds_cover_every_event_of_workers() -> None:
    assert_all_happen({"killed", "frozen", "Superseded", "aborted", "done"}, play)


def check_kill(kill_at: int | None, kinds: tuple[str, str]) -> int:
    """Kill a worker at one of its writes, let the next worker do the rest, and check the result.

    Returns:
        The number of writes of the first worker.
    """
    cluster = ProcessingCluster(7, *kinds)

    def main() -> None:
        cluster.begin()
        cluster.fill(2)
        process, stores = cluster.open_worker("worker")
        cluster.kill_at_write(process, kill_at)
        process.spawn(partial(cluster.work, process, stores), "main").join()
        process, stores = cluster.open_worker("next")
        process.spawn(partial(cluster.work, process, stores), "main").join()
        cluster.check()

    cluster.simulation.run(main)
    return cluster.writes


@pytest.mark.parametrize("kinds", KINDS, ids="-to-".join)
def test_each_record_is_processed_once_if_a_worker_is_killed_at_any_step(
    kinds: tuple[str, str],
) -> None:
    points = check_kill(None, kinds)
    assert points > 10
    for kill_at in range(points):
        check_kill(kill_at, kinds)
