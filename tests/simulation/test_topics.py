"""Topics grow and shrink while producers, a publisher, and the consumer are killed.

Every record that was reported durable is delivered exactly once, whatever partition it went to. No
record is delivered twice. Records with the same key and producer arrive in order within a
partition. Transactions are delivered whole or not at all. A partition that has left the topic is
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import pytest

from opendata_buffer import TopicConsumer, TopicProducer
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    StoreOptions,
)
from opendata_buffer.errors import DataLoss, Drained, Fenced, FlushFailed
from opendata_buffer.stores import listed
from opendata_buffer.topic import consumer as topic_consumer
from opendata_buffer.topic.partitioner import modulo
from opendata_buffer.topic.producer import TopicHandle
from opendata_buffer.topic.topic import Topic, seal_partition
from tests.simulation.publishing import TROUBLE, URL, PublishingCluster, faults
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan
from tests.support.simulation import SimRuntime

SHARE = 0.06
"""Share of the seeds; see conftest.py."""

PRODUCING = ProducerConfig(
    store=URL, broker="off", flush_interval_ms=100, delivery_timeout_ms=30_000,
    store_options=StoreOptions(timeout_ms=20_000),
)  # fmt: skip
CONSUMING = ConsumerConfig(
    store=URL,
    ack_interval=5,
    store_options=StoreOptions(timeout_ms=20_000),
    gc=GarbageCollectorConfig(enabled=False),
)
CALM = HarshPlan(get_ms=10, put_ms=10, cas_ms=10)
KEYS = 6


@pytest.fixture(autouse=True)
def listings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every second seed begin each look at the topic with a listing."""
    if seed % 2:
        monkeypatch.setattr(listed, "LEAST_FOLDERS", 1)
        monkeypatch.setattr(topic_consumer, "QUIET_S", -1.0)


class TopicCluster(PublishingCluster):
    """A topic with its producers, consumer, and operator. Every choice comes from the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.plan = faults(self.simulation.random)
        self.positions: dict[str, str] = {}
        """Changed together with ``delivered``, as in one database transaction."""
        self.durable: list[bytes] = []
        self.over = False
        self.producers_left = 0

    def heal(self) -> None:
        self.plan = CALM
        for store in self.nodes:
            store.plan = CALM
            store.land_late_puts()

    # Producers.

    def produce(self, process: SimRuntime, store: Any) -> None:
        """Run one producer process. Its records contain its name and a number."""
        producer = self.patiently(
            process, lambda: TopicProducer(PRODUCING, store=store, runtime=process)
        )
        threads = [
            process.spawn(partial(self.call, process, producer, number), "caller")
            for number in range(1 + self.draw(3))
        ]
        for thread in threads:
            thread.join()
        with suppress(FlushFailed):
            producer.close(60)

    def call(self, process: SimRuntime, producer: TopicProducer, caller: int) -> None:
        """Run one thread of a producer, which has its own keys."""

        def slowly(keys: Any, partitions: Sequence[str]) -> Any:
            # Dividing a large table takes time, in which the topic may change.
            if self.chance(0.5):
                process.sleep(self.uniform(0, 2))
            return modulo(keys, partitions)

        pending: list[tuple[TopicHandle, list[bytes]]] = []
        number = 0
        for _ in range(20 + self.draw(30)):
            keys, records = [], []
            for _ in range(1 + self.draw(12)):
                key = self.draw(KEYS)
                keys.append(b"key %d" % key)
                writer = b"%s/%d/%d" % (process.name.encode(), caller, key)
                records.append(b"%s:%d" % (writer, number))
                number += 1
            try:
                handle = producer.produce(records, keys=keys, partitioner=slowly)
            except TROUBLE as error:
                self.simulation.log(f"{process.name}: {error}")
                continue
            pending.append((handle, records))
            if self.chance(0.5):
                self.await_all(process, pending)
            process.sleep(self.uniform(0, 5))
        self.await_all(process, pending)

    def await_all(
        self, process: SimRuntime, pending: list[tuple[TopicHandle, list[bytes]]]
    ) -> None:
        for handle, records in pending:
            try:
                handle.result(60)
                self.durable += records
            except (*TROUBLE, TimeoutError) as error:
                self.simulation.log(f"{process.name}: {error}")
        pending.clear()

    def publish_all(self, process: SimRuntime, store: Any) -> None:
        """Run instances of a named publisher, one after the other."""
        for _ in range(1 + self.draw(3)):
            self.run_publisher(process, store, "billing", "billing")

    def supervise_producer(self, name: str, life: Callable[[SimRuntime, Any], None]) -> None:
        director = self.simulation.process(f"supervisor of {name}")

        def lives() -> None:
            for _ in range(3):
                process, store = self.node(name)
                task = process.spawn(partial(life, process, store), "main")
                task.join(self.uniform(10, 200))
                if task.is_alive() and self.chance(0.7):
                    self.simulation.kill(process)
                else:
                    task.join()
            self.producers_left -= 1

        self.producers_left += 1
        director.spawn(lives, "main")

    # The consumer.

    def consume(self, process: SimRuntime, store: Any) -> None:
        """Run one consumer process until it is fenced or killed."""
        while not self.over:
            try:
                seen = dict(self.positions)
                consumer = TopicConsumer(CONSUMING, seen, store=store, runtime=process)
            except (*TROUBLE, Drained, DataLoss) as error:
                # The previous consumer still wrote and acknowledged after this one read the
                # positions.
                if isinstance(error, DataLoss) and seen == self.positions:
                    raise
                self.simulation.log(f"{process.name}: {error}")
                process.sleep(1)
                continue
            if not self.deliver(process, consumer, seen):
                return

    def deliver(self, process: SimRuntime, consumer: TopicConsumer, seen: dict[str, str]) -> bool:
        """Deliver batches. Return whether this process may open another consumer."""
        while not self.over:
            try:
                batch = consumer.next_batch()
                if batch is None:
                    process.sleep(self.uniform(0.1, 3))
                    continue
                name = batch.partition
                position = str(consumer.position_of(batch))
                process.sleep(self.uniform(0, 0.2))
                if self.positions.get(name) != seen.get(name):
                    self.simulation.log(f"{process.name}: another process has written {name}")
                    return False
                seen[name] = self.positions[name] = position
                self.delivered[name] += batch.entries
                consumer.ack(batch)
            except Fenced as error:
                self.simulation.log(f"{process.name}: {error}")
                return False
            except TROUBLE as error:
                self.simulation.log(f"{process.name}: {error}")
                if self.chance(0.2):
                    return True  # as a program that starts over after an error
        return False

    def supervise_consumer(self) -> None:
        director = self.simulation.process("supervisor of the consumer")

        def lives() -> None:
            while not self.over:
                process, store = self.node("consumer")
                task = process.spawn(partial(self.consume, process, store), "main")
                task.join(self.uniform(5, 120))
                if task.is_alive() and not self.over and self.plan is not CALM:
                    if self.chance(0.7):
                        self.simulation.kill(process)
                    # Otherwise the next one fences it.
                else:
                    task.join()

        director.spawn(lives, "main")

    # The operator.

    def operate(self, process: SimRuntime, store: Any) -> None:
        topic = self.patiently(process, lambda: Topic.open(URL, store=store, runtime=process))
        for _ in range(12):
            process.sleep(self.uniform(5, 60))
            active = self.patiently(process, topic.read).active
            if self.chance(0.5) and len(active) < 8:
                self.patiently(process, lambda: topic.expand(len(active) + 1 + self.draw(2)))  # noqa: B023
                self.happened["expanded"] += 1
            elif len(active) > 1:
                name = active[self.draw(len(active))]
                self.patiently(process, lambda: topic.drain(name))  # noqa: B023
                self.happened["drained"] += 1
            if self.chance(0.2):
                # Without a delay producers may be refused, but nothing may be lost.
                self.happened["left"] += len(
                    self.patiently(process, lambda: topic.remove_drained(0))
                )
            elif self.chance(0.2):
                for name in self.patiently(process, topic.read).draining:
                    # As if killed before it removes the partition from the topic.
                    seal = partial(seal_partition, topic, name)
                    self.happened["sealed"] += self.patiently(process, seal)

    # The end.

    def check(self) -> None:
        super().check()
        fail = self.simulation.fail
        found = set(chain(*self.delivered.values()))
        if lost := [record for record in self.durable if record not in found]:
            fail(f"durable but never delivered: {lost[:5]} of {len(lost)}")
        for partition, records in self.delivered.items():
            last: dict[bytes, int] = {}
            for record in records:
                writer, _, number = record.rpartition(b":")
                if writer and int(number) <= last.get(writer, -1):
                    fail(f"{record!r} came after {last[writer]} in {partition}")
                last[writer] = int(number) if writer else 0
        topic = Topic.open(URL, store=self.memory, runtime=self.director)
        for name, manifest in self.manifests().items():
            has_left = name not in topic.description.names
            if has_left and (manifest.entry_count or not manifest.sealed):
                fail(f"{name} has left the topic, but its manifest is {manifest}")


def live(cluster: TopicCluster) -> None:
    director = cluster.director
    topic = cluster.create(1 + cluster.draw(4))
    for number in range(2):
        cluster.supervise_producer(f"producer{number}", cluster.produce)
    cluster.supervise_producer("publisher", cluster.publish_all)
    cluster.supervise_consumer()
    operator, operator_store = cluster.node("operator")
    operating = operator.spawn(lambda: cluster.operate(operator, operator_store), "main")
    operating.join()
    while cluster.producers_left:
        director.sleep(5)
    cluster.heal()
    last, last_store = cluster.node("publisher")
    last.spawn(lambda: cluster.open_publisher(last, last_store, "billing").close(), "main").join()
    director.sleep(120)
    for _ in range(100):
        director.sleep(10)
        if not topic.read().draining and all_read(cluster):
            break
    cluster.over = True
    if draining := topic.read().draining:
        cluster.simulation.fail(f"still draining: {draining}")
    cluster.check()


def all_read(cluster: TopicCluster) -> bool:
    found = set(chain(*cluster.delivered.values()))
    committed = [
        transaction.records.values()
        for transaction in cluster.transactions
        if transaction.fate == "committed"
    ]
    return found.issuperset(chain(cluster.durable, *chain(*committed)))


# A killed consumer leaves a prefetch generator that the interpreter cannot end in the usual way.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_topics_that_grow_and_shrink_lose_nothing_and_repeat_nothing(seed: int) -> None:
    cluster = TopicCluster(seed)
    run(cluster.simulation, lambda: live(cluster))
    assert len(cluster.durable) > 100, "hardly anything was produced"
    # The number depends on the seed: mostly 8 to 12, rarely 4.
    assert cluster.happened["expanded"] + cluster.happened["drained"] >= 1, (
        "the topic never changed"
    )
    assert len(cluster.delivered) >= 2
