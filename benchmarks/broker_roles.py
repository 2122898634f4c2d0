"""What the processes of the broker's benchmark do: serve, produce, append without a producer, work.

They share a directory, and each reaches it through a store of its own that is as slow as S3.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.producers import CAS_MS, GET_MS, PUT_MS, paced
from opendata_buffer import Producer, ProducerConfig, Worker, WorkerConfig
from opendata_buffer.broker.client import DiscoveryRecord, Lease
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.broker.protocol import (
    NONCE_BYTES,
    VALID_MS,
    ClientEnd,
    KeyPair,
    append_body,
    write_proof_folder,
)
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

PATIENCE_S = 5.0
"""For answers that are due when all has been asked for."""

LATE_S = 30.0
"""How long processes wait for each other before they begin."""


@dataclass(frozen=True)
class Load:
    """What one process is to do.

    Attributes:
        root: Directory of the queue.
        seconds: For how long.
        broker: ``auto`` or ``off``.
        rate: Batches per second, of one producer or one client.
        clients: Connections of a process that appends without producers.
        locations: What these append; made up where there is none.
    """

    root: Path
    seconds: float
    broker: str = "auto"
    rate: float = 10.0
    clients: int = 1
    locations: tuple[str, ...] = ()


@dataclass
class Produced:
    """Of one producer: when each batch was called for and durable, monotonic seconds."""

    began: float
    times: list[tuple[float, float]] = field(default_factory=list)
    attempts: int = 0
    conflicts: int = 0


@dataclass
class Appended:
    """Of many clients in one process."""

    began: float
    times: list[tuple[float, float]] = field(default_factory=list)
    free: dict[int, float] = field(default_factory=dict)
    refused: int = 0


@dataclass
class Worked:
    """Of one worker: when it got each batch."""

    began: float
    claimed: dict[int, float] = field(default_factory=dict)
    done: list[float] = field(default_factory=list)


class _Start:
    barrier: Barrier | None = None


def join(barrier: Barrier) -> None:
    """Begin at the same moment as the other processes; called first in each."""
    _Start.barrier = barrier


def _begin() -> float:
    assert _Start.barrier is not None
    _Start.barrier.wait(LATE_S)
    return time.monotonic()


def _slow(root: Path) -> FaultyStore:
    plan = FaultPlan(put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS)
    return FaultyStore(LocalStore(root), SystemRuntime(), plan)


def serve(root: Path, pipe: Pipe) -> None:
    """Be the broker. Each word on the pipe is answered with what it used and did so far."""
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
    """Be one producer that is called at fixed times; each call makes a batch."""
    config = ProducerConfig(store=str(load.root), flush_size_bytes=1, broker=load.broker)
    with Producer(config, store=_slow(load.root)) as producer:
        produced = Produced(_begin())

        def call() -> None:
            called = time.monotonic()
            handle = producer.produce([b"x" * 100])
            handle.add_done_callback(
                lambda _: produced.times.append((called, time.monotonic())),
            )

        # Processes are not in step.
        time.sleep(secrets.randbelow(1000) / 1000 / load.rate)
        paced(load.rate, load.seconds, call)
        producer.flush()
        produced.attempts = producer._sender.committer.attempts
        produced.conflicts = producer._sender.committer.conflicts
    return produced


def append(load: Load) -> Appended:
    """Be many clients of the broker: connections that append descriptors and nothing else."""
    return asyncio.run(_append(load))


async def _append(load: Load) -> Appended:
    lease = Lease(LocalStore(load.root), ProducerConfig(store=str(load.root)), SystemRuntime())
    broker_record = lease.read()
    assert broker_record is not None
    clients = [_Client(broker_record, load.root) for _ in range(load.clients)]
    for first in range(0, len(clients), 50):
        await asyncio.gather(*(each.open() for each in clients[first : first + 50]))
    appended = Appended(_begin())
    locations = iter(load.locations)
    make = partial(next, locations) if load.locations else _made_up
    # Where the broker does not keep up, what is unanswered is missing from the rate.
    with suppress(TimeoutError):
        async with asyncio.timeout(load.seconds + PATIENCE_S), asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run(load, appended, make))
    for client in clients:
        client.close()
    return appended


def _made_up() -> str:
    return f"ingest/{SystemRuntime().ulid()}.batch"


class _Client:
    """A connection to the broker, for an event loop."""

    def __init__(self, broker_record: DiscoveryRecord, root: Path) -> None:
        self._announcement = broker_record
        self._store = LocalStore(root)
        self._end = ClientEnd(
            broker_record.secret,
            broker_record.term,
            KeyPair.of(secrets.token_bytes(NONCE_BYTES)),
            broker_record.share,
        )
        self._clock: Any = None
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._socket: ClientConnection
        self._reader: asyncio.Task[None]

    async def open(self) -> None:
        address = f"ws://{self._announcement.address}/"
        self._socket = await connect(address, compression=None, proxy=None, ping_interval=None)
        await self._socket.send(self._end.prove(await self._message()))
        self._end.finish(await self._message())
        key = write_proof_folder("ingest/manifest") + self._end.proof_name
        self._store.put(key, self._end.write_proof())
        await self._socket.send(self._end.seal({"op": "written", "n": 0}))
        self._clock = self._end.open(await self._message())["clock"]
        self._reader = asyncio.create_task(self._read())

    async def run(self, load: Load, appended: Appended, make: Callable[[], str]) -> None:
        """One call every so often, whether or not earlier ones were answered."""
        due = appended.began + secrets.randbelow(1000) / 1000 / load.rate
        async with asyncio.TaskGroup() as group:
            for _ in range(int(load.rate * load.seconds)):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._call(make(), due, appended))
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
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send(self._end.seal(body))
        return await answer

    async def _read(self) -> None:
        try:
            while True:
                body = self._end.open(await self._message())
                self._clock = body["clock"]
                self._waiting.pop(body["n"]).set_result(body)
        except ConnectionClosed:
            pass

    async def _message(self) -> bytes:
        message = await self._socket.recv()
        return message if isinstance(message, bytes) else message.encode()

    def close(self) -> None:
        # Without the closing handshake: a thousand of them, one by one, take a minute.
        self._reader.cancel()
        self._socket.transport.abort()


def work(load: Load) -> Worked:
    """Be one worker whose work takes no time, on up to ten batches at once."""
    config = WorkerConfig(store=str(load.root), broker="auto", create_if_missing=True)
    with Worker(config, store=_slow(load.root)) as worker, ThreadPoolExecutor(10) as pool:
        worked = Worked(_begin())
        end = worked.began + load.seconds
        while (left := end - time.monotonic()) > 0:
            batches = worker.claim(10, timeout=left)
            now = time.monotonic()
            worked.claimed.update((batch.sequence, now) for batch in batches)
            for _ in pool.map(lambda batch: batch.done(), batches):
                worked.done.append(time.monotonic())
    return worked
