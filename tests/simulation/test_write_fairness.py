"""All writers of a manifest get their turn in time.

The writers are producers without a broker, or a sink or consumer, which must read before it writes,
next to a broker or producer that always has something to write. A fault of one of them costs
seconds and nothing else.
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
"""Virtual time by which the broker serves and its clients have found it."""
CLIENTS = 2
REQUEST_S = 0.06
"""Duration of a read and of a write."""


class WritingCluster(SeededChoices):
    """Brokers, clients that append all the time, and another process that writes now and then.

    Without brokers the clients are two threads of one producer.

    Attributes:
        appends: Seconds that each append of the other process took.
        waits: Virtual time at which each append of a client ended, and the seconds it took.
        opened_s: Seconds that a consumer needed to take the queue over.
        acks: Seconds that each of its acknowledgements took.
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
        """Append all the time; one of the two clients always waits for the next write."""
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

    def append_alone(self, runtime: SimRuntime, seconds: float) -> None:
        """Append one entry about every second, not through the broker."""
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
        """Take the queue over, and acknowledge everything about every second."""
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
            self.taken += [entry.location for entry in found]
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
            for client in clients:
                client.join()
            for runtime, host in self.hosts:
                if runtime.alive:
                    host.stop(5)

        run(self.simulation, main)

    def serving(self) -> SimRuntime | None:
        return next(
            (runtime for runtime, host in self.hosts if runtime.alive and host.serving), None
        )

    def queued(self) -> list[str]:
        queue = Queue(self.inner, CONFIG, runtime=self.process("reader"), role="test")
        return [entry.location for entry in (queue.read() or Manifest.empty()).entries()]

    def longest_pause(self) -> float:
        """Return the longest time in which no client's append landed, in seconds."""
        times = sorted(at for at, _ in self.waits)
        return max(b - a for a, b in pairwise(times))


def appended(seed: int, broker: str, seconds: float) -> WritingCluster:
    cluster = WritingCluster(seed, broker=broker)
    writer = cluster.process("writer")
    cluster.run(
        lambda: writer.spawn(lambda: cluster.append_alone(writer, seconds), "writer").join()
    )
    # The broker always had something to write.
    # The other writer was busy: a third of what it writes alone.
    assert len(cluster.waits) > (BEGIN_S / 2 + seconds) / REQUEST_S / 3
    assert sorted(cluster.landed) == sorted(cluster.queued())
    return cluster


def test_an_append_next_to_a_busy_broker_takes_a_few_requests() -> None:
    alone = [appended(number, "off", 1) for number in range(5)]
    asking = [appended(number, "auto", 10) for number in range(5)]
    # Without asking it needs a second of retries, until it meets a moment in which the broker
    # gathers requests. If it asks for a pause, it needs two reads, two writes, and the end of the
    # broker's current request.
    assert median(cluster.appends[0] for cluster in alone) > 10 * REQUEST_S
    # The first append also proves to the broker that this process may write: a put and a get.
    assert max(max(cluster.appends) for cluster in asking) < 10 * REQUEST_S
    later = [seconds for cluster in asking for seconds in sorted(cluster.appends)[:-1]]
    assert len(later) > 30
    assert max(later) < 5 * REQUEST_S
    # A client waits for the current request, the writer's read and write, and the broker's.
    waits = [seconds for cluster in asking for _, seconds in cluster.waits]
    assert max(waits) < 10 * REQUEST_S


def consumed(seed: int, broker: str, seconds: float, brokers: int = 1) -> WritingCluster:
    cluster = WritingCluster(seed, broker=broker, brokers=brokers)
    consumer = cluster.process("consumer")
    cluster.run(
        lambda: consumer.spawn(lambda: cluster.consume(consumer, seconds), "consumer").join()
    )
    # The other writer was busy: a third of what it writes alone.
    assert len(cluster.waits) > (BEGIN_S / 2 + seconds) / REQUEST_S / 3
    # Every entry was read or is queued, exactly once.
    assert sorted(cluster.landed) == sorted(cluster.taken + cluster.queued())
    return cluster


def test_a_consumer_next_to_a_busy_broker_takes_the_queue_over_within_a_second() -> None:
    alone = [consumed(number, "off", 1) for number in range(5)]
    asking = [consumed(number, "auto", 10) for number in range(5)]
    assert median(cluster.opened_s for cluster in alone) > 10 * REQUEST_S
    # In addition to an append: the owner marker, the probe of the store, and the consumer's note.
    assert max(cluster.opened_s for cluster in asking) < 1
    acks = [seconds for cluster in asking for seconds in cluster.acks]
    assert len(acks) > 30
    assert median(acks) < 5 * REQUEST_S
    # With some seeds an acknowledgement is the first request that finds the broker.
    assert max(acks) < 10 * REQUEST_S
    assert max(seconds for cluster in asking for _, seconds in cluster.waits) < 10 * REQUEST_S


@pytest.mark.parametrize("brokers", [0, 1], ids=["a producer", "a broker"])
def test_a_consumer_that_cannot_ask_for_a_pause_still_writes_next_to_a_busy_writer(
    brokers: int,
) -> None:
    for number in range(3):
        cluster = consumed(number, "off", 50, brokers)
        assert cluster.opened_s <= ALONE_S + 1
        assert len(cluster.acks) >= 15
        assert sorted(cluster.acks)[len(cluster.acks) * 9 // 10] <= CONTENDED_S + 1
        assert max(cluster.acks) <= 3 * CONTENDED_S


class InterruptedPause(BrokerPause):
    """A pause at whose start a fault hits the process that asked for it."""

    happens: Callable[[], None]

    def ask(self, writes: int) -> bool:
        granted = super().ask(writes)
        if granted:
            self.happens()
        return granted


@pytest.mark.parametrize("fault", ["killed", "suspended", "cut off"])
def test_a_pause_costs_no_more_if_the_process_that_asked_for_it_never_writes(fault: str) -> None:
    cluster = WritingCluster(3)
    writer = cluster.process("writer")
    changed_at: list[float] = []

    def happen() -> None:
        changed_at.append(cluster.simulation.now)
        if fault == "killed":
            cluster.simulation.kill(writer)
            cluster.network.kill(writer)
        elif fault == "suspended":
            cluster.simulation.pause(writer, 30)
        else:
            broker = cluster.serving()
            assert broker is not None
            cluster.network.cut(writer, broker)

    def happens() -> None:
        # Another process does it, because a killed process does nothing and its connections end.
        cluster.director.spawn(happen, "happen")
        writer.sleep(0.001)

    def live() -> None:
        store = cluster.store(writer)
        pause = InterruptedPause(store, CONFIG, writer, network=cluster.network.of(writer))
        pause.happens = happens
        queue = Queue(store, CONFIG, runtime=writer, role="producer", open_pause=lambda *_: pause)
        queue.append([cluster.entry("writer")], guard=lambda before: None)

    def direct() -> None:
        writer.spawn(live, "writer")
        cluster.director.sleep(10)

    cluster.run(direct)
    assert len(changed_at) == 1
    assert len(cluster.waits) > 0.4 * (BEGIN_S / 2 + 10) / REQUEST_S
    assert 4 * REQUEST_S < cluster.longest_pause() < 8 * REQUEST_S


class Query:
    """A query that repeats its micro-batch, also after a restart, until it is committed."""

    def __init__(self, cluster: WritingCluster) -> None:
        self.cluster = cluster
        self.batch = 0
        self.runtime = cluster.process("sink")

    def start(self) -> None:
        self.runtime = self.cluster.process("sink")
        runtime = self.runtime
        runtime.spawn(lambda: self.live(runtime), "sink")

    def live(self, runtime: SimRuntime) -> None:
        cluster = self.cluster
        store = cluster.store(runtime)
        committer = QueueCommitter(store, OPTIONS, runtime, cluster.open_pause(runtime))
        while not cluster.over:
            began, batch = cluster.simulation.now, self.batch
            txn = Transaction("job", batch)
            key = batch_key("ingest", runtime.ulid(), txn)
            data = encode_batch([b"%d" % batch])
            try:
                store.put(key, data)
                upload = UploadedBatch(key, 1, (Metadata(0, 7, b""),))
                committer.append(Group(Moment.now(runtime), (upload,), txn, "query"))
            except OpenDataBufferError as error:
                cluster.simulation.log(f"{runtime.name}: {error}")
                runtime.sleep(0.5)
                continue
            self.batch = batch + 1
            cluster.appends.append(cluster.simulation.now - began)
            runtime.sleep(runtime.random())


def test_faults_of_brokers_and_sinks_lose_and_repeat_nothing(seed: int) -> None:
    cluster = WritingCluster(seed, brokers=2)
    query = Query(cluster)
    rng = random.Random(seed)
    happened: Counter[str] = Counter()

    def direct() -> None:
        query.start()
        for _ in range(8):
            cluster.director.sleep(rng.uniform(0.5, 4))
            fault = rng.choice(("kill broker", "pause broker", "kill sink", "pause sink", "cut"))
            broker, sink = cluster.serving(), query.runtime
            if broker is None:
                continue
            happened[fault] += 1
            if fault == "kill broker":
                cluster.simulation.kill(broker)
                cluster.network.kill(broker)
                cluster.serve()
            elif fault == "pause broker":
                cluster.simulation.pause(broker, rng.uniform(0.5, 12))
            elif fault == "kill sink":
                cluster.simulation.kill(sink)
                cluster.network.kill(sink)
                query.start()
            elif fault == "pause sink":
                cluster.simulation.pause(sink, rng.uniform(0.5, 5))
            else:
                cluster.network.cut(broker, sink)
                cluster.director.sleep(rng.uniform(0.5, 5))
                cluster.network.heal(broker, sink)
        cluster.director.sleep(25)

    cluster.run(direct)
    queued = Counter(cluster.queued())
    assert [location for location, count in queued.items() if count > 1] == []
    assert [location for location in cluster.landed if location not in queued] == []
    found = [parse_location(location, "ingest") for location in queued]
    batches = [name.txn.batch for name in found if name is not None and name.txn is not None]
    # Each once and in order. The last one may be committed without an answer to its query.
    assert batches == list(range(len(batches)))
    assert query.batch <= len(batches) <= query.batch + 1
    assert sum(happened.values()) >= 4
    assert len(cluster.waits) > 100
    assert query.batch > 10


EAGER = ProducerConfig(store=CONFIG.store, flush_size_bytes=1, broker="off")
RATE = 10.0
KNOWN_S = 10.0
"""Virtual time from which the processes know each other. Before, they race at their start."""


@pytest.mark.parametrize(
    ("count", "seconds", "p99", "wasted"),
    [(1, 20, 0.2, 0.0), (2, 30, 0.8, 0.1), (16, 30, 5.0, 0.4)],
)
def test_processes_on_one_queue_get_their_share_in_time(
    count: int, seconds: float, p99: float, wasted: float
) -> None:
    cluster = WritingCluster(1, broker="off", brokers=0)
    producers: list[Producer] = []
    durable: list[tuple[int, float, float]] = []
    """The producer of each record, and when it was produced and durable."""
    raced: list[tuple[int, int]] = []
    """Attempts and conflicts of all producers, at ``KNOWN_S`` and at the end."""

    def live(number: int, runtime: SimRuntime) -> None:
        runtime.sleep(cluster.uniform(0, 1 / RATE))
        producer = Producer(EAGER, store=cluster.store(runtime), runtime=runtime)
        producers.append(producer)
        started = runtime.monotonic()
        for call in range(int(seconds * RATE)):
            watcher = producer.produce([b"x" * 100])
            watcher.add_done_callback(partial(note, number, runtime.monotonic()))
            runtime.sleep(max(0.0, started + (call + 1) / RATE - runtime.monotonic()))

    def note(number: int, produced: float, _: object) -> None:
        durable.append((number, produced, cluster.simulation.now))

    def count_races() -> None:
        committers = [producer._sender.committer for producer in producers]
        conflicts = sum(committer.conflicts for committer in committers)
        raced.append((sum(committer.attempts for committer in committers), conflicts))

    def main() -> None:
        runtimes = [cluster.process("producer") for _ in range(count)]
        tasks = [
            runtime.spawn(partial(live, n, runtime), "main") for n, runtime in enumerate(runtimes)
        ]
        cluster.director.sleep(KNOWN_S)
        count_races()
        for task in tasks:
            task.join()
        count_races()
        for producer in producers:
            producer.close()

    run(cluster.simulation, main)
    queued = cluster.queued()
    assert len(queued) == len(set(queued)) == count * int(seconds * RATE)
    delays = sorted(end - at for _, at, end in durable if at >= KNOWN_S)
    assert delays[int(len(delays) * 0.99)] <= p99
    (attempts, conflicts), (all_attempts, all_conflicts) = raced
    assert all_conflicts - conflicts <= wasted * (all_attempts - attempts)
    done = Counter(number for number, _, end in durable if KNOWN_S <= end < seconds)
    assert len(done) == count
    assert min(done.values()) >= 0.5 * RATE * (seconds - KNOWN_S)
