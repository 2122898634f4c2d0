"""Brokers that die, pause, double and are cut off; clients that only know they got no answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from opendata_buffer.broker.committer import BrokeredCommitter
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import CommitStateUnknown, Conflict, TransientStorageError
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.queue import Queue
from tests.simulation.fleet import harsh_plan
from tests.simulation.recorder import Recorder
from tests.simulation.scenario import run
from tests.support.faults import HarshStore
from tests.support.network import SimNetwork
from tests.support.simulation import SimRuntime, SimTask, Simulation
from tests.unit.broker.local import Direct

CONFIG = ProducerConfig(store="memory://simulation").with_timeout(30_000)
RUN_S = 40.0
SHARE = 0.1


@dataclass
class World:
    """Some hosts, some clients, one store, and what was promised to whom."""

    seed: int
    hosts: int = 3
    clients: int = 6
    consumes: bool = False
    torments: tuple[str, ...] = ("kill", "pause", "cut", "deny")
    durable: dict[str, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    order: dict[str, list[str]] = field(default_factory=dict)
    deeds: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.simulation = Simulation(self.seed, max_steps=3_000_000)
        self.random = self.simulation.random
        self.network = SimNetwork(self.simulation)
        self.store = Recorder(self.simulation)
        self.plan = harsh_plan(self.random)
        self.director = self.simulation.process("director")
        self.running: list[SimRuntime] = []
        self.calm = False

    def process(self, name: str) -> tuple[SimRuntime, HarshStore]:
        skew = self.random.randrange(-900_000, 900_000)
        runtime = self.simulation.process(name, clock_skew_ms=skew)
        seed = self.random.randrange(1 << 30)
        return runtime, HarshStore(self.store, runtime, self.plan, seed=seed)

    def host(self, name: str) -> None:
        runtime, store = self.process(name)
        self.running.append(runtime)

        def main() -> None:
            LeaderElection(store, CONFIG, runtime, self.network.of(runtime))

        runtime.spawn(main, name)

    def client(self, name: str) -> None:
        runtime, store = self.process(name)
        self.clients_running.append(runtime)

        def main() -> None:
            alone = Direct(store, CONFIG, runtime)
            network = self.network.of(runtime)
            committer = BrokeredCommitter(
                store, CONFIG, runtime, None, network, lambda: alone, expects=True
            )
            assert committer.join()
            number = 0
            while not self.calm:
                entries = [
                    NewEntry(f"ingest/{name}-{number + each:06}") for each in range(1 + number % 3)
                ]
                number += len(entries)
                self.append(name, committer, entries, runtime)
                runtime.sleep(self.random.uniform(0, 0.3))
            self.alone[name] = alone.used
            committer.close()

        self.tasks.append(runtime.spawn(main, name))

    def append(
        self, name: str, committer: BrokeredCommitter, entries: list[NewEntry], runtime: SimRuntime
    ) -> None:
        locations = [entry.location for entry in entries]
        while True:
            try:
                first = committer.append(entries, begin_by=runtime.monotonic() + 20)
            except (Conflict, TransientStorageError):
                continue  # Surely nothing landed.
            except CommitStateUnknown:
                self.unknown.update(locations)
                return
            for position, location in enumerate(locations):
                self.durable[location] = first + position
            self.order.setdefault(name, []).extend(locations)
            return

    def consume(self) -> None:
        runtime, store = self.process("consumer")
        queue = Queue(store, CONFIG, runtime=runtime, role="consumer")

        def main() -> None:
            epoch = None
            while not self.calm:
                runtime.sleep(self.random.uniform(0.1, 1.0))
                try:
                    if epoch is None:
                        epoch = queue.claim_epoch(None).epoch
                    manifest = queue.read()
                    if manifest is not None and manifest.entry_count:
                        queue.dequeue(manifest.next_sequence - 1, epoch)
                        self.deeds["dequeue"] += 1
                except (Conflict, TransientStorageError):
                    pass

        self.tasks.append(runtime.spawn(main, "consumer"))

    def torment(self, number: int) -> None:
        victim = self.random.choice(self.running)
        deed = self.random.choice(self.torments)
        self.deeds[deed] += 1
        self.simulation.log(f"{deed} {victim.name}")
        if deed == "kill":
            self.running.remove(victim)
            self.simulation.kill(victim)
            self.network.kill(victim)
            self.host(f"host{self.hosts + number}")
        elif deed == "pause":
            self.simulation.pause(victim, self.random.uniform(0.5, 10))
        elif deed == "cut":
            other = self.random.choice(self.clients_running + self.running)
            if other is not victim:
                self.network.cut(victim, other)
                self.director.sleep(self.random.uniform(0.5, 6))
                self.network.heal(victim, other)
        elif deed == "deny":
            self.store.delete_many(["ingest/_broker.json"])

    def live(self) -> None:
        self.tasks: list[SimTask] = []
        self.clients_running: list[SimRuntime] = []
        self.alone: dict[str, int] = {}
        for number in range(self.hosts):
            self.host(f"host{number}")
        for number in range(self.clients):
            self.client(f"client{number}")
        if self.consumes:
            self.consume()
        number = 0
        while self.simulation.now < RUN_S:
            self.director.sleep(self.random.uniform(0.5, 5))
            self.torment(number)
            number += 1
        self.calm = True
        for task in self.tasks:
            task.join()
        self.check()

    def check(self) -> None:
        found: dict[str, int] = {}
        for sequence, location in self.store.entries.items():
            if location in found:
                self.simulation.fail(f"{location} is queued twice: {found[location]}, {sequence}")
            found[location] = sequence
        for location, sequence in self.durable.items():
            if found.get(location) != sequence:
                self.simulation.fail(
                    f"{location} was promised at {sequence} and is at {found.get(location)}"
                )
        for location in found:
            if location not in self.durable and location not in self.unknown:
                self.simulation.fail(f"{location} is queued and no client knows")
        for name, locations in self.order.items():
            sequences = [self.durable[each] for each in locations]
            if sequences != sorted(sequences):
                self.simulation.fail(f"{name} is out of order")


def simulate(world: World) -> World:
    run(world.simulation, world.live)
    return world


def test_every_append_is_queued_once_whatever_happens_to_brokers(seed: int) -> None:
    world = simulate(World(seed))
    assert len(world.durable) > 100
    # Without a consumer nothing is gone from the manifest, so everything can be looked up.
    assert len(world.unknown) <= 3 * world.deeds["pause"] + 30


def test_with_a_consumer_nothing_is_queued_twice_and_doubts_are_said(seed: int) -> None:
    world = simulate(World(seed, consumes=True))
    assert len(world.durable) > 100
    assert world.deeds["dequeue"]


def test_in_peace_every_append_goes_through_the_broker() -> None:
    world = simulate(World(1, torments=("peace",), clients=10))
    assert not world.unknown
    # Those of the first moment, while the first broker announces itself and checks its clients.
    assert sum(world.alone.values()) <= 3 * world.clients
