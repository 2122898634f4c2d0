"""Thousands of real connections to one broker, and some that do not behave."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from opendata_buffer.broker.client import ChannelClosed, DiscoveryRecord, Lease
from opendata_buffer.broker.network import MAX_CLIENTS, WebSocketNetwork
from opendata_buffer.broker.protocol import VALID_MS, ClientEnd, append_body, write_proof_folder
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.open import open_store
from tests.unit.broker.local import KEYS, eventually

NIGHT = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16")) >= 100
CLIENTS = MAX_CLIENTS if NIGHT else 300
ODD = 20
"""Connections of each kind that does not behave."""

AT_ONCE = 200 if NIGHT else 40
"""That do something at the same time: all of them share this process's event loop, and have to
shake hands within :data:`HANDSHAKE_S`."""

MOST_BYTES_EACH = 96 * 1024
"""Of the broker's memory for one connection: buffers of kernel and TLS are not in it."""

SCRIPT = Path(__file__).parent / "broker_member.py"


@contextmanager
def broker(store: str) -> Iterator[tuple[DiscoveryRecord, int]]:
    """A broker in a process of its own, and the process's number."""
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
    """Bytes of a process's memory that are in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


class Client:
    """One connection that has shaken hands."""

    def __init__(self, socket: ClientConnection, end: ClientEnd) -> None:
        self.socket, self.end = socket, end
        self.clock: Any = None

    @classmethod
    async def connected(cls, announced: DiscoveryRecord, home: Path) -> Client:
        socket = await connect(
            f"ws://{announced.address}/",
            compression=None,
            ping_interval=None,
            proxy=None,
            open_timeout=60,
        )
        end = ClientEnd(announced.secret, announced.term, KEYS, announced.share)
        await socket.send(end.prove(await socket.recv(decode=False)))
        end.finish(await socket.recv(decode=False))
        client = cls(socket, end)
        LocalStore(home).put(
            write_proof_folder("ingest/manifest") + end.proof_name, end.write_proof()
        )
        assert (await client.ask({"op": "written", "n": 1}))["op"] == "granted"
        return client

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.socket.send(self.end.seal(body))
        answer = self.end.open(await asyncio.wait_for(self.socket.recv(decode=False), 60))
        self.clock = answer["clock"]
        return answer

    async def append(self, name: str) -> int:
        """Append one location; asks again, as every client, what came too late."""
        while True:
            body = append_body(1, [NewEntry(f"ingest/{name}.batch")], self.clock, VALID_MS, None)
            answer = await self.ask(body)
            if answer["op"] == "done":
                return int(answer["sequence"])
            assert answer["op"] == "refused", answer


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory in /proc")
def test_as_many_clients_as_a_broker_takes_are_served_beside_surplus_ones(
    tmp_path: Path,
) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 2 * CLIENTS:
        pytest.skip(f"needs ulimit -n {2 * CLIENTS}, and {most} is the most here")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The broker inherits it, and takes half as many clients.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        with broker(str(tmp_path)) as (announced, pid):
            asyncio.run(asyncio.wait_for(everybody(announced, pid, tmp_path), 500))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def everybody(announced: DiscoveryRecord, pid: int, home: Path) -> None:
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

    # Clients like the others, that ask and never read the answers.
    unread = list(await asyncio.gather(*(one() for _ in range(odd))))
    for client in unread:
        client.socket.transport.pause_reading()
        for _ in range(50):
            await client.socket.send(client.end.seal({"op": "stats"}))
    # Strangers that send a byte now and then.
    slow = [await asyncio.open_connection(host, int(port)) for _ in range(odd)]
    for _, writer in slow:
        writer.write(b"G")

    async def append(number: int, client: Client) -> int:
        async with turns:
            return await client.append(f"{number:06}")

    began = time.monotonic()
    sequences = await asyncio.gather(
        *(append(number, each) for number, each in enumerate([first, *clients]))
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
