"""What does a broker gain many processes on one queue?

Each setup runs with and without a broker, in real processes, on a store with the latency of S3
Standard. All processes share the cores of the machine, so on a busy machine the longest delays say
more about the machine than about the broker.

The first half of this module starts the processes and reports. The second half (:func:`serve`,
:func:`produce`, :func:`append`, :func:`work`) is the code of the processes. They share a
directory, which each of them reaches through a slow store of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.measuring import memory_folder, p99, paced, sized
from benchmarks.stores import as_slow_as_s3
from benchmarks.tables import Row
from opendata_buffer import Producer, ProducerConfig, Worker, WorkerConfig
from opendata_buffer.broker.client import DiscoveryRecord, Lease
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.broker.protocol import (
    VALID_MS,
    ClientEnd,
    append_body,
    write_proof_folder,
)
from opendata_buffer.broker.tls import client_context
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX
from opendata_buffer.formats.batch import Compression, batch_key, encode_batch
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.internal_parts import internals
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.testing.faults import FaultyStore

SETUPS = sized(((1, 9.5, 350), (16, 155.0, 350), (64, 600.0, 450)), tiny=((2, 19.0, 350),))
"""Number of producers; with a broker the least batches per second, and the highest p99 in ms."""

RATE = 10.0  # batches per second of each producer
BROKERED_S, ALONE_S = sized((8.0, 14.0), tiny=(1.0, 1.0))
WARM_S, KNOWN_S = sized((1.0, 6.0), tiny=(0.0, 0.0))
"""Seconds that do not count, with and without a broker. With one, connections are made. Without
one, the processes notice each other and adapt their pace."""

CLIENTS, CLIENT_RATE, CLIENTS_S = sized((1_000, 4.0, 10.0), tiny=(3, 4.0, 1.0))
WORKERS, WORK_S, BATCHES_PER_S = sized((50, 10.0, 560.0), tiny=(2, 1.0, 40.0))
APPENDERS = 20
"""Clients that append the batches which the workers claim."""

SETTLED_S = sized(2.0, tiny=0.0)
"""Seconds of the workers that do not count. Fifty workers take 1.6 s on two cores to import
modules, connect, and finish the batches that have queued up meanwhile."""

PATIENCE_S = 5.0
"""Seconds to wait for answers after the last request."""

LATE_S = 30.0
"""Seconds that processes wait for each other before they begin."""


@dataclass(frozen=True)
class Load:
    """The work of one process.

    Attributes:
        root: Directory of the queue.
        seconds: Duration.
        broker: ``auto`` or ``off``.
        rate: Batches per second of one producer or one client.
        clients: Connections of a process that appends without producers.
        locations: The batches that these clients append. If empty, they make up locations.
    """

    root: Path
    seconds: float
    broker: str = "auto"
    rate: float = 10.0
    clients: int = 1
    locations: tuple[str, ...] = ()


@dataclass
class Produced:
    """The result of one producer.

    Attributes:
        began: Monotonic seconds at which it began.
        times: For each batch, the monotonic seconds of the call and of the moment at which it
            was durable.
        attempts: Compare-and-swap writes of the manifest.
        conflicts: How many of them failed.
    """

    began: float
    times: list[tuple[float, float]] = field(default_factory=list)
    attempts: int = 0
    conflicts: int = 0


@dataclass
class Appended:
    """The result of a process with many clients.

    Attributes:
        began: Monotonic seconds at which it began.
        times: For each descriptor, the monotonic seconds of the call and of the answer.
        free: By sequence, the monotonic seconds from which a worker could claim a batch.
        refused: Number of appends that the broker asked to repeat.
    """

    began: float
    times: list[tuple[float, float]] = field(default_factory=list)
    free: dict[int, float] = field(default_factory=dict)
    refused: int = 0


@dataclass
class Worked:
    """The result of one worker.

    Attributes:
        began: Monotonic seconds at which it began.
        claimed: By sequence, the monotonic seconds at which it got a batch.
        done: Monotonic seconds at which each batch was done.
    """

    began: float
    claimed: dict[int, float] = field(default_factory=dict)
    done: list[float] = field(default_factory=list)


Job = tuple[Callable[[Load], Any], Load]


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    for count, least, p99_ms in SETUPS:
        yield producers_alone(count)
        yield producers_with_broker(count, least, p99_ms)
    yield many_clients()
    yield claims()


def producers_alone(count: int) -> Row:
    """Measure producer processes without a broker. There is no goal."""
    with _queue() as root:
        load = Load(root, ALONE_S, broker="off", rate=RATE)
        produced: list[Produced] = _together([(produce, load)] * count)
    rate, p99_s, share = _figures(produced, KNOWN_S, ALONE_S)
    attempts = sum(result.attempts for result in produced)
    wasted = sum(result.conflicts for result in produced) / attempts
    return Row(
        f"{_processes(count)} x 10 batches/s, without a broker",
        f"{rate:.1f} batches/s, p99 {p99_s * 1000:.0f} ms",
        detail=f"{wasted:.0%} wasted CAS, smallest share {share:.0%}",
    )


def producers_with_broker(count: int, least: float, p99_ms: float) -> Row:
    """Measure producer processes with a broker.

    Args:
        count: Number of processes.
        least: Goal, batches per second.
        p99_ms: Goal, milliseconds until a batch is durable.

    Returns:
        The row of the suite.
    """
    with _queue() as root, _broker(root) as observe:
        before = observe()
        load = Load(root, BROKERED_S, rate=RATE)
        produced: list[Produced] = _together([(produce, load)] * count)
        after = observe()
    rate, p99_s, share = _figures(produced, WARM_S, BROKERED_S)
    wasted = after["conflicts"] + sum(result.conflicts for result in produced)
    return Row(
        f"{_processes(count)} x 10 batches/s, with one",
        f"{rate:.1f} batches/s, p99 {p99_s * 1000:.0f} ms",
        f">= {least:g} batches/s, p99 <= {p99_ms:g} ms",
        rate >= least and p99_s * 1000 <= p99_ms and share >= 0.9 and wasted == 0,
        f"{wasted} wasted CAS, smallest share {share:.0%}, {_used(before, after)}",
    )


def many_clients() -> Row:
    """Measure one broker with a thousand connections that append descriptors."""
    with _queue() as root, _broker(root) as observe:
        before = observe()
        load = Load(root, CLIENTS_S, rate=CLIENT_RATE, clients=CLIENTS)
        appended: list[Appended] = _together([(append, load)])
        after = observe()
    rate, p99_s, _ = _figures(appended, WARM_S, CLIENTS_S)
    cpu = _cpu(before, after)
    return Row(
        f"{CLIENTS:,} clients of one process, a descriptor every 250 ms each",
        f"{rate:,.0f} descriptors/s, p99 {p99_s * 1000:.0f} ms",
        ">= 3,800/s, p99 <= 600 ms, <= 1 core, <= 300 MB",
        rate >= 3_800 and p99_s <= 0.6 and cpu <= 1 and after["rss_mb"] <= 300,
        f"{appended[0].refused} appends repeated, {_used(before, after)}",
    )


def claims() -> Row:
    """Measure worker processes that claim batches from the broker."""
    with _queue() as root, _broker(root) as observe:
        locations = _uploaded(root, int(BATCHES_PER_S * WORK_S))
        before = observe()
        producing = Load(
            root, WORK_S, rate=BATCHES_PER_S / APPENDERS, clients=APPENDERS, locations=locations
        )
        working = Load(root, WORK_S + 2)
        results: list[Any] = _together([(append, producing)] + [(work, working)] * WORKERS)
        after = observe()
    appended: Appended = results[0]
    workers: list[Worked] = results[1:]
    first, last = appended.began + SETTLED_S, appended.began + WORK_S
    delays = [
        at - appended.free[sequence]
        for worker in workers
        for sequence, at in worker.claimed.items()
        if appended.free.get(sequence, 0) >= first
    ]
    p99_s = p99(delays)
    rate = sum(first <= at < last for worker in workers for at in worker.done) / (last - first)
    return Row(
        f"claims: {WORKERS} worker processes, work that takes no time",
        f"{rate:.0f} batches/s, p99 {p99_s * 1000:.0f} ms from free to claimed",
        ">= 500 batches/s, p99 <= 400 ms",
        rate >= 500 and p99_s <= 0.4,
        f"p50 {statistics.median(delays) * 1000:.0f} ms, {_used(before, after)}",
    )


def _processes(count: int) -> str:
    return "1 producer process" if count == 1 else f"{count} producer processes"


def _figures(
    results: Sequence[Produced | Appended], warm_s: float, seconds: float
) -> tuple[float, float, float]:
    """Return batches per second, p99 in seconds, and the smallest share of a process.

    Only the time in which all processes run, after the warm-up, counts.
    """
    first = max(result.began for result in results) + warm_s
    last = min(result.began for result in results) + seconds
    done = [sum(first <= at < last for _, at in result.times) for result in results]
    delays = [at - called for result in results for called, at in result.times if called >= first]
    return sum(done) / (last - first), p99(delays), min(done) / (RATE * (last - first))


def _used(before: dict[str, Any], after: dict[str, Any]) -> str:
    commits = after["commits"] - before["commits"]
    batches = (after["appended"] - before["appended"]) / max(1, commits)
    return (
        f"{batches:.0f} batches each CAS, broker {_cpu(before, after):.0%} of a core, "
        f"{after['rss_mb']:.0f} MB"
    )


def _cpu(before: dict[str, Any], after: dict[str, Any]) -> float:
    return float(after["cpu_s"] - before["cpu_s"]) / float(after["at"] - before["at"])


def _uploaded(root: Path, count: int) -> tuple[str, ...]:
    """Upload batches that no queue has yet, because uploads are not part of the measurement."""
    store, runtime = LocalStore(root), SystemRuntime()
    data = encode_batch([b"x" * 100], Compression.NONE)
    locations = tuple(batch_key(DEFAULT_DATA_PATH_PREFIX, runtime.ulid()) for _ in range(count))
    for location in locations:
        store.put(location, data)
    return locations


# ---- how processes start


def _context() -> ForkServerContext:
    # Sixty-four processes that each import everything would be busy with that for a minute. The
    # fork server imports it once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.broker", "click"])
    return context


def _together(jobs: Sequence[Job]) -> list[Any]:
    """Run each job in a process of its own. They begin at the same moment."""
    context = _context()
    barrier = context.Barrier(len(jobs))
    with ProcessPoolExecutor(len(jobs), context, join, (barrier,)) as pool:
        futures = [pool.submit(job, load) for job, load in jobs]
        return [future.result() for future in futures]


@contextmanager
def _queue() -> Iterator[Path]:
    """Make a directory, in memory if possible, because the disk is not part of the measurement."""
    with tempfile.TemporaryDirectory(prefix="buffer-bench-", dir=memory_folder()) as root:
        yield Path(root) / "queue"


@contextmanager
def _broker(root: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Run a broker in a process of its own, and give a function that returns its statistics."""
    ours, theirs = multiprocessing.Pipe()
    process = _context().Process(target=serve, args=(root, theirs))
    process.start()
    assert ours.poll(30)
    ours.recv()

    def observe() -> dict[str, Any]:
        ours.send("observe")
        found: dict[str, Any] = ours.recv()
        return found

    try:
        yield observe
    finally:
        ours.send("end")
        process.join(30)


# ---- the code of the processes


class _Start:
    barrier: Barrier | None = None


def join(barrier: Barrier) -> None:
    """Remember the barrier at which this process waits for the others before it begins."""
    _Start.barrier = barrier


def _begin() -> float:
    """Wait for the other processes, and return the time."""
    assert _Start.barrier is not None
    _Start.barrier.wait(LATE_S)
    return time.monotonic()


def _slow(root: Path) -> FaultyStore:
    return as_slow_as_s3(LocalStore(root))


def serve(root: Path, pipe: Pipe) -> None:
    """Be the broker until the pipe says ``end``. Answer any other word with statistics.

    Args:
        root: Directory of the queue.
        pipe: Connection to the process that measures.
    """
    runtime = SystemRuntime()
    network = WebSocketNetwork(runtime)
    host = LeaderElection(_slow(root), ProducerConfig(store=str(root)), runtime, network)
    while host.broker is None:
        time.sleep(0.01)
    pipe.send("serving")
    while pipe.recv() != "end":
        assert host.broker is not None
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(
            {
                **host.broker.stats(),
                "at": time.monotonic(),
                "cpu_s": time.process_time(),
                "rss_mb": used.ru_maxrss / 1024,
            }
        )
    host.stop(5)


def produce(load: Load) -> Produced:
    """Be one producer that is called at fixed times. Each call makes a batch."""
    config = ProducerConfig(store=str(load.root), flush_size_bytes=1, broker=load.broker)
    with Producer(config, **internals(store=_slow(load.root))) as producer:
        produced = Produced(_begin())

        def call() -> None:
            called = time.monotonic()
            handle = producer.produce([b"x" * 100])
            handle.add_done_callback(
                lambda _: produced.times.append((called, time.monotonic())),
            )

        # Real processes are not in step.
        time.sleep(secrets.randbelow(1000) / 1000 / load.rate)
        paced(load.rate, load.seconds, call)
        producer.flush()
        produced.attempts = producer._sender.committer.attempts
        produced.conflicts = producer._sender.committer.conflicts
    return produced


def append(load: Load) -> Appended:
    """Be many clients of the broker: connections that only append descriptors."""
    return asyncio.run(_append(load))


async def _append(load: Load) -> Appended:
    lease = Lease(LocalStore(load.root), ProducerConfig(store=str(load.root)), SystemRuntime())
    broker_record = lease.read()
    assert broker_record is not None
    clients = [_Client(broker_record, load.root) for _ in range(load.clients)]
    for first in range(0, len(clients), 50):
        await asyncio.gather(*(client.open() for client in clients[first : first + 50]))
    appended = Appended(_begin())
    locations = iter(load.locations)
    next_location = partial(next, locations) if load.locations else _made_up
    # If the broker does not keep up, the requests without an answer are missing from the rate.
    with suppress(TimeoutError):
        async with asyncio.timeout(load.seconds + PATIENCE_S), asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run(load, appended, next_location))
    for client in clients:
        client.close()
    return appended


def _made_up() -> str:
    return f"ingest/{SystemRuntime().ulid()}.batch"


class _Client:
    """A connection to the broker, for an event loop.

    The library's client has a thread for each connection, and a thousand threads would measure
    the interpreter instead of the broker.
    """

    def __init__(self, broker_record: DiscoveryRecord, root: Path) -> None:
        self._broker_record = broker_record
        self._store = LocalStore(root)
        self._end = ClientEnd(
            broker_record.secret,
            broker_record.term,
            broker_record.certificate,
        )
        self._clock: Any = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._socket: ClientConnection
        self._reader: asyncio.Task[None]

    async def open(self) -> None:
        """Connect, and prove the permission to write."""
        address = f"wss://{self._broker_record.address}/"
        self._socket = await connect(
            address, ssl=client_context(), compression=None, proxy=None, ping_interval=None
        )
        await self._socket.send(self._end.prove(await self._message()))
        key = write_proof_folder("ingest/manifest") + self._end.proof_name
        self._store.put(key, self._end.write_proof())
        await self._socket.send(self._end.encode({"op": "written", "n": 0}))
        self._clock = self._end.decode(await self._message())["clock"]
        self._reader = asyncio.create_task(self._read())

    async def run(self, load: Load, appended: Appended, next_location: Callable[[], str]) -> None:
        """Append at fixed times, whether or not earlier requests were answered."""
        due = appended.began + secrets.randbelow(1000) / 1000 / load.rate
        async with asyncio.TaskGroup() as group:
            for _ in range(int(load.rate * load.seconds)):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._call(next_location(), due, appended))
                due += 1 / load.rate

    async def _call(self, location: str, due: float, appended: Appended) -> None:
        while True:
            answer = await self._ask(location)
            if answer["op"] == "done":
                break
            appended.refused += 1
        now = time.monotonic()
        appended.times.append((due, now))
        appended.free[answer["sequence"]] = now

    async def _ask(self, location: str) -> dict[str, Any]:
        self._number += 1
        body = append_body(self._number, [NewEntry(location)], self._clock, VALID_MS, None)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        await self._socket.send(self._end.encode(body))
        return await answer

    async def _read(self) -> None:
        try:
            while True:
                body = self._end.decode(await self._message())
                self._clock = body["clock"]
                self._waiting.pop(body["n"]).set_result(body)
        except ConnectionClosed:
            pass

    async def _message(self) -> bytes:
        message = await self._socket.recv()
        return message if isinstance(message, bytes) else message.encode()

    def close(self) -> None:
        """Drop the connection without the closing handshake.

        A thousand handshakes, one after the other, take a minute.
        """
        self._reader.cancel()
        self._socket.transport.abort()


def work(load: Load) -> Worked:
    """Be one worker whose work takes no time, on up to ten batches at once."""
    config = WorkerConfig(store=str(load.root), broker="auto", create_if_missing=True)
    with (
        Worker(config, **internals(store=_slow(load.root))) as worker,
        ThreadPoolExecutor(10) as pool,
    ):
        worked = Worked(_begin())
        end = worked.began + load.seconds
        while (left := end - time.monotonic()) > 0:
            batches = worker.claim(10, timeout=left)
            now = time.monotonic()
            worked.claimed.update((batch.sequence, now) for batch in batches)
            for _ in pool.map(lambda batch: batch.done(), batches):
                worked.done.append(time.monotonic())
    return worked
