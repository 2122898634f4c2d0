"""Producers of several processes on one queue, without a broker: they share it fairly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from opendata_buffer import Producer, ProducerConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.stores.base import NotModified
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from tests.support.simulation import SimRuntime, SimTask, Simulation

CONFIG = ProducerConfig(store="memory://simulation", flush_size_bytes=1, broker="off")
PLAN = FaultPlan(get_ms=60, put_ms=60, cas_ms=60, jitter=0.1)
RATE = 10.0
KNOWN_S = 10.0
"""When the processes know each other; before, those that begin together race."""


@dataclass
class Processes:
    count: int
    seconds: float
    delays: list[float] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    produced: int = 0
    attempts: int = 0
    conflicts: int = 0

    def run(self, seed: int) -> list[str]:
        """Returns the locations in the queue at the end."""
        self.simulation = Simulation(seed, max_steps=5_000_000)
        self.producers: list[Producer] = []
        inner = MemoryStore("simulation", now_ms=self.simulation.now_ms)

        def main() -> None:
            director = self.simulation.process("director")
            tasks = [self.start(number, inner) for number in range(self.count)]
            director.sleep(KNOWN_S)
            before = self.writes()
            for task in tasks:
                task.join()
            self.attempts, self.conflicts = (
                now - then for now, then in zip(self.writes(), before, strict=True)
            )
            for producer in self.producers:
                producer.close()

        self.simulation.run(main)
        blob = inner.get(CONFIG.manifest_path)
        assert not isinstance(blob, NotModified)
        return Manifest.parse(blob.data).locations()

    def writes(self) -> tuple[int, int]:
        return (
            sum(producer.commit_attempts for producer in self.producers),
            sum(producer.commit_conflicts for producer in self.producers),
        )

    def start(self, number: int, inner: MemoryStore) -> SimTask:
        runtime = self.simulation.process(f"producer-{number}")
        store = FaultyStore(inner, runtime, PLAN, seed=number)
        return runtime.spawn(lambda: self.produce(number, runtime, store), "main")

    def produce(self, number: int, runtime: SimRuntime, store: FaultyStore) -> None:
        runtime.sleep(self.simulation.random.random() / RATE)
        producer = Producer(CONFIG, store=store, runtime=runtime)
        self.producers.append(producer)
        started = self.simulation.now
        for call in range(int(self.seconds * RATE)):
            handle = producer.produce([b"x" * 100])
            self.produced += 1
            handle.watcher.add_done_callback(self.durable(number, self.simulation.now))
            runtime.sleep(max(0.0, started + (call + 1) / RATE - self.simulation.now))

    def durable(self, number: int, called: float) -> Callable[[], None]:
        def note() -> None:
            now = self.simulation.now
            if called >= KNOWN_S:
                self.delays.append(now - called)
            if KNOWN_S <= now < self.seconds:
                self.done[number] = self.done.get(number, 0) + 1

        return note

    @property
    def p99(self) -> float:
        return sorted(self.delays)[int(len(self.delays) * 0.99)]

    @property
    def least_share(self) -> float:
        return min(self.done.values()) / (RATE * (self.seconds - KNOWN_S))


@pytest.mark.parametrize(
    ("count", "seconds", "p99", "wasted"),
    [(1, 20, 0.2, 0.0), (2, 30, 0.8, 0.1), (16, 30, 5.0, 0.4)],
)
def test_processes_on_one_queue_get_their_share_in_time(
    count: int, seconds: float, p99: float, wasted: float
) -> None:
    processes = Processes(count, seconds)
    queued = processes.run(seed=1)
    assert len(queued) == len(set(queued)) == processes.produced
    assert len(processes.done) == count
    assert processes.p99 <= p99
    assert processes.conflicts <= wasted * processes.attempts
    assert processes.least_share >= 0.5
