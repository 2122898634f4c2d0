"""WebSocket connections to a broker and the broker behind a port."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync import client as websockets_client
from websockets.sync.client import ClientConnection

from opendata_buffer.broker import network, protocol
from opendata_buffer.broker.broker import Broker
from opendata_buffer.broker.client import ChannelClosed, ChannelRefused, DiscoveryRecord
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
    BrokerEnd,
    ClientEnd,
    ProtocolError,
    write_proof_folder,
)
from opendata_buffer.broker.tls import broker_context, client_context
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.producer.fairness import FIRST_CYCLE_S
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker import local
from tests.unit.broker.local import (
    CONFIG,
    NAME,
    RUNTIME,
    Client,
    Hooked,
    connect,
    connected,
    entries,
    eventually,
    hosting,
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
            end = ClientEnd(b"x" * 32, 1, broker_record.certificate)
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
def test_garbage_ends_only_its_own_connection(garbage: bytes) -> None:
    store = MemoryStore()
    with serving(store) as (_, broker_record, _), connected(broker_record) as good:
        bad = open_channel(broker_record, WAIT_S)
        assert bad.receive(WAIT_S) is not None  # The broker's hello.
        bad.send(garbage)
        with pytest.raises(ChannelClosed):
            bad.receive(WAIT_S)
        assert good.append(entries("a"), since=None, begin_by=soon()) == 0
        assert queued(store) == ["ingest/a.batch"]


def test_a_client_that_sends_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (broker, broker_record, _):
        # The limit applies after the port is open; the HTTP handshake may take longer.
        monkeypatch.setattr(network, "HANDSHAKE_S", 0.5)
        silent = open_channel(broker_record, WAIT_S)
        assert silent.receive(WAIT_S) is not None
        with pytest.raises(ChannelClosed):
            silent.receive(WAIT_S)
        assert broker.sessions == 0


def test_unauthenticated_connections_are_limited(
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
        strangers[0].sendall(b"\x16\x03\x01")  # the beginning of a TLS message
        for stranger in strangers[4:]:
            # It happens at once, and not after the handshake time limit.
            stranger.settimeout(network.HANDSHAKE_S / 2)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert client.append(entries("a"), since=None, begin_by=soon()) == 0


def test_a_client_that_sends_requests_and_never_reads_is_disconnected() -> None:
    asked = 0
    with serving() as (broker, broker_record, _), connected(broker_record) as good:
        with shaken_hands(broker_record) as (silent, end), suppress(ConnectionClosed):
            eventually(lambda: broker.sessions == 2)
            while True:
                # Send until the answers fill the kernel's buffers, and then the broker's queue.
                silent.send(end.encode({"op": "stats"}))
                asked += 1
        eventually(lambda: broker.sessions == 1)
        assert good.append(entries("a"), since=None, begin_by=soon()) == 0
    assert asked > 2 * QUEUED_ANSWERS


@pytest.mark.parametrize("known", [False, True], ids=["a stranger", "a client"])
def test_a_message_that_arrives_byte_by_byte_does_not_delay_other_clients(known: bool) -> None:
    with (
        serving() as (broker, broker_record, _),
        connected(broker_record) as good,
        shaken_hands(broker_record, known=known) as (slow, _),
    ):
        eventually(lambda: broker.sessions == 1 + known)
        for number, byte in enumerate(frame(b"x" * 1_000)[:5]):
            slow.socket.sendall(bytes([byte]))
            answer = good.append(entries(str(number)), since=None, begin_by=soon())
            assert answer == number


def test_an_unauthenticated_client_cannot_make_the_broker_buffer_a_large_message() -> None:
    with (
        serving() as (_, broker_record, _),
        shaken_hands(broker_record, known=False) as (stranger, _),
    ):
        # The header of a message of 2 MiB is refused because of its length.
        stranger.socket.sendall(frame(b"x" * 2 * 1024 * 1024)[:100])
        with pytest.raises(ConnectionClosed):
            stranger.recv(network.HANDSHAKE_S / 2)


@contextmanager
def shaken_hands(
    broker_record: DiscoveryRecord, *, known: bool = True
) -> Iterator[tuple[ClientConnection, ClientEnd]]:
    """Open a WebSocket that reads one message ahead: after the broker's hello, or as a client."""
    end = ClientEnd(broker_record.secret, broker_record.term, broker_record.certificate)
    with websockets_client.connect(
        f"wss://{broker_record.address}/",
        ssl=client_context(),
        compression=None,
        max_queue=1,
        ping_interval=None,
        close_timeout=0.2,
        proxy=None,
    ) as client:
        proof = end.prove(client.recv(decode=False))
        if known:
            client.send(proof)
        yield client, end


def frame(message: bytes) -> bytes:
    return Frame(Opcode.BINARY, message).serialize(mask=True)


def test_a_closed_port_refuses_clients() -> None:
    with serving() as (_, broker_record, port):
        port.shut()
        with pytest.raises((ChannelClosed, ProtocolError)):
            connect(broker_record)


def test_the_advertised_address_is_announced() -> None:
    port = WebSocketPort(Listen(advertise="broker.example:9100"), RUNTIME)
    port.close()
    port.close()
    assert port.address == "broker.example:9100"
    port = WebSocketPort(Listen(host="0.0.0.0"), RUNTIME)
    port.close()
    assert port.address.startswith(f"{own_address()}:")


def test_a_forked_child_closes_its_parents_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def descriptors(self) -> list[int]:
            return [ours.fileno(), -1]

    ours, theirs = socket.socketpair()
    owner = Owner()
    monkeypatch.setattr(network, "socket_owners", {owner})
    network._close_sockets()
    assert theirs.recv(1) == b"", "the peer sees the end of the connection"
    ours.close()
    theirs.close()
    with serving() as (_, broker_record, port):
        channel = open_channel(broker_record, WAIT_S)
        assert channel.receive(WAIT_S)
        assert len(port.descriptors()) == 2
        channel.close()
        assert channel.descriptors() == [-1]
        with pytest.raises(ChannelClosed):
            channel.send(b"")


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


def test_a_broker_creates_a_certificate_or_uses_a_configured_one(certificate: Listen) -> None:
    shown = set()
    for listen in (Listen(), Listen(), certificate):
        with serving(listen=listen) as (_, broker_record, _), connected(broker_record) as client:
            shown.add(broker_record.certificate)
            assert client.append(entries("a"), since=None, begin_by=soon()) == 0
    assert len(shown) == 3


class Middle:
    """A man in the middle that records the bytes of a client and a broker."""

    def __init__(self, to: DiscoveryRecord | None = None) -> None:
        self._to = to
        self.heard = bytearray()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        if self._to is None:
            # It poses as the broker, with its own certificate.
            context, _ = broker_context()
            with suppress(OSError), context.wrap_socket(client, server_side=True) as tls:
                self.heard += tls.recv(10_000)
            return
        host, port = self._to.address.split(":")
        broker = socket.create_connection((host, int(port)))
        for one, other in ((client, broker), (broker, client)):
            self._threads.append(threading.Thread(target=self._pass_on, args=(one, other)))
            self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self.heard += data
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(60)
        self._listening.close()


def test_a_process_with_another_certificate_receives_no_request() -> None:
    middle = Middle()
    record = DiscoveryRecord(1, "id", middle.address, b"s" * 32, "00" * 32)
    with pytest.raises(ChannelClosed, match="another certificate"):
        open_channel(record, WAIT_S)
    middle.close()
    assert middle.heard == b""


def test_an_eavesdropper_sees_neither_the_secret_nor_the_appended_entries() -> None:
    with serving() as (_, broker_record, _):
        middle = Middle(broker_record)
        with closing(connect(replace(broker_record, address=middle.address))) as client:
            client.show_may_write(local._stores[broker_record.address], CONFIG.manifest_path)
            assert client.append(entries("hidden"), since=None, begin_by=soon()) == 0
        middle.close()
    assert len(middle.heard) > 1_000
    for text in (b"hidden", b"append", b"secret", broker_record.secret.hex().encode()):
        assert text not in middle.heard


def test_an_earlier_release_on_either_side_gets_an_error_that_asks_for_one_version() -> None:
    with serving() as (_, broker_record, _):
        channel = open_channel(broker_record, WAIT_S)
        hello = channel.receive(WAIT_S)
        channel.close()
        # An earlier release reads the version, in a message of at most 1,024 bytes.
        assert json.loads(hello or b"")["v"] == 3
        assert len(hello or b"") <= 1_024
        # An earlier release announces no certificate unless it was configured with one.
        with pytest.raises(ProtocolError, match=r"version 2 .* run one version of opendata-buffer"):
            connect(replace(broker_record, certificate=""))


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


def test_the_broker_writes_waiting_requests_between_two_pauses_without_losing_a_race() -> None:
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
    # Between two pauses the waiting requests are written without a lost race.
    assert client.answered(2)[1]["op"] == "done"
    assert queued(store) == ["ingest/a", "ingest/writer", "ingest/b"]
    assert broker.stats()["conflicts"] == 0
    second.answered()
    assert broker.stats()["pauses"] == 2


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


def test_a_batch_is_not_assigned_to_a_disconnected_worker() -> None:
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


def test_a_local_queue_is_served_on_loopback_and_a_shared_one_on_every_interface(
    tmp_path: Path,
) -> None:
    assert listen_for(MemoryStore()) == listen_for(LocalStore(tmp_path)) == Listen()
    shared: Any = SimpleNamespace(url="s3://bucket/orders")
    port = WebSocketNetwork(RUNTIME, listen_for(shared)).listen()
    # A loopback address, or 0.0.0.0, would mean another process on each machine.
    assert port.address.rpartition(":")[0] == own_address() != "0.0.0.0"
    # It listens on this interface and on no other.
    assert isinstance(port, WebSocketPort)
    with socket.socket(fileno=os.dup(port.descriptors()[0])) as listening:
        assert listening.getsockname()[0] == own_address()
    port.close()


def at(address: str) -> DiscoveryRecord:
    return DiscoveryRecord(1, "id", address, b"s" * 32, "00" * 32)


def test_an_address_where_no_process_listens_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ChannelRefused, match="no process listens"):
            open_channel(at(f"127.0.0.1:{taken.getsockname()[1]}"), 30.0)


@pytest.mark.parametrize(
    "address",
    ["no-such-host.invalid:1", "broker..svc:7420", "127.0.0.1:99999", "[::1:7420", "host:x"],
)
def test_an_address_that_is_invalid_or_does_not_resolve_is_not_reached(address: str) -> None:
    with pytest.raises(ChannelClosed):
        open_channel(at(address), 1.0)


# ---- a process with read access to the queue cannot write through its broker


FOLDER = "ingest/manifest._clients/"


def keys_of(store: MemoryStore) -> list[str]:
    return [each.key for each in store.list(FOLDER).objects]


def test_a_client_that_writes_the_proof_object_may_append_and_the_object_is_deleted() -> None:
    store = MemoryStore()
    with serving(store) as (_, broker_record, _), connected(broker_record) as client:
        assert client.append(entries("a"), since=None, begin_by=soon()) == 0
        eventually(lambda: not keys_of(store))
    assert queued(store) == ["ingest/a.batch"]


REQUESTS: list[dict[str, Any]] = [
    {"op": "append", "n": 1, "valid_ms": 1, "clock": [0.0, 0], "entries": [["ingest/a", []]]},
    {"op": "renew", "n": [1], "clock": [0.0, 0]},
    {"op": "pause", "n": 1, "writes": 1},
    {"op": "claim", "n": 1, "max": 9, "wait_ms": 0, "worker": "w", "timeout_ms": 1},
    {"op": "finish", "n": 1, "how": "done", "sequence": 0, "token": 1, "reason": "", "rest_ms": 0},
    {"op": "beat", "n": 1, "tokens": []},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=[str(each["op"]) for each in REQUESTS])
def test_a_client_with_read_access_cannot_append_claim_or_finish(request_: dict[str, Any]) -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    queue = Queue(store, CONFIG, runtime=runtime, role="broker")
    dispatcher = Dispatcher(store, ConsumerConfig(store="memory://unused"), runtime)
    broker = Broker(store, queue, runtime, "ingest", dispatcher=dispatcher)
    reader = Client(broker, may_write=False)
    with pytest.raises(ProtocolError, match="has not shown that it may write"):
        reader.send(request_)
    assert dispatcher._task is None  # The epoch of the queue is unchanged.
    assert (broker.entries_waiting, broker.pauses) == (0, 0)


def test_a_client_with_read_access_gets_the_counters() -> None:
    with serving() as (_, broker_record, _):
        reader = connect(broker_record)
        assert (reader.stats(30.0) or {})["clients"] == 1
        reader.close()


def test_a_client_without_write_access_gets_the_error_of_its_store() -> None:
    def deny(key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError(f"403 for {key}")

    store = MemoryStore()
    store.put = deny  # type: ignore[method-assign]
    with serving() as (_, broker_record, _):
        reader = connect(broker_record)
        with pytest.raises(PermanentStorageError, match=f"403 for {FOLDER}"):
            reader.show_may_write(store, CONFIG.manifest_path)
        reader.close()


def replies(store: MemoryStore, client: Client, data: bytes | None, name: str = NAME) -> str:
    """Return the broker's replies to a client once these bytes are stored."""
    if data is not None:
        store.put(FOLDER + name, data)
    client.send({"op": "written", "n": 1})
    (answer,) = client.answered()
    store.delete_many([FOLDER + name])
    assert client.session.may_write is (answer["op"] == "granted")
    return str(answer["op"] if client.session.may_write else answer["error"]["text"])


def test_only_the_bytes_for_this_connection_are_accepted_and_a_client_asks_once() -> None:
    store = MemoryStore()
    broker = made(store)
    clients = [Client(broker, may_write=False) for _ in range(8)]
    right = clients[0].end.write_proof()
    assert replies(store, clients.pop(), right) == "granted"
    assert f"{FOLDER}{NAME}" in replies(store, clients.pop(), None)
    assert f"{FOLDER}{NAME}" in replies(store, clients.pop(), right, NAME[:-1] + "X")
    for wrong in (b"", right[:-1], right + b"0", b"x" * 1_000_000):
        assert FOLDER in replies(store, clients[-1], wrong)
        with pytest.raises(ProtocolError, match="for the second time"):
            clients.pop().send({"op": "written", "n": 2})


def test_a_copy_of_another_client_s_object_proves_nothing() -> None:
    """A reader sees the objects of others, but its connection needs another key and other bytes."""
    store = MemoryStore()
    broker = made(store)
    writer, reader = (Client(broker, may_write=False, nonce=each * 32) for each in (b"w", b"r"))
    assert "not written for this" in replies(store, reader, writer.end.write_proof())
    assert replies(store, writer, writer.end.write_proof()) == "granted"


class Failing(MemoryStore):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def list(self, prefix: str, **options: Any) -> Any:
        raise self.error

    def get(self, key: str, **options: Any) -> Any:
        if key.startswith(FOLDER):
            raise self.error
        return super().get(key, **options)


@pytest.mark.parametrize("error", [TransientStorageError("503"), ValueError("a bug")], ids=str)
def test_a_failing_store_grants_no_access_and_the_client_gets_an_error(error: Exception) -> None:
    store = Failing(error)
    assert str(error) in replies(store, Client(made(store), may_write=False), None)


def test_a_stalled_store_blocks_only_a_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "MAX_UNDER_WAY", 2)
    stalls = threading.Event()
    store = Hooked(NAME)
    store.on_read = lambda: stalls.wait(60)
    broker = made(store)
    clients = [Client(broker, may_write=False) for _ in range(3)]
    store.put(FOLDER + NAME, clients[0].end.write_proof())
    for client in clients[:2]:
        client.send({"op": "written", "n": 1})
    assert "too many clients" in replies(store, clients[2], None)
    stalls.set()
    for client in clients[:2]:
        client.answered()
    late = Client(broker, may_write=False)
    assert replies(store, late, late.end.write_proof()) == "granted"


def test_a_broker_deletes_leftover_proof_objects_and_starts_even_if_that_fails() -> None:
    store = MemoryStore()
    for number in range(3):
        store.put(f"{FOLDER}{number}", b"left")
    with serving(store):
        assert keys_of(store) == []
    with serving(Failing(StorageError("503"))) as (broker, _, _):
        assert broker.stats()["commits"] == 0


@pytest.mark.parametrize(
    ("manifest", "folder"), [("ingest/manifest", FOLDER), ("é" * 512, "é" * 494 + "._clients/")]
)
def test_the_longest_manifest_path_leaves_room_for_a_proof_object(
    manifest: str, folder: str
) -> None:
    assert write_proof_folder(manifest) == folder
    assert len(f"{folder}{NAME}".encode()) <= 1024


def test_a_process_on_the_port_of_a_dead_broker_gets_no_append() -> None:
    """It knows the secret, as every reader does, but lacks the announced certificate."""
    store = MemoryStore()
    with hosting(store) as ours:
        announced = eventually(lambda: ours.serving)
        with serving(secret=announced.secret) as (_, squatting, _):
            record = replace(announced, address=squatting.address, term=squatting.term)
            with pytest.raises(ChannelClosed, match="another certificate"):
                connect(record)


def test_a_process_that_announces_itself_cannot_obtain_a_proof_for_the_real_broker() -> None:
    """It forwards the name and the nonce of the real broker."""
    store = MemoryStore()
    broker = made(store)
    attacker = Client(broker, may_write=False)
    hello = BrokerEnd(b"s" * 32, 1, "", b"a" * 32, NAME).hello()
    writer = ClientEnd(b"s" * 32, 1, "the attacker's certificate")
    writer.prove(hello)
    assert "not written for this" in replies(store, attacker, writer.write_proof())
