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
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
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
        # Once the port is there: for the handshake of HTTP it takes all the time it needs.
        monkeypatch.setattr(network, "HANDSHAKE_S", 0.5)
        silent = open_channel(broker_record, WAIT_S)
        assert silent.receive(WAIT_S) is not None
        with pytest.raises(ChannelClosed):
            silent.receive(WAIT_S)
        assert broker.sessions == 0


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
        strangers[0].sendall(b"\x16\x03\x01")  # the beginning of a message of TLS
        for stranger in strangers[4:]:
            # At once, and not when the time for a handshake is over.
            stranger.settimeout(network.HANDSHAKE_S / 2)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        assert client.append(entries("a"), since=None, begin_by=soon()) == 0


def test_a_client_that_asks_and_never_reads_is_disconnected() -> None:
    asked = 0
    with serving() as (broker, broker_record, _), connected(broker_record) as good:
        with shaken_hands(broker_record) as (silent, end), suppress(ConnectionClosed):
            eventually(lambda: broker.sessions == 2)
            while True:
                # Until its answers fill the buffers of the kernel, and then its queue.
                silent.send(end.encode({"op": "stats"}))
                asked += 1
        eventually(lambda: broker.sessions == 1)
        assert good.append(entries("a"), since=None, begin_by=soon()) == 0
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
            assert answer == number


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


def test_a_port_that_is_shut_refuses_its_clients() -> None:
    with serving() as (_, broker_record, port):
        port.shut()
        with pytest.raises((ChannelClosed, ProtocolError)):
            connect(broker_record)


def test_what_is_advertised_is_announced() -> None:
    port = WebSocketPort(Listen(advertise="broker.example:9100"), RUNTIME)
    port.close()
    port.close()
    assert port.address == "broker.example:9100"
    port = WebSocketPort(Listen(host="0.0.0.0"), RUNTIME)
    port.close()
    assert port.address.startswith(f"{own_address()}:")


def test_a_forked_child_gives_its_parents_sockets_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def descriptors(self) -> list[int]:
            return [ours.fileno(), -1]

    ours, theirs = socket.socketpair()
    owner = Owner()
    monkeypatch.setattr(network, "socket_owners", {owner})
    network._close_sockets()
    assert theirs.recv(1) == b"", "the other side is told"
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


def test_a_broker_makes_a_certificate_or_takes_an_operators(certificate: Listen) -> None:
    shown = set()
    for listen in (Listen(), Listen(), certificate):
        with serving(listen=listen) as (_, broker_record, _), connected(broker_record) as client:
            shown.add(broker_record.certificate)
            assert client.append(entries("a"), since=None, begin_by=soon()) == 0
    assert len(shown) == 3


class Middle:
    """A process between a client and a broker: it sees and keeps what both send."""

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
            # It plays the broker, with a certificate of its own.
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


def test_a_process_that_shows_another_certificate_hears_nothing() -> None:
    middle = Middle()
    record = DiscoveryRecord(1, "id", middle.address, b"s" * 32, "00" * 32)
    with pytest.raises(ChannelClosed, match="another certificate"):
        open_channel(record, WAIT_S)
    middle.close()
    assert middle.heard == b""


def test_who_is_on_the_way_reads_neither_the_secret_nor_what_is_appended() -> None:
    with serving() as (_, broker_record, _):
        middle = Middle(broker_record)
        with closing(connect(replace(broker_record, address=middle.address))) as client:
            client.show_may_write(local._stores[broker_record.address], CONFIG.manifest_path)
            assert client.append(entries("hidden"), since=None, begin_by=soon()) == 0
        middle.close()
    assert len(middle.heard) > 1_000
    for text in (b"hidden", b"append", b"secret", broker_record.secret.hex().encode()):
        assert text not in middle.heard


def test_an_earlier_release_on_either_side_is_told_to_run_one_version() -> None:
    with serving() as (_, broker_record, _):
        channel = open_channel(broker_record, WAIT_S)
        hello = channel.receive(WAIT_S)
        channel.close()
        # What an earlier release reads of it: its version, in a message of at most 1,024 bytes.
        assert json.loads(hello or b"")["v"] == 3
        assert len(hello or b"") <= 1_024
        # An earlier release announces no certificate, unless it was given one.
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
def test_an_address_that_does_not_resolve_or_is_none_is_not_reached(address: str) -> None:
    with pytest.raises(ChannelClosed):
        open_channel(at(address), 1.0)


# ---- who can read the queue, and reach its broker, cannot write by it


FOLDER = "ingest/manifest._clients/"


def keys_of(store: MemoryStore) -> list[str]:
    return [each.key for each in store.list(FOLDER).objects]


def test_a_client_that_writes_the_object_may_append_and_nothing_stays() -> None:
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
def test_who_can_only_read_appends_claims_and_finishes_nothing(request_: dict[str, Any]) -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    queue = Queue(store, CONFIG, runtime=runtime, role="broker")
    dispatcher = Dispatcher(store, ConsumerConfig(store="memory://unused"), runtime)
    broker = Broker(store, queue, runtime, "ingest", dispatcher=dispatcher)
    reader = Client(broker, may_write=False)
    with pytest.raises(ProtocolError, match="has not shown that it may write"):
        reader.send(request_)
    assert dispatcher._task is None  # The queue's epoch is as it was.
    assert (broker.entries_waiting, broker.pauses) == (0, 0)


def test_who_can_only_read_gets_the_counters() -> None:
    with serving() as (_, broker_record, _):
        reader = connect(broker_record)
        assert (reader.stats(30.0) or {})["clients"] == 1
        reader.close()


def test_a_client_that_may_not_write_is_told_so_by_its_store() -> None:
    def deny(key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError(f"403 for {key}")

    store = MemoryStore()
    store.put = deny  # type: ignore[method-assign]
    with serving() as (_, broker_record, _):
        reader = connect(broker_record)
        with pytest.raises(PermanentStorageError, match=f"403 for {FOLDER}"):
            reader.show_may_write(store, CONFIG.manifest_path)
        reader.close()


def told(store: MemoryStore, client: Client, data: bytes | None, name: str = NAME) -> str:
    """What the broker says to a client once these bytes are there."""
    if data is not None:
        store.put(FOLDER + name, data)
    client.send({"op": "written", "n": 1})
    (answer,) = client.answered()
    store.delete_many([FOLDER + name])
    assert client.session.may_write is (answer["op"] == "granted")
    return str(answer["op"] if client.session.may_write else answer["error"]["text"])


def test_only_the_bytes_for_this_connection_count_and_a_client_asks_once() -> None:
    store = MemoryStore()
    broker = made(store)
    clients = [Client(broker, may_write=False) for _ in range(8)]
    right = clients[0].end.write_proof()
    assert told(store, clients.pop(), right) == "granted"
    assert f"{FOLDER}{NAME}" in told(store, clients.pop(), None)
    assert f"{FOLDER}{NAME}" in told(store, clients.pop(), right, NAME[:-1] + "X")
    for wrong in (b"", right[:-1], right + b"0", b"x" * 1_000_000):
        assert FOLDER in told(store, clients[-1], wrong)
        with pytest.raises(ProtocolError, match="for the second time"):
            clients.pop().send({"op": "written", "n": 2})


def test_a_copy_of_another_client_s_object_proves_nothing() -> None:
    """A reader sees the objects of others; the keys, and with them the bytes, are not the same."""
    store = MemoryStore()
    broker = made(store)
    writer, reader = (Client(broker, may_write=False, nonce=each * 32) for each in (b"w", b"r"))
    assert "not written for this" in told(store, reader, writer.end.write_proof())
    assert told(store, writer, writer.end.write_proof()) == "granted"


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
def test_a_store_that_fails_grants_nothing_and_the_client_is_told(error: Exception) -> None:
    store = Failing(error)
    assert str(error) in told(store, Client(made(store), may_write=False), None)


def test_a_store_that_stalls_takes_no_more_threads_than_a_few(
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
    assert "too many clients" in told(store, clients[2], None)
    stalls.set()
    for client in clients[:2]:
        client.answered()
    late = Client(broker, may_write=False)
    assert told(store, late, late.end.write_proof()) == "granted"


def test_a_broker_deletes_what_clients_of_earlier_ones_left_and_begins_in_any_case() -> None:
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
def test_the_longest_manifest_path_leaves_room_for_a_name(manifest: str, folder: str) -> None:
    assert write_proof_folder(manifest) == folder
    assert len(f"{folder}{NAME}".encode()) <= 1024


def test_a_process_that_took_the_port_of_a_dead_broker_gets_no_append() -> None:
    """It knows the secret, as everyone who reads; it does not have the announced certificate."""
    store = MemoryStore()
    with hosting(store) as ours:
        announced = eventually(lambda: ours.serving)
        with serving(secret=announced.secret) as (_, squatting, _):
            record = replace(announced, address=squatting.address, term=squatting.term)
            with pytest.raises(ChannelClosed, match="another certificate"):
                connect(record)


def test_a_process_that_announces_itself_gets_no_proof_for_the_real_broker() -> None:
    """It passes on the name and the nonce that the real broker gave it."""
    store = MemoryStore()
    broker = made(store)
    attacker = Client(broker, may_write=False)
    hello = BrokerEnd(b"s" * 32, 1, "", b"a" * 32, NAME).hello()
    writer = ClientEnd(b"s" * 32, 1, "the attacker's certificate")
    writer.prove(hello)
    assert "not written for this" in told(store, attacker, writer.write_proof())
