"""A consumer beside somebody who writes all the time: it is let in, and soon."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import create_autospec

import pytest

from opendata_buffer.broker.broker import Service, SharedQueue
from opendata_buffer.broker.protocol import VALID_MS, AppendRequest
from opendata_buffer.broker.server import Session
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.producer.group_commit import shared_committer
from opendata_buffer.producer.write_fairness import ALONE_S, BESIDE_S
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from tests.support.simulation import SimRuntime, Simulation

CONFIG = ProducerConfig(store="memory://simulation")
SECONDS = 60.0
MARGIN_S = 1.0


class World:
    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed, max_steps=5_000_000)
        self._inner = MemoryStore("simulation", now_ms=self.simulation.now_ms)
        self.appended = 0
        self.opening_s = 0.0
        self.acks: list[float] = []
        self.appends: list[float] = []

    def store(self, runtime: SimRuntime) -> FaultyStore:
        plan = FaultPlan(get_ms=60, cas_ms=60, jitter=0.05)
        return FaultyStore(self._inner, runtime, plan, seed=self.simulation.seed)

    def entry(self) -> NewEntry:
        self.appended += 1
        return NewEntry(f"ingest/{self.appended:06}")

    def produce(self, runtime: SimRuntime) -> None:
        """Two callers of one committer: while one is being appended the other waits."""
        committer = shared_committer(self.store(runtime), CONFIG, runtime)

        def call() -> None:
            while self.simulation.now < SECONDS:
                committer.append([self.entry()], begin_by=runtime.monotonic() + 60)

        for task in [runtime.spawn(call, "caller") for _ in range(2)]:
            task.join()

    def broker(self, runtime: SimRuntime) -> None:
        queue = SharedQueue(self.store(runtime), CONFIG, runtime=runtime)
        service = Service(queue, runtime, "ingest")

        def submit() -> None:
            if self.simulation.now < SECONDS:
                request = AppendRequest(1, (self.entry(),), Moment.now(runtime), VALID_MS)
                service.submit(session, request, 1)

        # Two clients that always have one more to append.
        session = create_autospec(Session, instance=True)
        session.answer.side_effect = lambda body: submit()
        service.start()
        submit()
        submit()
        runtime.sleep(SECONDS)
        service.stop(5)

    def consume(self, runtime: SimRuntime) -> None:
        runtime.sleep(1 + runtime.random())
        queue = Queue(self.store(runtime), CONFIG, runtime=runtime, role="consumer")
        began = self.simulation.now
        epoch = queue.claim_epoch(None).epoch
        self.opening_s = self.simulation.now - began
        while self.simulation.now < SECONDS - 5:
            runtime.sleep(1)
            manifest = queue.read()
            assert manifest is not None
            began = self.simulation.now
            queue.dequeue(manifest.next_sequence - 1, epoch)
            self.acks.append(self.simulation.now - began)

    def sink(self, runtime: SimRuntime) -> None:
        runtime.sleep(1 + runtime.random())
        queue = Queue(self.store(runtime), CONFIG, runtime=runtime, role="producer")
        while self.simulation.now < SECONDS - 5:
            began = self.simulation.now
            queue.append([self.entry()], guard=lambda before: None)
            self.appends.append(self.simulation.now - began)
            runtime.sleep(1)

    def run(self, busy: str, visitor: Callable[[SimRuntime], None]) -> None:
        def main() -> None:
            writer, guest = (self.simulation.process(each) for each in (busy, "visitor"))
            writing = {"producer": self.produce, "broker": self.broker}[busy]
            tasks = [
                writer.spawn(lambda: writing(writer), busy),
                guest.spawn(lambda: visitor(guest), "visitor"),
            ]
            for task in tasks:
                task.join()

        self.simulation.run(main)


@pytest.mark.parametrize("busy", ["producer", "broker"])
def test_a_consumer_gets_its_write_in_beside_a_writer_that_never_rests(busy: str) -> None:
    for number in range(3):
        world = World(number)
        world.run(busy, world.consume)
        # It was busy: hardly a moment without a write of its own.
        assert world.appended > 0.4 * SECONDS / 0.06
        assert world.opening_s <= ALONE_S + MARGIN_S
        assert len(world.acks) >= 15
        assert sorted(world.acks)[len(world.acks) * 9 // 10] <= BESIDE_S + MARGIN_S
        assert max(world.acks) <= 3 * BESIDE_S


def test_an_append_that_depends_on_the_manifest_is_let_in_too() -> None:
    for number in range(3):
        world = World(number)
        world.run("broker", world.sink)
        first, *others = world.appends
        assert first <= ALONE_S + MARGIN_S
        assert len(others) >= 15
        assert max(others) <= BESIDE_S + MARGIN_S
