"""All writers of a manifest get their share of it in time.

Producers without a broker; and a sink or a consumer, which must read before they write, beside a
broker or a producer that always has something to write. Whatever ends one of them costs seconds and
nothing else.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import pytest

from buffer_sink.committer import Group, QueueCommitter, UploadedBatch
from buffer_sink.options import SinkOptions
from opendata_buffer import Consumer, Producer
from opendata_buffer.broker.committer import BrokerPause, open_brokered_committer
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    QueueConfig,
)
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch, parse_location
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.producer.committer import Committer
from opendata_buffer.producer.fairness import ALONE_S, CONTENDED_S
from opendata_buffer.producer.sharing import shared_committer
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.memory import MemoryStore
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan, HarshStore
from tests.support.network import SimNetwork
from tests.support.simulation import SeededChoices, SimRuntime, SimTask, Simulation

SHARE = 0.1

CONFIG = ProducerConfig(store="memory://simulation")
CONSUMING = ConsumerConfig(
    store=CONFIG.store, gc=GarbageCollectorConfig(enabled=False), create_if_missing=True
)
OPTIONS = SinkOptions(queue=QueueConfig(store="memory://simulation"))
BEGIN_S = 10.0
"""The broker serves, and its clients have found it."""
CLIENTS = 2
REQUEST_S = 0.06
"""Of a read, and of a write."""


class World(SeededChoices):
    """Brokers, clients that append all the time, and a visitor. Without brokers the clients are two
    threads of one producer.

    Attributes:
        appends: Seconds of each append of the visitor.
        waits: When each append of a client ended, and how long it took.
        opened_s: Seconds that a consumer took to take the queue over.
        acks: Seconds of each of its acknowledgements.
        taken: Locations that it has read and acknowledged.
    """

    def __init__(self, seed: int, *, broker: str = "auto", brokers: int = 1) -> None:
        self.seed = seed
        self.broker = broker
        self.brokers = brokers
        self.simulation = Simulation(seed, max_steps=20_000_000)
        self.network = SimNetwork(self.simulation)
        self.inner = MemoryStore("simulation", now_ms=self.simulation.now_ms)
        self.director = self.simulation.process("director")
        self.hosts: list[tuple[SimRuntime, LeaderElection]] = []
        self.appends: list[float] = []
        self.waits: list[tuple[float, float]] = []
        self.landed: list[str] = []
        self.opened_s = 0.0
        self.acks: list[float] = []
        self.taken: list[str] = []
        self.over = False
        self._made = 0

    def store(self, runtime: SimRuntime) -> HarshStore:
        request_ms = REQUEST_S * 1000
        plan = HarshPlan(get_ms=request_ms, put_ms=request_ms, cas_ms=request_ms, jitter=0.05)
        return HarshStore(self.inner, runtime, plan, seed=self.seed)

    def process(self, role: str) -> SimRuntime:
        self._made += 1
        return self.simulation.process(f"{role}#{self._made}")

    def entry(self, who: str) -> NewEntry:
        self._made += 1
        return NewEntry(f"ingest/{who}-{self._made:06}")

    def serve(self) -> None:
        runtime = self.process("host")
        network = self.network.of(runtime)

        def live() -> None:
            store = self.store(runtime)
            made = LeaderElection(store, CONFIG, runtime, network)
            self.hosts.append((runtime, made))

        runtime.spawn(live, "host")

    def produce(self, runtime: SimRuntime) -> None:
        """Of two clients one always waits for the next write."""
        committer = self.committer(runtime)
        while not self.over:
            entry, began = self.entry("client"), self.simulation.now
            committer.append([entry], begin_by=runtime.monotonic() + 120)
            self.landed.append(entry.location)
            self.waits.append((self.simulation.now, self.simulation.now - began))
        committer.close()

    def committer(self, runtime: SimRuntime) -> Committer:
        if not self.brokers:
            return shared_committer(self.store(runtime), CONFIG, runtime)
        network = self.network.of(runtime)
        return open_brokered_committer(self.store(runtime), CONFIG, runtime, None, network=network)

    def open_pause(self, runtime: SimRuntime) -> Callable[..., BrokerPause]:
        return partial(BrokerPause, network=self.network.of(runtime))

    def visit(self, runtime: SimRuntime, seconds: float) -> None:
        """Append every second or so, by itself."""
        queue = Queue(
            self.store(runtime),
            CONFIG,
            runtime=runtime,
            role="producer",
            open_pause=None if self.broker == "off" else self.open_pause(runtime),
        )
        runtime.sleep(runtime.random())
        while self.simulation.now < BEGIN_S + seconds:
            entry, began = self.entry("writer"), self.simulation.now
            queue.append([entry], guard=lambda before: None)
            self.landed.append(entry.location)
            self.appends.append(self.simulation.now - began)
            runtime.sleep(1)

    def consume(self, runtime: SimRuntime, seconds: float) -> None:
        """Take the queue over, and acknowledge all there is every second or so."""
        store, queue = self.store(runtime), None
        if self.broker == "off":
            queue = Queue(store, CONSUMING, runtime=runtime, role="consumer")
        runtime.sleep(runtime.random())
        began = self.simulation.now
        consumer = Consumer(
            CONSUMING,
            store=store,
            runtime=runtime,
            queue=queue,
            open_pause=self.open_pause(runtime),
        )
        self.opened_s = self.simulation.now - began
        while self.simulation.now < BEGIN_S + seconds:
            runtime.sleep(1)
            found = consumer.next_descriptors(100_000)
            self.taken += [each.location for each in found]
            began = self.simulation.now
            consumer.ack_through(found[-1].sequence)
            self.acks.append(self.simulation.now - began)
        consumer.close()

    def run(self, direct: Callable[[], None]) -> None:
        """Let clients write all the time while ``direct`` runs, in the director's process."""

        def main() -> None:
            for _ in range(self.brokers):
                self.serve()
            self.director.sleep(BEGIN_S / 2)
            clients: list[SimTask] = []
            runtime = self.process("client")
            for _ in range(CLIENTS):
                if self.brokers:
                    runtime = self.process("client")
                clients.append(runtime.spawn(lambda r=runtime: self.produce(r), "client"))  # type: ignore[misc]
            self.director.sleep(BEGIN_S / 2)
            direct()
            self.over = True
            for each in clients:
                each.join()
            for runtime, host in self.hosts:
                if runtime.alive:
                    host.stop(5)

        run(self.simulation, main)

    def serving(self) -> SimRuntime | None:
        return next((each for each, host in self.hosts if each.alive and host.serving), None)

    def queued(self) -> list[str]:
        queue = Queue(self.inner, CONFIG, runtime=self.process("reader"), role="test")
        return [each.location for each in (queue.read() or Manifest.empty()).entries()]

    def longest_pause(self) -> float:
        """Seconds for which no append of any client landed."""
        times = sorted(at for at, _ in self.waits)
        return max(b - a for a, b in pairwise(times))


def visited(seed: int, broker: str, seconds: float) -> World:
    world = World(seed, broker=broker)
    writer = world.process("writer")
    world.run(lambda: writer.spawn(lambda: world.visit(writer, seconds), "writer").join())
    # There was no moment in which the broker had nothing to write.
    assert len(world.waits) > 0.5 * (BEGIN_S / 2 + seconds) / REQUEST_S
    assert sorted(world.landed) == sorted(world.queued())
    return world


def test_an_append_beside_a_busy_broker_is_made_at_once() -> None:
    alone = [visited(number, "off", 1) for number in range(5)]
    asking = [visited(number, "auto", 10) for number in range(5)]
    # Eight seconds, where it fights; where it asks, two reads and two writes, and what the broker
    # has under way.
    assert median(each.appends[0] for each in alone) > 2
    # The one that finds the broker also shows it that this process may write: a put and a get.
    assert max(max(each.appends) for each in asking) < 10 * REQUEST_S
    later = [seconds for each in asking for seconds in sorted(each.appends)[:-1]]
    assert len(later) > 30
    assert max(later) < 5 * REQUEST_S
    # A client waits for what was under way, the writer's read and write, and the broker's.
    waits = [seconds for each in asking for _, seconds in each.waits]
    assert max(waits) < 10 * REQUEST_S


def consumed(seed: int, broker: str, seconds: float, brokers: int = 1) -> World:
    world = World(seed, broker=broker, brokers=brokers)
    consumer = world.process("consumer")
    world.run(lambda: consumer.spawn(lambda: world.consume(consumer, seconds), "consumer").join())
    assert len(world.waits) > 0.5 * (BEGIN_S / 2 + seconds) / REQUEST_S
    # Each once, in all.
    assert sorted(world.landed) == sorted(world.taken + world.queued())
    return world


def test_a_consumer_beside_a_busy_broker_takes_the_queue_over_at_once() -> None:
    alone = [consumed(number, "off", 1) for number in range(5)]
    asking = [consumed(number, "auto", 10) for number in range(5)]
    assert median(each.opened_s for each in alone) > 2
    # Besides what an append takes: the marker, the probe of the store, and the note of who reads.
    assert max(each.opened_s for each in asking) < 1
    acks = [seconds for each in asking for seconds in each.acks]
    assert len(acks) > 30
    assert median(acks) < 5 * REQUEST_S
    # In some worlds an acknowledgement is the first that finds the broker.
    assert max(acks) < 10 * REQUEST_S
    assert max(seconds for each in asking for _, seconds in each.waits) < 10 * REQUEST_S


@pytest.mark.parametrize("brokers", [0, 1], ids=["a producer", "a broker"])
def test_a_consumer_that_cannot_ask_gets_its_write_in_beside_a_busy_writer(brokers: int) -> None:
    for number in range(3):
        world = consumed(number, "off", 50, brokers)
        assert world.opened_s <= ALONE_S + 1
        assert len(world.acks) >= 15
        assert sorted(world.acks)[len(world.acks) * 9 // 10] <= CONTENDED_S + 1
        assert max(world.acks) <= 3 * CONTENDED_S


class Frozen(BrokerPause):
    """Something happens to its process just when the broker pauses."""

    happens: Callable[[], None]

    def ask(self, writes: int) -> bool:
        granted = super().ask(writes)
        if granted:
            self.happens()
        return granted


@pytest.mark.parametrize("deed", ["killed", "suspended", "cut off"])
def test_a_pause_of_a_process_that_never_writes_costs_as_much_as_any_other(deed: str) -> None:
    world = World(3)
    writer = world.process("writer")
    happened: list[float] = []

    def happen() -> None:
        happened.append(world.simulation.now)
        if deed == "killed":
            world.simulation.kill(writer)
            world.network.kill(writer)
        elif deed == "suspended":
            world.simulation.pause(writer, 30)
        else:
            broker = world.serving()
            assert broker is not None
            world.network.cut(writer, broker)

    def happens() -> None:
        # From outside: a process that was killed does nothing any more, and its connections end.
        world.director.spawn(happen, "happen")
        writer.sleep(0.001)

    def live() -> None:
        store = world.store(writer)
        pause = Frozen(store, CONFIG, writer, network=world.network.of(writer))
        pause.happens = happens
        queue = Queue(store, CONFIG, runtime=writer, role="producer", open_pause=lambda *_: pause)
        queue.append([world.entry("writer")], guard=lambda before: None)

    def direct() -> None:
        writer.spawn(live, "writer")
        world.director.sleep(10)

    world.run(direct)
    assert len(happened) == 1
    assert len(world.waits) > 0.4 * (BEGIN_S / 2 + 10) / REQUEST_S
    assert 4 * REQUEST_S < world.longest_pause() < 8 * REQUEST_S


class Query:
    """A query that is started again, and repeats its micro-batch, until that is committed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.batch = 0
        self.runtime = world.process("sink")

    def start(self) -> None:
        self.runtime = self.world.process("sink")
        runtime = self.runtime
        runtime.spawn(lambda: self.live(runtime), "sink")

    def live(self, runtime: SimRuntime) -> None:
        world = self.world
        store = world.store(runtime)
        committer = QueueCommitter(store, OPTIONS, runtime, world.open_pause(runtime))
        while not world.over:
            began, batch = world.simulation.now, self.batch
            txn = Transaction("job", batch)
            key = batch_key("ingest", runtime.ulid(), txn)
            data = encode_batch([b"%d" % batch])
            try:
                store.put(key, data)
                upload = UploadedBatch(key, 1, (Metadata(0, 7, b""),))
                committer.append(Group(Moment.now(runtime), (upload,), txn, "query"))
            except OpenDataBufferError as error:
                world.simulation.log(f"{runtime.name}: {error}")
                runtime.sleep(0.5)
                continue
            self.batch = batch + 1
            world.appends.append(world.simulation.now - began)
            runtime.sleep(runtime.random())


def test_whatever_ends_brokers_and_sinks_nothing_is_lost_and_nothing_is_twice(seed: int) -> None:
    world = World(seed, brokers=2)
    query = Query(world)
    rng = random.Random(seed)
    deeds: Counter[str] = Counter()

    def direct() -> None:
        query.start()
        for _ in range(8):
            world.director.sleep(rng.uniform(0.5, 4))
            deed = rng.choice(("kill broker", "pause broker", "kill sink", "pause sink", "cut"))
            broker, sink = world.serving(), query.runtime
            if broker is None:
                continue
            deeds[deed] += 1
            if deed == "kill broker":
                world.simulation.kill(broker)
                world.network.kill(broker)
                world.serve()
            elif deed == "pause broker":
                world.simulation.pause(broker, rng.uniform(0.5, 12))
            elif deed == "kill sink":
                world.simulation.kill(sink)
                world.network.kill(sink)
                query.start()
            elif deed == "pause sink":
                world.simulation.pause(sink, rng.uniform(0.5, 5))
            else:
                world.network.cut(broker, sink)
                world.director.sleep(rng.uniform(0.5, 5))
                world.network.heal(broker, sink)
        world.director.sleep(25)

    world.run(direct)
    queued = Counter(world.queued())
    assert [each for each, count in queued.items() if count > 1] == []
    assert [each for each in world.landed if each not in queued] == []
    found = [parse_location(each, "ingest") for each in queued]
    batches = [each.txn.batch for each in found if each is not None and each.txn is not None]
    # In order, each once; the last one may be in without its query having heard so.
    assert batches == list(range(len(batches)))
    assert query.batch <= len(batches) <= query.batch + 1
    assert sum(deeds.values()) >= 4
    assert len(world.waits) > 100
    assert query.batch > 10


EAGER = ProducerConfig(store=CONFIG.store, flush_size_bytes=1, broker="off")
RATE = 10.0
KNOWN_S = 10.0
"""When the processes know each other; before, those that begin together race."""


@pytest.mark.parametrize(
    ("count", "seconds", "p99", "wasted"),
    [(1, 20, 0.2, 0.0), (2, 30, 0.8, 0.1), (16, 30, 5.0, 0.4)],
)
def test_processes_on_one_queue_get_their_share_in_time(
    count: int, seconds: float, p99: float, wasted: float
) -> None:
    world = World(1, broker="off", brokers=0)
    producers: list[Producer] = []
    durable: list[tuple[int, float, float]] = []
    """Of each record its producer, and when it was produced and durable."""
    raced: list[tuple[int, int]] = []
    """Attempts and conflicts of all, when they know each other and at the end."""

    def live(number: int, runtime: SimRuntime) -> None:
        runtime.sleep(world.uniform(0, 1 / RATE))
        producer = Producer(EAGER, store=world.store(runtime), runtime=runtime)
        producers.append(producer)
        started = runtime.monotonic()
        for call in range(int(seconds * RATE)):
            watcher = producer.produce([b"x" * 100])
            watcher.add_done_callback(partial(note, number, runtime.monotonic()))
            runtime.sleep(max(0.0, started + (call + 1) / RATE - runtime.monotonic()))

    def note(number: int, produced: float, _: object) -> None:
        durable.append((number, produced, world.simulation.now))

    def count_races() -> None:
        committers = [producer._sender.committer for producer in producers]
        conflicts = sum(committer.conflicts for committer in committers)
        raced.append((sum(committer.attempts for committer in committers), conflicts))

    def main() -> None:
        runtimes = [world.process("producer") for _ in range(count)]
        tasks = [each.spawn(partial(live, n, each), "main") for n, each in enumerate(runtimes)]
        world.director.sleep(KNOWN_S)
        count_races()
        for task in tasks:
            task.join()
        count_races()
        for producer in producers:
            producer.close()

    run(world.simulation, main)
    queued = world.queued()
    assert len(queued) == len(set(queued)) == count * int(seconds * RATE)
    delays = sorted(end - at for _, at, end in durable if at >= KNOWN_S)
    assert delays[int(len(delays) * 0.99)] <= p99
    (attempts, conflicts), (all_attempts, all_conflicts) = raced
    assert all_conflicts - conflicts <= wasted * (all_attempts - attempts)
    done = Counter(number for number, _, end in durable if KNOWN_S <= end < seconds)
    assert len(done) == count
    assert min(done.values()) >= 0.5 * RATE * (seconds - KNOWN_S)
