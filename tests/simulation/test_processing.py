"""Read, process, write: a worker that is killed or frozen anywhere processes each record once."""

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
from opendata_buffer.topic.topic import Topic
from tests.simulation.publishing import (
    CONFIG,
    TROUBLE,
    URL,
    Processes,
    Way,
    faults,
    until_all_happened,
)
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan, HarshStore
from tests.support.simulation import SimRuntime

SHARE = 0.15
"""Of the seeds; see conftest.py."""

ENDS = (*TROUBLE, Superseded, Fenced, Closed)


@pytest.fixture(autouse=True)
def no_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process's generator would take its lock when it is collected as garbage."""
    monkeypatch.setattr(topic_consumer, "MAX_PREFETCH", 1)


class ProcessingWorld(Processes):
    """A queue or a topic that is read, and another one that is written, in two stores."""

    def __init__(self, seed: int, source: str, target: str) -> None:
        super().__init__(seed)
        self.director = self.simulation.process("director")
        self.stores = [
            MemoryStore(name, now_ms=self.simulation.now_ms) for name in ("source", "target")
        ]
        self.kinds = (source, target)
        self.deeds: Counter[str] = Counter()

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
            config = Topic.config_of(name, CONFIG)
            with Producer(config, store=self.stores[0], runtime=self.director) as producer:
                for _ in range(batches):
                    number = len(self.records[part])
                    new = [b"%d/%d" % (part, number + n) for n in range(1 + self.draw(3))]
                    self.records[part] += new
                    producer.produce(new).result()

    def ways(self, name: str) -> tuple[SimRuntime, list[HarshStore]]:
        process = self.simulation.process(f"{name}#{len(self.nodes)}")
        made = []
        for store in self.stores:
            way: Any = Way(self, process, store)
            made.append(HarshStore(way, process, self.plan, seed=self.draw(2**32)))
        self.nodes += made
        return process, made

    def work(self, process: SimRuntime, ways: list[HarshStore]) -> None:
        """The life of one worker, which reads until nothing comes for a while."""
        try:
            publisher = Publisher(
                URL, "enrich", config=CONFIG, store=ways[1], runtime=process,
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
                    config, publisher.positions, store=ways[0], runtime=process, **options
                )
            except DataLoss:
                # A later instance of the name has read on since this one got its positions.
                if publisher._coordinator._owned["publisher.enrich"].is_owned():
                    raise
                self.deeds["overtaken"] += 1
                return
            while (batch := consumer.next_batch(timeout=5)) is not None:
                taken = [batch]
                while self.chance(0.3) and (more := consumer.next_batch()) is not None:
                    taken.append(more)
                if self.chance(0.2):
                    with pytest.raises(ZeroDivisionError):
                        self.process_batches(publisher, taken, fails=True)
                    self.deeds["aborted"] += 1
                self.process_batches(publisher, taken)
                if self.chance(0.2):
                    process.sleep(self.simulation.random.uniform(0, 10))
            consumer.close()
            publisher.close(30.0)
            self.deeds["done"] += 1
        except ENDS as error:
            self.simulation.log(f"{process.name}: {error!r:.200}")
            self.deeds[type(error).__name__] += 1

    def process_batches(
        self, publisher: Publisher, batches: list[Any], fails: bool = False
    ) -> None:
        with publisher.transaction() as txn:
            for batch in batches:
                if self.chance(0.9):  # otherwise nothing comes of it
                    for name in self.names[1]:
                        txn.produce([b"of " + each for each in batch.entries], partition=name)
                else:
                    txn.produce(batch.entries, partition=self.names[1][0])
                txn.ack(batch)
            if fails:
                raise ZeroDivisionError

    def check(self) -> None:
        first, *others = [self.delivered(name) for name in self.names[1]]
        for part, records in enumerate(self.records):
            # Everything goes to the first partition, and most of it to the others, too.
            if [each for each in first if each.startswith(b"%d/" % part)] != records:
                self.simulation.fail(f"{first} of {records}")
        for other in others:
            if len(set(other)) != len(other):
                self.simulation.fail(f"twice in {other}")
        for name in self.names[0]:
            blob: Any = self.stores[0].get(f"{name}/manifest")
            if Manifest.parse(blob.data).entry_count:
                self.simulation.fail(f"{name} was not read to its end")

    def delivered(self, name: str) -> list[bytes]:
        """What a read-committed reader gets of a written partition."""
        try:
            blob: Any = self.stores[1].get(f"{name}/manifest")
        except ObjectNotFound:
            return []
        entries = list(enumerate(Manifest.parse(blob.data).locations()))
        rule = ReadCommitted(name)
        found: list[bytes] = []
        for sequence, location in entries:
            for each in rule.offer(sequence, location, lambda begin, end: entries[begin:end]):
                data: Any = self.stores[1].get(entries[each][1])
                found += [record.removeprefix(b"of ") for record in decode_batch(data.data)]
        if rule.stable_end(len(entries)) != len(entries):
            self.simulation.fail(f"{name}: a transaction was never decided")
        return found


def live(world: ProcessingWorld) -> None:
    """Workers of one name come, are killed, frozen or fenced, and come again."""
    world.begin()
    dead = []
    for _ in range(12):
        world.fill(world.draw(3))
        process, ways = world.ways("worker")
        task = process.spawn(partial(world.work, process, ways), "main")
        task.join(world.uniform(0.5, 20))
        if task.is_alive() and world.chance(0.6):
            world.deeds["killed"] += 1
            world.simulation.kill(process)
            dead += ways
        elif task.is_alive() and world.chance(0.7):
            world.deeds["frozen"] += 1
            world.simulation.pause(process, world.uniform(1, 150))
        if dead and world.chance(0.3):
            dead.pop(world.draw(len(dead))).land_late_puts()
    world.plan = HarshPlan()
    world.director.sleep(400)
    process, ways = world.ways("last")
    process.spawn(partial(world.work, process, ways), "main").join()
    world.check()


KINDS = [("queue", "queue"), ("topic", "queue"), ("queue", "topic")]


def played(seed: int) -> Counter[str]:
    world = ProcessingWorld(seed, *KINDS[seed % 3])
    world.plan = faults(world.simulation.random)
    run(world.simulation, lambda: live(world))
    return world.deeds


def test_whatever_happens_to_workers_each_record_is_processed_once(seed: int) -> None:
    played(seed)


def test_all_that_may_happen_to_workers_does() -> None:
    until_all_happened({"killed", "frozen", "Superseded", "aborted", "done"}, played)


def once(kill_at: int | None, kinds: tuple[str, str]) -> int:
    """A worker is killed at one of its accesses to a store; the next one does the rest."""
    world = ProcessingWorld(7, *kinds)

    def main() -> None:
        world.begin()
        world.fill(2)
        process, ways = world.ways("worker")
        world.kill_at_write(process, kill_at)
        process.spawn(partial(world.work, process, ways), "main").join()
        process, ways = world.ways("next")
        process.spawn(partial(world.work, process, ways), "main").join()
        world.check()

    world.simulation.run(main)
    return world.writes


@pytest.mark.parametrize("kinds", KINDS, ids="-to-".join)
def test_killed_between_any_two_steps_each_record_is_processed_once(kinds: tuple[str, str]) -> None:
    points = once(None, kinds)
    assert points > 10
    for kill_at in range(points):
        once(kill_at, kinds)
