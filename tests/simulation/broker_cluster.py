"""A simulated cluster with real producers, workers, and brokers.

A broker runs in its own process, or inside a producer or a worker. The promises, which are
compared with everything that the store saw:

* A record is queued once if its handle reported it durable, and at most once otherwise. A record
  that failed for good is not queued.
* The records of one producer process are queued in the order in which it produced them.
* Each batch is completed once, by one worker. No other worker gets it while a worker without
  faults holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from opendata_buffer import Producer, outcomes
from opendata_buffer.broker.committer import open_brokered_committer
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.worker import ClaimedBatch, Worker
from opendata_buffer.config import ProducerConfig, StoreOptions, WorkerConfig
from opendata_buffer.errors import (
    ClaimLost,
    CommitStateUnknown,
    Conflict,
    Fenced,
    FlushFailed,
    OpenDataBufferError,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import FOOTER_SIZE, BatchDescriptor, Manifest, decode_entry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan, HarshStore
from tests.support.network import SimNetwork
from tests.support.simulation import SimRuntime, SimTask, Simulation

CLAIM_TIMEOUT_MS = 8_000
STORE = "memory://simulation"
MANIFEST = "ingest/manifest"
DISTURBANCES = ("kill", "kill", "pause", "cut", "deny", "outage", "clock")
STANDSTILL_S = 150.0
"""Seconds without progress after which a history fails. No claim, delivery, or takeover takes as
long."""


class Recorder(MemoryStore):
    """A store that remembers every manifest entry, also those that a consumer has removed."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__("simulation", now_ms=simulation.now_ms)
        self.fail = simulation.fail
        self.entries: dict[int, str] = {}
        self.objects: dict[str, bytes] = {}
        self.manifest = Manifest.empty()

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        outcome = super().put_if(key, data, condition)
        if key == MANIFEST and isinstance(outcome, outcomes.Applied):
            before, self.manifest = self.manifest, Manifest.parse(data)
            for entry in self._new_entries(before):
                known = self.entries.setdefault(entry.sequence, entry.location)
                if known != entry.location:
                    self.fail(f"sequence {entry.sequence}: {known} became {entry.location}")
        return outcome

    def _new_entries(self, before: Manifest) -> Iterator[BatchDescriptor]:
        """Yield the entries appended since ``before``, or all entries if it is not a prefix."""
        raw, known = self.manifest.raw, before.raw[:-FOOTER_SIZE]
        if not raw.startswith(known):
            yield from self.manifest.entries()
            return
        offset = len(known)
        for sequence in range(before.next_sequence, self.manifest.next_sequence):
            entry, offset = decode_entry(raw, offset, sequence, len(raw) - FOOTER_SIZE)
            yield entry

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.objects[key] = bytes(data)
        super().put(key, data)


@dataclass(eq=False)
class Member:
    """One process. Its ``name`` is its role, which the process that replaces it takes over."""

    name: str
    runtime: SimRuntime
    store: HarshStore
    troubled_at: float = float("-inf")
    """Virtual time until which a fault may affect it."""


def harsh_plan(random: Random) -> HarshPlan:
    """Draw faults of the store: delays, lost requests, lost answers, and late writes."""
    return HarshPlan(
        get_ms=random.uniform(5, 60),
        put_ms=random.uniform(5, 100),
        cas_ms=random.uniform(5, 60),
        cas_lost_after=random.choice((0, 0.1)),
        cas_lost_before=random.choice((0, 0.1)),
        cas_late=random.choice((0, 0.05)),
        get_errors=random.choice((0, 0.05)),
        jitter=0.5,
    )


@dataclass
class BrokerCluster:
    """Brokers, producers, and workers around one store, with a record of every promise."""

    seed: int
    hosts: int = 3
    producers: int = 10
    workers: int = 4
    fences: bool = False
    run_s: float = 30.0
    pause_s: float = 0.2
    work_s: float = 0.2
    disturbances: tuple[str, ...] = DISTURBANCES
    durable: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    done: Counter[int] = field(default_factory=Counter)
    handed_out: Counter[int] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.simulation = Simulation(self.seed, max_steps=20_000_000)
        self.random = self.simulation.random
        self.network = SimNetwork(self.simulation)
        self.store = Recorder(self.simulation)
        self.plan = harsh_plan(self.random)
        self.director = self.simulation.process("director")
        self.members: list[Member] = []
        self.holding: dict[int, tuple[Member, float]] = {}
        """The worker that holds each claimed batch, and the time of its claim."""
        self.claims: dict[int, float] = {}
        self.taken: set[int] = set()
        self.tasks: list[SimTask] = []
        self.lives: dict[str, Callable[[Member], None]] = {}
        self.closing = False
        self.calm = False
        self.ended = False
        self._born = 0

    # Processes.

    def member(self, name: str) -> Member:
        self._born += 1
        skew = 0 if self.random.random() < 0.5 else self.random.randrange(-900_000, 900_000)
        runtime = self.simulation.process(f"{name}#{self._born}", clock_skew_ms=skew)
        seed = self.random.randrange(1 << 30)
        member = Member(name, runtime, HarshStore(self.store, runtime, self.plan, seed=seed))
        self.members.append(member)
        return member

    def start(self, name: str, live: Callable[[Member], None]) -> None:
        member = self.member(name)
        self.lives[name] = live
        self.tasks.append(member.runtime.spawn(lambda: live(member), name))

    def host(self, member: Member) -> None:
        runtime = member.runtime
        network = self.network.of(runtime)
        config = ProducerConfig(store=STORE).with_timeout(10_000)
        host = LeaderElection(member.store, config, runtime, network)
        while not self.ended:
            runtime.sleep(2)
        host.stop(5)

    def produce(self, member: Member) -> None:
        runtime = member.runtime
        config = ProducerConfig(
            store=STORE,
            flush_interval_ms=50 + self.random.randrange(200),
            delivery_timeout_ms=self.random.choice((20_000, 120_000)),
            store_options=StoreOptions(timeout_ms=10_000),
            broker="host" if self.random.random() < 0.2 else "auto",
        )
        committer = partial(open_brokered_committer, network=self.network.of(runtime))
        producer, number = None, 0
        while producer is None:
            try:
                producer = Producer(
                    config, store=member.store, runtime=runtime, open_committer=committer
                )
            except (TransientStorageError, Conflict):
                runtime.sleep(1)
        while not self.closing:
            record = f"{runtime.name} {number:06}".encode()
            number += 1
            self._watch(producer, record)
            runtime.sleep(self.random.uniform(0, 2 * self.pause_s))
        try:
            producer.close()
        except FlushFailed as error:
            self.simulation.log(f"{runtime.name}: {error}")

    def _watch(self, producer: Producer, record: bytes) -> None:
        handle = producer.produce([record])

        def settled(_: object) -> None:
            try:
                handle.result()
            except CommitStateUnknown:
                self.happened["unknown"] += 1
            except (Conflict, QueueFull, TransientStorageError):
                self.failed.add(record)
            else:
                self.durable.add(record)

        handle.add_done_callback(settled)

    def work(self, member: Member) -> None:
        runtime = member.runtime
        config = WorkerConfig(
            create_if_missing=True,
            store=STORE,
            store_options=StoreOptions(timeout_ms=10_000),
            claim_timeout_ms=CLAIM_TIMEOUT_MS,
            max_deliveries=0,
            broker="host" if self.random.random() < 0.2 else "auto",
            name=runtime.name,
        )
        worker = Worker(
            config, store=member.store, runtime=runtime, network=self.network.of(runtime)
        )
        while not self.ended:
            try:
                batches = worker.claim(1 + self.random.randrange(5), timeout=1.0)
            except (TransientStorageError, Fenced) as error:
                self.simulation.log(f"{runtime.name}: {type(error).__name__}")
                runtime.sleep(1)
                continue
            now = self.simulation.now
            for batch in batches:
                self._handed_out(batch, member, now)
            for batch in batches:
                self._finish(batch, member)
        worker.close()

    def _handed_out(self, batch: ClaimedBatch, member: Member, now: float) -> None:
        """Note a claim; fail if a worker without faults still holds the batch."""
        sequence = batch.sequence
        self.handed_out[sequence] += 1
        holding = self.holding.get(sequence)
        if self.done[sequence]:
            self.simulation.fail(f"batch {sequence} is handed out although it was done")
        if holding is not None and holding[0].troubled_at < holding[1]:
            self.simulation.fail(
                f"batch {sequence} is given to {member.runtime.name}, but "
                f"{holding[0].runtime.name} has held it since {holding[1]:.3f}"
            )
        self.holding[sequence] = member, now

    def _finish(self, batch: ClaimedBatch, member: Member) -> None:
        # Now and then work longer than a claim lasts without a heartbeat.
        longest = 2.5 * CLAIM_TIMEOUT_MS / 1000 if self.random.random() < 0.03 else self.work_s
        member.runtime.sleep(self.random.uniform(0, longest))
        ends = self.random.random() < 0.95
        while True:
            try:
                if not ends:
                    self._let_go(batch, member)
                    batch.release()
                else:
                    batch.done()
                    self._let_go(batch, member)
                    self.done[batch.sequence] += 1
            except (TransientStorageError, Fenced):
                if self.ended:
                    return None
                member.runtime.sleep(0.5)
                if self.fences:
                    return self._let_go(batch, member)
                continue
            except ClaimLost:
                holding = self.holding.get(batch.sequence)
                # If it has asked before and no broker answered within the life of a claim, the
                # loss may have a reason that is not visible here.
                if (
                    holding is not None
                    and holding[0] is member
                    and member.troubled_at < holding[1]
                    and not batch._claim.asked
                    and ends
                    and not self.fences
                ):
                    self.simulation.fail(
                        f"{member.runtime.name} lost batch {batch.sequence} for no reason"
                    )
                self._let_go(batch, member)
            return None

    def _let_go(self, batch: ClaimedBatch, member: Member) -> None:
        holding = self.holding.get(batch.sequence)
        if holding is not None and holding[0] is member:
            del self.holding[batch.sequence]

    def fence(self, member: Member) -> None:
        """Let another consumer take the queue over now and then, and remove the first batch."""
        runtime = member.runtime
        queue = Queue(member.store, ProducerConfig(store=STORE), runtime=runtime, role="consumer")
        while not self.closing:
            runtime.sleep(self.random.uniform(5, 15))
            try:
                manifest = queue.claim_epoch(None)
                self.happened["fence"] += 1
                if manifest.entry_count:
                    first = manifest.first_sequence
                    self.taken.add(first)
                    queue.dequeue(first, manifest.epoch)
            except OpenDataBufferError as error:
                self.simulation.log(f"{runtime.name}: {error}")

    # Faults.

    def disturb(self) -> None:
        victim = self.random.choice(self.members)
        fault = self.random.choice(self.disturbances)
        self.happened[fault] += 1
        name = victim.runtime.name
        if fault == "kill":
            self._kill(victim)
            self.start(victim.name, self.lives[victim.name])
        elif fault == "pause":
            seconds = self.random.uniform(0.5, 12)
            self._trouble(victim, seconds)
            self.simulation.pause(victim.runtime, seconds)
        elif fault == "cut":
            other = self.random.choice(self.members)
            if other is not victim:
                seconds = self.random.uniform(0.5, 8)
                self.simulation.log(f"cut {name} from {other.runtime.name} for {seconds:.1f} s")
                self._trouble(victim, seconds)
                self._trouble(other, seconds)
                self.network.cut(victim.runtime, other.runtime)
                self._later(seconds, lambda: self.network.heal(victim.runtime, other.runtime))
        elif fault == "deny":
            self.simulation.log("the discovery record is deleted")
            self.store.delete_many(["ingest/_broker.json"])
        elif fault == "outage":
            seconds = self.random.uniform(0.5, 15)
            self.simulation.log(f"outage of the store for {name} for {seconds:.1f} s")
            self._trouble(victim, seconds)
            victim.store.plan = replace(self.plan, get_errors=1.0, cas_lost_after=1.0)
            self._later(seconds, lambda: setattr(victim.store, "plan", self.plan))
        elif fault == "clock":
            self._trouble(victim, 0)
            victim.runtime.clock_skew_ms = self.random.randrange(-900_000, 900_000)

    def _kill(self, victim: Member) -> None:
        self._trouble(victim, float("inf"))
        self.members.remove(victim)
        self.simulation.kill(victim.runtime)
        self.network.kill(victim.runtime)
        if self.random.random() < 0.5:
            victim.store.land_late_puts()

    def _trouble(self, victim: Member, seconds: float) -> None:
        # Five more seconds, in which it repeats the requests that failed.
        victim.troubled_at = max(victim.troubled_at, self.simulation.now + seconds + 5)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        def wait() -> None:
            self.director.sleep(seconds)
            work()

        self.director.spawn(wait, "later")

    # The history.

    def main(self) -> None:
        for number in range(self.hosts):
            self.start(f"host{number}", self.host)
        for number in range(self.producers):
            self.start(f"producer{number}", self.produce)
        for number in range(self.workers):
            self.start(f"worker{number}", self.work)
        if self.fences:
            fencer = self.member("consumer")
            self.members.remove(fencer)
            fencer.runtime.spawn(lambda: self.fence(fencer), "consumer")
        while self.simulation.now < self.run_s:
            self.director.sleep(self.random.uniform(0.2, 2.5))
            self.disturb()
        self.closing = True
        # The other consumer may take the queue over once more in this time.
        self.director.sleep(15 if self.fences else self.random.uniform(0, 15))
        self.plan = HarshPlan(get_ms=20, put_ms=20, cas_ms=20)
        for member in self.members:
            member.store.plan = self.plan
        if self.fences:
            # A fenced process stays fenced. New brokers take the queue back.
            for victim in [member for member in self.members if not member.name.startswith("prod")]:
                self._kill(victim)
                self.start(victim.name, self.lives[victim.name])
        self._await_drained()
        self.ended = True
        for task in self.tasks:
            task.join(120)
        self.check()

    def _await_drained(self) -> None:
        # The whole backlog may take any time, but there must always be progress.
        before: tuple[int, int] | None = None
        until = self.simulation.now
        while self.store.manifest.entry_count or self._producing():
            reached = (sum(self.done.values()), self._producing())
            if reached != before:
                before = reached
                until = self.simulation.now + STANDSTILL_S
            elif self.simulation.now > until:
                self.simulation.fail(
                    f"no progress for {STANDSTILL_S:g} s: {self.store.manifest}, held by "
                    f"{[(k, member.runtime.name) for k, (member, _) in self.holding.items()]}"
                )
            self.director.sleep(1)

    def _producing(self) -> int:
        """Return the number of living producers that have not ended yet."""
        producing = {
            id(member.runtime) for member in self.members if member.name.startswith("producer")
        }
        return sum(task.is_alive() and id(task.process) in producing for task in self.tasks)

    def check(self) -> None:
        seen: dict[bytes, int] = {}
        last: dict[str, str] = {}
        locations: dict[str, int] = {}
        for sequence, location in sorted(self.store.entries.items()):
            if location in locations:
                self.simulation.fail(f"{location} is queued twice")
            locations[location] = sequence
            for record in decode_batch(self.store.objects[location]):
                if record in seen:
                    self.simulation.fail(f"{record!r} is queued twice: {seen[record]}, {sequence}")
                seen[record] = sequence
                who, number = record.decode().split()
                if last.get(who, "") >= number:
                    self.simulation.fail(f"{who} is out of order: {last[who]} before {number}")
                last[who] = number
            if self.done[sequence] > 1:
                self.simulation.fail(f"batch {sequence} was done {self.done[sequence]} times")
            if not self.handed_out[sequence] and sequence not in self.taken:
                self.simulation.fail(f"batch {sequence} left the queue, but no worker got it")
        for record in self.durable - seen.keys():
            self.simulation.fail(f"{record!r} was reported durable but is not queued")
        for record in self.failed & seen.keys():
            self.simulation.fail(f"{record!r} was reported failed but is queued")


def simulate(cluster: BrokerCluster) -> BrokerCluster:
    run(cluster.simulation, cluster.main)
    return cluster
