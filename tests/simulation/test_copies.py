"""Processes that copy one queue are killed, suspended and overtaken by others.

Whatever they do, the target's reader, which knows the rule for repeats and takes out what it was
given, gets each batch of the source once and in order.
"""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.admin.copy import Copier
from opendata_buffer.admin.copy_target import Side
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import CommitStateUnknown, Conflict, StorageError, Superseded
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultyStore
from tests.simulation.publishing import Way, faults
from tests.support.simulation import SimRuntime, Simulation, SimulationFailed

SHARE = 0.5
"""Of the seeds; see conftest.py."""

SOURCE = ConsumerConfig(
    store="memory://from", gc=GarbageCollectorConfig(enabled=False), cas_deadline_ms=20_000
)
TARGET = ConsumerConfig(
    store="memory://to", gc=GarbageCollectorConfig(enabled=False), cas_deadline_ms=20_000
)
TROUBLE = (StorageError, Conflict, CommitStateUnknown)
BATCHES = 40


class CopyWorld:
    """A source that grows, those who copy it, and the target's reader."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed)
        now_ms = self.simulation.now_ms
        self.source = MemoryStore("from", now_ms=now_ms)
        self.memory = MemoryStore("to", now_ms=now_ms)
        self.plan = faults(self.simulation.random)
        self.written: list[bytes] = []
        self.read: list[bytes] = []
        self.over = False
        self.kills = self.overtaken = self.nodes = 0

    def at_access(self, process: SimRuntime, operation: str) -> None:
        self.simulation.checkpoint()

    def chance(self, probability: float) -> bool:
        return self.simulation.random.random() < probability

    def uniform(self, low: float, high: float) -> float:
        return self.simulation.random.uniform(low, high)

    def grow(self, process: SimRuntime) -> None:
        claim_queue(self.source, SOURCE, runtime=process)
        manifest = Manifest.empty()
        self.source.put("ingest/manifest", manifest.raw)
        for number in range(BATCHES):
            value = b"%d" % number
            txn = Transaction("app", number) if self.chance(0.3) else None
            location = batch_key("ingest", process.ulid(), txn)
            self.source.put(location, encode_batch([value]))
            manifest = manifest.append([NewEntry(location)])
            if txn is not None and self.chance(0.5):
                again = [
                    NewEntry(batch_key("ingest", process.ulid(), each)) for each in (None, txn)
                ]
                for each in again:
                    self.source.put(each.location, encode_batch([]))
                manifest = manifest.append(again)
            self.source.put("ingest/manifest", manifest.raw)
            self.written.append(value)
            process.sleep(self.uniform(0, 3))

    def copy(self, process: SimRuntime, store: Any) -> None:
        while not self.over:
            try:
                copier = Copier(Side(self.source, SOURCE), Side(store, TARGET), process)
                while not self.over:
                    if not copier.step():
                        process.sleep(self.uniform(0.1, 2))
            except Superseded:
                self.overtaken += 1
                return
            except TROUBLE as error:
                self.simulation.log(f"{process.name}: {error}")
                process.sleep(1)

    def supervise(self, process: SimRuntime) -> None:
        while not self.over:
            own = self.simulation.process(f"copy#{self.nodes}")
            self.nodes += 1
            way: Any = Way(self, own)  # type: ignore[arg-type]
            store = FaultyStore(way, own, self.plan, seed=self.simulation.random.randrange(2**32))
            task = own.spawn(lambda p=own, s=store: self.copy(p, s), "main")  # type: ignore[misc]
            task.join(self.uniform(1, 20))
            if not task.is_alive() or self.over:
                continue
            if self.chance(0.5):
                self.kills += 1
                self.simulation.kill(own)
            elif self.chance(0.5):
                # The next one takes over meanwhile.
                self.simulation.pause(own, self.uniform(1, 30))

    def consume(self, process: SimRuntime) -> None:
        rule = ReadCommitted("ingest")
        consumer = Consumer(TARGET, store=self.memory, runtime=process)
        while not self.over:
            for entry in consumer.next_descriptors(100):
                if rule.offer(entry.sequence, entry.location, lambda begin, end: ()):
                    got = self.memory.get(entry.location)
                    assert isinstance(got, Blob)
                    self.read += decode_batch(got.data)
                consumer.ack_through(entry.sequence)
            process.sleep(self.uniform(0, 3))


def live(world: CopyWorld) -> None:
    growing = world.simulation.process("source")
    task = growing.spawn(lambda: world.grow(growing), "main")
    director = world.simulation.process("director")
    director.sleep(0.1)
    supervisor = world.simulation.process("supervisor")
    supervisor.spawn(lambda: world.supervise(supervisor), "main")
    reader = world.simulation.process("reader")
    reader.spawn(lambda: world.consume(reader), "main")
    task.join()
    for _ in range(2_000):
        director.sleep(1)
        if len(world.read) >= len(world.written):
            break
    director.sleep(20)
    world.over = True
    if world.read != world.written:
        world.simulation.fail(f"read {world.read}, written {world.written}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_whatever_happens_to_those_who_copy_each_batch_arrives_once_and_in_order(
    seed: int,
) -> None:
    world = CopyWorld(seed)
    try:
        world.simulation.run(lambda: live(world))
    except SimulationFailed as error:
        history = "\n".join(world.simulation.history[-60:])
        pytest.fail(f"{error}\n\n{history}\n\nOPENDATA_BUFFER_SEED={seed}", pytrace=False)
    assert len(world.read) == BATCHES
    assert world.nodes > 2
    assert world.kills + world.overtaken
