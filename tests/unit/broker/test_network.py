"""WebSocket connections to a broker, the broker behind a port, and forked children."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync import client as websockets_client
from websockets.sync.client import ClientConnection

from opendata_buffer.broker import network
from opendata_buffer.broker.broker import Broker
from opendata_buffer.broker.client import Appended, ChannelClosed, ChannelRefused, DiscoveryRecord
from opendata_buffer.broker.dispatcher import Dispatcher
from opendata_buffer.broker.network import (
    QUEUED_ANSWERS,
    Listen,
    WebSocketNetwork,
    WebSocketPort,
    listen_for,
    open_channel,
    own_address,
)
from opendata_buffer.broker.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_OPEN_REQUESTS,
    ClientEnd,
    KeyPair,
    ProtocolError,
)
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.producer.group_commit import CYCLES_EACH, FIRST_CYCLE_S
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import (
    CONFIG,
    KEYS,
    RUNTIME,
    Client,
    connect,
    connected,
    entries,
    eventually,
    made,
    queued,
    serving,
    soon,
)

WAIT_S = 60.0


def test_a_client_with_another_secret_is_refused_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.WARNING), serving(store) as (broker, broker_record, _):
        for _ in range(3):
            channel = open_channel(broker_record, WAIT_S)
            end = ClientEnd(b"x" * 32, 1, KEYS, broker_record.share)
            hello = channel.receive(WAIT_S)
            assert hello is not None
            channel.send(end.prove(hello))
            with pytest.raises(ChannelClosed):
                channel.receive(WAIT_S)
        assert broker.sessions == 0
    logged = [each for each in caplog.records if "refused a connection" in each.message]
    assert len(logged) == 1


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{}", random.Random(1).randbytes(500), b"x" * (MAX_MESSAGE_BYTES + 1)],
    ids=["nothing", "no message", "noise", "too long"],
)
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    store = MemoryStore()
    with serving(store) as (_, broker_record, _), connected(broker_record) as good:
        bad = open_channel(broker_record, WAIT_S)
        assert bad.receive(WAIT_S) is not None  # The broker's hello.
        bad.send(garbage)
        with pytest.raises(ChannelClosed):
            bad.receive(WAIT_S)
        assert good.append(entries("a"), since=None, begin_by=soon()) == Appended(0)
        assert queued(store) == ["ingest/a.batch"]


def test_a_client_that_sends_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (broker, broker_record, _):
        # Once the port is there: for the handshake of HTTP it takes all the time it needs.
        monkeypatch.setattr(network, "HANDSHAKE_S", 0.5)
        silent = open_channel(broker_record, WAIT_S)
        assert silent.receive(WAIT_S) is not None
        with pytest.raises(ChannelClosed):
            silent.receive(WAIT_S)
        assert broker.sessions == 0


def test_one_client_too_many_is_refused_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "MAX_CLIENTS", 3)
    with serving() as (broker, broker_record, _), ExitStack() as stack:
        clients = [stack.enter_context(connected(broker_record)) for _ in range(3)]
        with pytest.raises(ChannelClosed):
            connect(broker_record)
        for number, client in enumerate(clients):
            answer = client.append(entries(str(number)), since=None, begin_by=soon())
            assert answer == Appended(number)
        clients[0].close()
        eventually(lambda: broker.sessions == 2)
        with connected(broker_record) as next_one:
            assert next_one.append(entries("x"), since=None, begin_by=soon()) == Appended(3)


def test_strangers_are_disconnected_before_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "MAX_CLIENTS", 2)
    monkeypatch.setattr(network, "MAX_OPEN_HANDSHAKES", 3)
    with (
        serving() as (_, broker_record, _),
        connected(broker_record) as client,
        ExitStack() as stack,
    ):
        port = broker_record.address.partition(":")[2]
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", int(port))))
            for _ in range(20)
        ]
        strangers[0].sendall(b"no HTTP\r\n\r\n")
        for stranger in strangers[4:]:
            # At once, and not when the time for a handshake is over.
            stranger.settimeout(network.HANDSHAKE_S / 2)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert client.append(entries("a"), since=None, begin_by=soon()) == Appended(0)


def test_a_client_that_asks_and_never_reads_is_disconnected() -> None:
    asked = 0
    with serving() as (broker, broker_record, _), connected(broker_record) as good:
        with shaken_hands(broker_record) as (silent, end), suppress(ConnectionClosed):
            eventually(lambda: broker.sessions == 2)
            while True:
                # Until its answers fill the buffers of the kernel, and then its queue.
                silent.send(end.seal({"op": "stats"}))
                asked += 1
        eventually(lambda: broker.sessions == 1)
        assert good.append(entries("a"), since=None, begin_by=soon()) == Appended(0)
    assert asked > 2 * QUEUED_ANSWERS


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "a client"])
def test_a_message_that_comes_byte_by_byte_delays_no_other_client(known: bool) -> None:
    with (
        serving() as (broker, broker_record, _),
        connected(broker_record) as good,
        shaken_hands(broker_record, known=known) as (slow, _),
    ):
        eventually(lambda: broker.sessions == 1 + known)
        for number, byte in enumerate(frame(b"x" * 1_000)[:5]):
            slow.socket.sendall(bytes([byte]))
            answer = good.append(entries(str(number)), since=None, begin_by=soon())
            assert answer == Appended(number)


def test_a_stranger_cannot_have_a_large_message_kept_for_it() -> None:
    with (
        serving() as (_, broker_record, _),
        shaken_hands(broker_record, known=False) as (stranger, _),
    ):
        # The beginning of a message of 2 MiB: refused by its length.
        stranger.socket.sendall(frame(b"x" * 2 * 1024 * 1024)[:100])
        with pytest.raises(ConnectionClosed):
            stranger.recv(network.HANDSHAKE_S / 2)


@contextmanager
def shaken_hands(
    broker_record: DiscoveryRecord, *, known: bool = True
) -> Iterator[tuple[ClientConnection, ClientEnd]]:
    """A WebSocket that reads one message ahead: after the broker's hello, or as a client."""
    url = f"ws://{broker_record.address}/"
    keys = KeyPair.of(os.urandom(32))
    end = ClientEnd(broker_record.secret, broker_record.term, keys, broker_record.share)
    with websockets_client.connect(
        url, compression=None, max_queue=1, ping_interval=None, close_timeout=0.2, proxy=None
    ) as client:
        proof = end.prove(client.recv(decode=False))
        if known:
            client.send(proof)
            end.finish(client.recv(decode=False))
        yield client, end


def frame(message: bytes) -> bytes:
    return Frame(Opcode.BINARY, message).serialize(mask=True)


def test_a_port_that_is_shut_refuses_its_clients() -> None:
    with serving() as (_, broker_record, port):
        port.shut()
        with pytest.raises((ChannelClosed, ProtocolError)):
            connect(broker_record)


def test_an_address_or_certificate_that_cannot_be_used_says_which_option(tmp_path: Path) -> None:
    with serving() as (_, broker_record, _):
        port = int(broker_record.address.split(":")[1])
        with pytest.raises(InvalidInput, match=rf"listen on 127\.0\.0\.1:{port}.*--listen"):
            WebSocketPort(Listen(port=port), RUNTIME)
    path = tmp_path / "cert.pem"
    path.write_text("no certificate")
    with pytest.raises(InvalidInput, match="--tls-cert"):
        WebSocketPort(Listen(certificate=str(path)), RUNTIME)


def test_what_is_advertised_is_announced() -> None:
    port = WebSocketPort(Listen(advertise="broker.example:9100"), RUNTIME)
    port.close()
    port.close()
    assert port.address == "broker.example:9100"


@pytest.fixture
def certificate(tmp_path: Path) -> Listen:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 1 "
        "-subj /CN=broker",
        shell=True,
        check=True,
        capture_output=True,
    )
    return Listen(certificate=str(cert), key=str(key))


def test_with_tls_the_announced_certificate_and_no_other_is_trusted(certificate: Listen) -> None:
    with serving(listen=certificate) as (_, broker_record, _):
        assert broker_record.certificate
        with connected(broker_record) as client:
            assert client.append(entries("a"), since=None, begin_by=soon()) == Appended(0)
        other = "00" * 32
        with pytest.raises(ChannelClosed, match="another certificate"):
            open_channel(
                type(broker_record)(1, "id", broker_record.address, b"s" * 32, other), WAIT_S
            )


def test_too_many_open_requests_and_unknown_ones_are_refused() -> None:
    client = Client(made(MemoryStore()))
    with pytest.raises(ProtocolError, match="unknown request 'delete'"):
        client.send({"op": "delete"})
    with pytest.raises(ProtocolError, match="unknown request"):
        client.send({"op": ["append"]})
    with pytest.raises(ProtocolError, match="hands out no batches"):
        client.send({"op": "beat", "n": 1, "tokens": [1]})
    for number in range(MAX_OPEN_REQUESTS):
        client.ask(f"{number}")
    with pytest.raises(ProtocolError, match="unanswered requests"):
        client.ask("more")


def test_in_a_pause_nothing_is_written_and_behind_it_what_waited_is() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    broker = made(store, runtime)
    writer, client = Client(broker), Client(broker)
    writer.send({"op": "pause", "n": 1, "writes": 2})
    client.ask("a")
    broker.start()
    assert writer.answered() == [{"op": "given", "n": 1}]
    pause_s = 2 * CYCLES_EACH * FIRST_CYCLE_S
    runtime.advance(pause_s - 0.01)
    assert (queued(store), client.answers) == ([], [])
    runtime.advance(0.02)
    assert client.answered()[0]["op"] == "done"
    assert queued(store) == ["ingest/a"]


def test_between_two_pauses_the_broker_writes_what_waits_without_losing_a_race() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    broker = made(store, runtime)
    first, second, client = (Client(broker) for _ in range(3))
    client.ask("a")
    broker.start()
    client.answered()
    first.send({"op": "pause", "n": 1, "writes": 1})
    first.answered()
    client.clock = broker.clock()
    client.ask("b")
    writer = Queue(store, CONFIG, runtime=runtime, role="writer")
    writer.append([NewEntry("ingest/writer")])
    second.send({"op": "pause", "n": 1, "writes": MAX_OPEN_REQUESTS})
    runtime.advance(2 * FIRST_CYCLE_S)
    # Between two pauses what waits is written, without a lost race.
    assert client.answered(2)[1]["op"] == "done"
    assert queued(store) == ["ingest/a", "ingest/writer", "ingest/b"]
    assert broker.stats()["conflicts"] == 0
    second.answered()
    assert broker.stats()["pauses"] == 2


def test_a_client_whose_connection_ended_gets_no_answer_and_the_others_do() -> None:
    broker = made(MemoryStore(), SystemRuntime())
    gone, client = Client(broker), Client(broker)
    gone.send({"op": "pause", "n": 1, "writes": 1})
    client.ask("a")
    gone.session.close()
    broker.start()
    assert client.answered()[0]["op"] == "done"
    assert gone.answers == []


def claim(number: int) -> dict[str, Any]:
    return {
        "op": "claim",
        "n": number,
        "max": 1,
        "wait_ms": 60_000,
        "worker": "worker",
        "timeout_ms": 600_000,
        "max_deliveries": 0,
    }


def test_a_batch_is_not_handed_to_a_worker_that_is_gone() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    consumer = ConsumerConfig(store="memory://unused", create_if_missing=True)
    queue = Queue(store, CONFIG, runtime=runtime, role="broker")
    broker = Broker(
        store, queue, runtime, "ingest", dispatcher=Dispatcher(store, consumer, runtime)
    )
    broker.start()
    gone, waiting, producer = (Client(broker) for _ in range(3))
    gone.send(claim(1))
    gone.session.close()
    waiting.send(claim(1))
    producer.ask("a")
    (batch,) = waiting.answered()[0]["batches"]
    assert batch["deliveries"] == 1
    broker.stop(5)


CODE = """
import os, socket, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from opendata_buffer.broker.network import socket_owners

class Owner:
    def __init__(self, *sockets):
        self.sockets = sockets

    def descriptors(self):
        return [each.fileno() for each in self.sockets]

mine, other = socket.socketpair()
closed = socket.socket()
closed.close()
owner = Owner(closed, mine)
if sys.argv[1] == "owned":
    socket_owners.add(owner)
parents, childs = socket.socketpair()
child = os.fork()
if child == 0:
    parents.close()
    other.close()
    childs.sendall(b"!")
    childs.recv(1)  # until the parent says so
    mine.close()  # what closes it here closes nothing else
    os._exit(0 if childs.fileno() >= 0 and os.fstat(childs.fileno()) else 1)
parents.recv(1)
mine.sendall(b"x")
mine.close()
other.settimeout(0.2 if sys.argv[1] != "owned" else 20)
seen = [other.recv(1)]
try:
    seen.append(other.recv(1))
except TimeoutError:
    seen.append("open")
parents.sendall(b"!")
print(seen, os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(("owner", "seen"), [("owned", "b''"), ("without an owner", "'open'")])
def test_a_connection_ends_with_its_process_though_a_child_of_it_lives(
    owner: str, seen: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, owner], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.strip() == f"[b'x', {seen}] 0"


def test_a_queue_on_one_machine_is_served_there_and_a_shared_one_to_every_machine(
    tmp_path: Path,
) -> None:
    assert listen_for(MemoryStore()) == listen_for(LocalStore(tmp_path)) == Listen()
    shared: Any = SimpleNamespace(url="s3://bucket/orders")
    port = WebSocketNetwork(RUNTIME, listen_for(shared)).listen()
    # A loopback address, or 0.0.0.0, would mean another process on each machine.
    assert port.address.rpartition(":")[0] == own_address() != "0.0.0.0"
    # It listens there, and on no other interface.
    assert isinstance(port, WebSocketPort)
    with socket.socket(fileno=os.dup(port.descriptors()[0])) as listening:
        assert listening.getsockname()[0] == own_address()
    port.close()


def at(port: int) -> DiscoveryRecord:
    return DiscoveryRecord(1, "id", f"127.0.0.1:{port}", b"s" * 32)


def test_an_address_where_no_process_listens_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ChannelRefused, match="no process listens"):
            open_channel(at(taken.getsockname()[1]), 30.0)


def test_a_port_that_accepts_and_says_nothing_costs_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    really_connect = websockets_client.connect

    def connect(*where: Any, open_timeout: float, **options: Any) -> Any:
        limits.append(open_timeout)
        return really_connect(*where, open_timeout=open_timeout, **options)

    monkeypatch.setattr(websockets_client, "connect", connect)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ChannelClosed) as caught:
            open_channel(at(silent.getsockname()[1]), 0.3)
        assert not isinstance(caught.value, ChannelRefused)
    assert limits == [0.3]


@pytest.mark.parametrize(
    "address",
    ["no-such-host.invalid:1", "broker..svc:7420", "127.0.0.1:99999", "[::1:7420", "host:x"],
)
def test_an_address_that_does_not_resolve_or_is_none_is_not_reached(address: str) -> None:
    with pytest.raises(ChannelClosed):
        open_channel(DiscoveryRecord(1, "id", address, b"s" * 32), 1.0)


def test_without_a_thread_to_spare_nothing_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*where: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(websockets_client, "connect", connect)
    with pytest.raises(ChannelClosed, match="can't start new thread"):
        open_channel(at(1), 1.0)
