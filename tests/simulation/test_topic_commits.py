"""Queries write to a topic while drivers are killed, paused and overtaken: all or nothing, once.

The reader is one by the rule of read-committed, is restarted all the time, and acknowledges what
it may; partitions are added and drained meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from buffer_sink.messages import Group, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_sink.topic_commit import TopicCommitter
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import (
    CommitStateUnknown,
    Conflict,
    Drained,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import Transaction, later_ulid, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages import parse_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from opendata_buffer.topic.topic import Topic
from tests.support.simulation import Dice, SimRuntime, Simulation

SHARE = 0.1
"""Of the seeds; see conftest.py."""

BATCHES = 5
APPS = ("one", "two")
MAY_FAIL = (TransientStorageError, Conflict, CommitStateUnknown, Superseded, Drained)
"""What ends a query that is started again."""


@dataclass
class Partition:
    """What the reader of a partition remembers, and what it delivered."""

    name: str
    next: int = 0
    state: dict[str, Any] | None = None


@dataclass
class Deployment(Dice):
    simulation: Simulation
    memory: MemoryStore
    topic: Topic
    plan: FaultPlan
    director: SimRuntime
    committed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(APPS, 0))
    """Per app, the batch that Spark's checkpoint says is next."""
    partitions: dict[str, Partition] = field(default_factory=dict)
    delivered: Counter[str] = field(default_factory=Counter)
    producers: defaultdict[tuple[str, int], set[bytes]] = field(
        default_factory=lambda: defaultdict(set)
    )
    calm: bool = False
    deeds: Counter[str] = field(default_factory=Counter)

    def config(self) -> QueueConfig:
        return QueueConfig(store="memory://x", cas_deadline_ms=2_000 + self.draw(20_000))

    # A query.

    def drive(self, app: str, runtime: SimRuntime) -> None:
        """One driver's life, from where the checkpoint is; it does not know of others."""
        store = FaultyStore(self.memory, runtime, self.plan, seed=self.draw(2**32))
        batch = self.committed[app]
        committer = TopicCommitter(store, SinkOptions(queue=self.config()), runtime)
        while batch < BATCHES:
            try:
                committer.append(self.tasks(app, batch, store, runtime))
            except MAY_FAIL as error:
                self.simulation.log(f"{runtime.name}: {error!r:.150}")
                self.deeds[type(error).__name__] += 1
                return
            batch += 1
            self.committed[app] = max(batch, self.committed[app])

    def tasks(self, app: str, batch: int, store: FaultyStore, runtime: SimRuntime) -> Group:
        """A micro-batch has the same rows in every attempt; where they go may differ."""
        write = TopicWrite.planned(self.topic.read(), self.director)
        txn, planned = Transaction(app, batch), Moment.now(runtime)
        uploads = []
        for row in range(rows_of(batch)):
            name = write.active[(row * 7 + batch) % len(write.active)]
            clock = write.clock(0, row)
            ulid = later_ulid(runtime.ulid(), 6 * 3_600_000)
            key = write.location(name, ulid, txn, clock)
            data = encode_batch([f"{app}/{batch}/{row}".encode()])
            store.put(key, data)
            metadata = (Metadata(0, runtime.now_ms(), b""),)
            uploads.append(UploadedBatch(key, 1, len(data), metadata, name, clock))
        return Group(planned, tuple(uploads), txn, app, write)

    def torment(self, app: str) -> None:
        """Drivers of one query: killed, paused, and replaced while they live."""
        alive: list[tuple[SimRuntime, Any]] = []
        number = 0
        while self.committed[app] < BATCHES:
            alive = [each for each in alive if each[1].is_alive()]
            if not alive or (not self.calm and self.draw(12) == 0 and len(alive) < 3):
                self.deeds["second run"] += bool(alive)
                runtime = self.simulation.process(f"{app}#{number}")
                number += 1
                task = runtime.spawn(lambda runtime=runtime: self.drive(app, runtime), "main")
                alive.append((runtime, task))
            runtime, task = alive[self.draw(len(alive))]
            task.join(self.uniform(0, 1.5))
            if self.calm or not task.is_alive():
                continue
            deed = self.draw(10)
            if deed == 0:
                self.deeds["kill"] += 1
                self.simulation.kill(runtime)
            elif deed == 1:
                self.deeds["pause"] += 1
                self.simulation.pause(runtime, self.uniform(0, 30))
        for runtime, _ in alive:
            if self.draw(2):
                self.simulation.kill(runtime)
        for _, task in alive:
            task.join()

    # The reader.

    def read(self, runtime: SimRuntime) -> None:
        """One look at all partitions, as a reader that was just restarted."""
        for name in self.topic.read().names:
            partition = self.partitions.setdefault(name, Partition(name))
            config = Topic.config_of(name, self.config())
            queue = Queue(self.memory, config, runtime=runtime, role="consumer")
            manifest = queue.read()
            if manifest is not None and not manifest.sealed:
                self.take(partition, manifest)
                reader = self.reader(partition)
                through = reader.stable_end(partition.next) - 1
                if through >= manifest.first_sequence and self.draw(2):
                    queue.dequeue(through, queue.claim_epoch(None).epoch)

    def reader(self, partition: Partition) -> ReadCommitted:
        if partition.state is None:
            return ReadCommitted(partition.name, buffer=4)
        return ReadCommitted.from_dict(partition.state, partition.name, buffer=4)

    def take(self, partition: Partition, manifest: Manifest) -> None:
        reader = self.reader(partition)
        where = dict(enumerate(manifest.locations(), manifest.first_sequence))
        assert not where or partition.next >= manifest.first_sequence

        def replay(begin: int, end: int) -> list[tuple[int, str]]:
            return [(each, where[each]) for each in range(begin, end)]

        for sequence in range(partition.next, manifest.next_sequence):
            for each in reader.offer(sequence, where[sequence], replay):
                self.deliver(partition.name, where[each])
        partition.next = manifest.next_sequence
        partition.state = reader.to_dict()

    def deliver(self, name: str, location: str) -> None:
        blob: Any = self.memory.get(location)
        (record,) = decode_batch(blob.data)
        named = parse_location(location, name)
        assert named is not None
        assert named.txn is not None
        assert named.message is not None
        self.delivered[record.decode()] += 1
        if self.delivered[record.decode()] > 1:
            self.simulation.fail(f"{record!r} was delivered twice")
        attempts = self.producers[named.txn.app, named.txn.batch]
        attempts.add(parse_uuid(named.message).producer)
        if len(attempts) > 1:
            self.simulation.fail(f"two attempts at {named.txn} are visible")

    # The end.

    def finish(self) -> None:
        """End abandoned transactions, read everything, and check that each row came once."""
        clean = FaultyStore(self.memory, self.director, FaultPlan(), seed=0)
        for app in APPS:
            committer = TopicCommitter(clean, SinkOptions(queue=self.config()), self.director)
            write = TopicWrite.planned(self.topic.read(), self.director)
            committer.append(
                Group(Moment.now(self.director), (), Transaction(app, BATCHES), app, write)
            )
        self.read(self.director)
        wanted = {
            f"{app}/{batch}/{row}": 1
            for app in APPS
            for batch in range(BATCHES)
            for row in range(rows_of(batch))
        }
        if self.delivered != wanted:
            missing = sorted(set(wanted) - set(self.delivered))
            self.simulation.fail(f"never delivered: {missing}")
        for partition in self.partitions.values():
            if self.reader(partition).stable_end(partition.next) != partition.next:
                self.simulation.fail(f"{partition.name} has an undecided transaction")


def rows_of(batch: int) -> int:
    return 1 + batch * 2 % 7


def run(seed: int) -> Deployment:
    simulation = Simulation(seed)
    director = simulation.process("director")
    memory = MemoryStore("simulation", now_ms=simulation.now_ms)
    deployments: list[Deployment] = []

    def main() -> None:
        topic = Topic.create("memory://x", 4, store=memory, runtime=director)
        random = simulation.random
        plan = FaultPlan(
            cas_lost_after=random.uniform(0, 0.1),
            cas_lost_before=random.uniform(0, 0.1),
            cas_late=random.uniform(0, 0.1),
            get_errors=random.uniform(0, 0.05),
            put_errors=random.uniform(0, 0.05),
            get_ms=30,
            put_ms=30,
            cas_ms=30,
            list_ms=30,
            jitter=0.9,
        )
        world = Deployment(simulation, memory, topic, plan, director)
        deployments.append(world)
        queries = [
            director.spawn(lambda app=app: world.torment(app), f"torment of {app}") for app in APPS
        ]
        until = simulation.now + 1_800
        while any(query.is_alive() for query in queries):
            director.sleep(world.uniform(0, 2))
            world.read(director)
            if world.draw(40) == 0 and len(topic.description.names) < 7:
                topic.expand(len(topic.description.active) + 1)
            if world.draw(60) == 0 and len(topic.description.active) > 2:
                topic.drain(topic.description.active[0])
            topic.remove_drained()
            if simulation.now > until and not world.calm:
                world.calm = True
                world.plan = FaultPlan(get_ms=20, put_ms=20, cas_ms=20)
        world.finish()

    simulation.run(main)
    return deployments[0]


def test_every_micro_batch_is_delivered_whole_and_once(seed: int) -> None:
    world = run(seed)
    assert world.delivered.total() == len(APPS) * sum(map(rows_of, range(BATCHES)))


def test_the_torments_happen() -> None:
    # Any change of the program shifts what a seed does: they are tried until all has happened.
    missing, deeds = {"kill", "pause", "second run", "Superseded"}, Counter[str]()
    for seed in range(60):
        deeds += run(seed).deeds
        if missing <= deeds.keys():
            return
    raise AssertionError(deeds)
