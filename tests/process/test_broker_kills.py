"""Brokers and producers as real processes: kill -9, zombies, and a silent port."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from opendata_buffer.broker.client import ChannelClosed, DiscoveryRecord, Lease
from opendata_buffer.broker.network import MAX_CLIENTS, WebSocketNetwork
from opendata_buffer.broker.protocol import VALID_MS, ClientEnd, append_body, write_proof_folder
from opendata_buffer.broker.tls import client_context
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.open import open_store
from tests.unit.broker.local import eventually

SCRIPT = Path(__file__).parent / "broker_member.py"
NIGHT = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16")) >= 100
PRODUCERS = 16 if NIGHT else 6
ROUND_S = 2.0
ROUNDS = 30 if NIGHT else 7
PAUSE_S = 3.0
"""The promised limit of the pause in commits when a broker dies."""
MARGIN_S = 0.0 if NIGHT else 27.0
"""The limit on a machine that runs other tests at the same time. The promise is checked at night;
otherwise only a pause that ends with a time limit of the producers is a failure."""


class Member:
    """A process and the lines that it printed."""

    def __init__(self, role: str, store: str, name: str) -> None:
        self.role, self.name = role, name
        self.lines: list[list[str]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), role, store, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # kill -9 may cut the last line short.
            if line.endswith("\n"):
                self.lines.append(line.split())

    def await_line(self) -> None:
        eventually(lambda: self.lines or self._process.poll() is not None)
        assert self.lines, f"{self.name} ended"

    def printed(self, word: str) -> list[str]:
        return [line[-1] for line in self.lines if line[0] == word]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def suspend(self) -> None:
        """Stop it, but not while it holds the lock of a file in a directory.

        That would also stop all other processes. Object storage has no locks.
        """
        self.signal(signal.SIGSTOP)
        while self._holds_a_lock():
            self.signal(signal.SIGCONT)
            time.sleep(0.005)
            self.signal(signal.SIGSTOP)

    def _holds_a_lock(self) -> bool:
        process = Path("/proc") / str(self._process.pid)
        if not process.exists():
            return False  # not Linux
        while process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)  # It is still leaving the kernel.
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any(lock[1] == "FLOCK" and lock[4] == process.name for lock in locks)

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """Close its input, so that it ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._end()

    def _end(self) -> None:
        self._process.wait(120)
        self._reader.join(60)
        assert not self._reader.is_alive()


class Deployment:
    """All processes of one test, living and ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = open_store(url)
        self.config = ProducerConfig(store=url)
        # Brokers give up on a slow store after five seconds and try again. Tests wait for that.
        self.lease = Lease(self.store, self.config, SystemRuntime(), deadline_ms=60_000)
        self.living: list[Member] = []
        self.all: list[Member] = []

    def start(self, role: str) -> Member:
        member = Member(role, self.url, f"{role}{len(self.all)}")
        self.living.append(member)
        self.all.append(member)
        return member

    def replace(self, member: Member) -> Member:
        self.living.remove(member)
        member.kill()
        return self.start(member.role)

    def of(self, role: str) -> list[Member]:
        return [process for process in self.living if process.role == role]

    def serving(self) -> Member | None:
        announced = self.lease.read()
        for process in self.of("host"):
            if announced is not None and process.printed("id") == [announced.id]:
                return process
        return None

    def await_serving(self) -> Member:
        return eventually(self.serving, 120)

    def printed(self, word: str) -> list[str]:
        """Return the lines of all processes that start with a word, also of ended ones."""
        return [found for process in self.all for found in process.printed(word)]

    def times(self) -> list[float]:
        """Return the times at which records became durable, by the monotonic clock."""
        lines = [line for process in self.all for line in process.lines if line[0] == "durable"]
        return sorted(float(line[1]) for line in lines)

    def queued(self) -> list[str]:
        queue = Queue(self.store, self.config, runtime=SystemRuntime(), role="test")
        records = []
        for entry in (queue.read() or Manifest.empty()).entries():
            blob = read_bytes(self.store, entry.location)
            records += [record.decode() for record in decode_batch(blob)]
        return records

    def end(self) -> None:
        for process in self.living:
            process.signal(signal.SIGCONT)
            process.kill()


def silent_port() -> socket.socket:
    """Open a port that accepts connections and never answers."""
    return socket.create_server(("127.0.0.1", 0))


def test_each_record_is_queued_once_despite_faults_of_brokers(tmp_path: Path) -> None:
    deployment = Deployment(str(tmp_path / "store"))
    rng = random.Random(9)
    kills = 0
    port = silent_port()
    try:
        for _ in range(2):
            deployment.start("host")
        for _ in range(PRODUCERS):
            deployment.start("produce")
        for process in deployment.living:
            process.await_line()
        began = time.monotonic()
        stopped: Member | None = None
        for number in range(ROUNDS):
            fault = number % 7
            if fault == 3:
                # Longer than its timeouts, so another broker takes over before it wakes up.
                stopped = deployment.await_serving()
                stopped.suspend()
            elif fault == 4:
                deployment.store.delete_many(["ingest/_broker.json"])
            elif fault == 6:
                address = f"127.0.0.1:{port.getsockname()[1]}"
                silent = DiscoveryRecord(0, "silent", address, b"s" * 32)
                deployment.lease.take(silent, deployment.lease.read())
            else:
                victim = deployment.await_serving()
                kills += 1
                deployment.replace(victim)
            if fault in (1, 5):
                deployment.replace(rng.choice(deployment.of("produce")))
            time.sleep(ROUND_S)
            if stopped is not None and fault == 6:
                stopped.signal(signal.SIGCONT)
                stopped = None
        ended = time.monotonic()
        for process in deployment.of("produce"):
            deployment.living.remove(process)
            process.stop()
        queued = Counter(deployment.queued())
    finally:
        deployment.end()
        port.close()

    durable = deployment.printed("durable")
    assert len(durable) > PRODUCERS * ROUNDS
    assert [record for record, count in queued.items() if count > 1] == []
    assert [record for record in durable if record not in queued] == []
    assert [record for record in deployment.printed("failed") if record in queued] == []
    # No consumer removed anything, so every append without an answer can be found.
    assert deployment.printed("unknown") == []
    assert kills >= 3

    times = [at for at in deployment.times() if began <= at <= ended]
    longest, at = max((after - before, before) for before, after in pairwise(times))
    print(
        f"{len(durable)} records in {ended - began:.0f} s with {kills} kills, longest pause "
        f"{longest:.2f} s at {at - began:.1f} s"
    )
    assert longest < PAUSE_S + MARGIN_S


# ---- thousands of real connections to one broker, and some that misbehave


CLIENTS = MAX_CLIENTS if NIGHT else 300
ODD = 20
"""Connections of each misbehaving kind."""

AT_ONCE = 200 if NIGHT else 40
"""Clients that work at the same time. All of them share this process's event loop, and must
complete their handshake within :data:`HANDSHAKE_S`."""

MOST_BYTES_EACH = 96 * 1024
"""Limit of the broker's memory per connection, without the buffers of kernel and TLS."""


@contextmanager
def broker(store: str) -> Iterator[tuple[DiscoveryRecord, int]]:
    """Run a broker in its own process. Yield its record and its process id."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "host", store, "broker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            lease = Lease(open_store(store), ProducerConfig(store=store), SystemRuntime())

            def serving() -> DiscoveryRecord | None:
                announced = lease.read()
                if announced is not None:
                    # Its port opens after the record is written.
                    with suppress(ChannelClosed):
                        WebSocketNetwork(SystemRuntime()).connect(announced).close()
                        return announced
                return None

            yield eventually(serving), process.pid
        finally:
            process.kill()


def memory_of(pid: int) -> int:
    """Return the bytes of a process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


class Client:
    """One connection after its handshake."""

    def __init__(self, socket: ClientConnection, end: ClientEnd) -> None:
        self.socket, self.end = socket, end
        self.clock: Any = None

    @classmethod
    async def connected(cls, announced: DiscoveryRecord, home: Path) -> Client:
        socket = await connect(
            f"wss://{announced.address}/",
            ssl=client_context(),
            compression=None,
            ping_interval=None,
            proxy=None,
            open_timeout=60,
        )
        end = ClientEnd(announced.secret, announced.term, announced.certificate)
        await socket.send(end.prove(await socket.recv(decode=False)))
        client = cls(socket, end)
        LocalStore(home).put(
            write_proof_folder("ingest/manifest") + end.proof_name, end.write_proof()
        )
        assert (await client.ask({"op": "written", "n": 1}))["op"] == "granted"
        return client

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.socket.send(self.end.encode(body))
        answer = self.end.decode(await asyncio.wait_for(self.socket.recv(decode=False), 60))
        self.clock = answer["clock"]
        return answer

    async def append(self, name: str) -> int:
        """Append one location. Ask again if the request came too late, as every client does."""
        while True:
            body = append_body(1, [NewEntry(f"ingest/{name}.batch")], self.clock, VALID_MS, None)
            answer = await self.ask(body)
            if answer["op"] == "done":
                return int(answer["sequence"])
            assert answer["op"] == "refused", answer


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory in /proc")
def test_a_broker_serves_its_maximum_of_clients_next_to_misbehaving_ones(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 2 * CLIENTS:
        pytest.skip(f"needs ulimit -n {2 * CLIENTS}, and the limit here is {most}")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The broker inherits this limit, and accepts half as many clients.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        with broker(str(tmp_path)) as (announced, pid):
            asyncio.run(asyncio.wait_for(check_all_clients(announced, pid, tmp_path), 500))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def check_all_clients(announced: DiscoveryRecord, pid: int, home: Path) -> None:
    host, port = announced.address.split(":")
    first = await Client.connected(announced, home)
    at_first = memory_of(pid)
    turns = asyncio.Semaphore(AT_ONCE)

    async def one() -> Client:
        async with turns:
            return await Client.connected(announced, home)

    began = time.monotonic()
    odd = CLIENTS // 10 if CLIENTS < 1_000 else ODD
    clients = list(await asyncio.gather(*(one() for _ in range(CLIENTS - 1 - odd))))
    connecting_s = time.monotonic() - began

    # Ordinary clients that send requests and never read the answers.
    unread = list(await asyncio.gather(*(one() for _ in range(odd))))
    for client in unread:
        client.socket.transport.pause_reading()
        for _ in range(50):
            await client.socket.send(client.end.encode({"op": "stats"}))
    # Other connections that send a byte now and then.
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(odd)]
    for _, writer in slow:
        writer.write(b"G")

    async def append(number: int, client: Client) -> int:
        async with turns:
            return await client.append(f"{number:06}")

    began = time.monotonic()
    sequences = await asyncio.gather(
        *(append(number, client) for number, client in enumerate([first, *clients]))
    )
    serving_s = time.monotonic() - began
    assert sorted(sequences) == list(range(len(clients) + 1))

    stats = await first.ask({"op": "stats"})
    assert stats["clients"] == len(clients) + 1 + odd
    used = memory_of(pid) - at_first
    print(
        f"{stats['clients']} connections made in {connecting_s:.1f} s; an append of each took "
        f"{serving_s:.2f} s and {stats['commits']} writes; {used / stats['clients'] / 1024:.0f} "
        f"KiB of the broker's memory for each, {memory_of(pid) / 2**20:.0f} MiB together"
    )
    assert used < MOST_BYTES_EACH * stats["clients"] + 32 * 2**20
    for number in range(3):
        for _, writer in slow:
            if not writer.is_closing():
                writer.write(b"E")
        assert await first.append(f"more{number}") == len(clients) + 1 + number

    queue = Queue(
        open_store(str(home)), ProducerConfig(store=str(home)), runtime=SystemRuntime(), role="test"
    )
    manifest = queue.read()
    assert manifest is not None
    assert manifest.next_sequence == len(clients) + 4
    for _, writer in slow:
        writer.close()
    for client in [first, *clients, *unread]:
        client.socket.transport.abort()
