"""Connect clients to a broker with WebSockets inside TLS, and serve the broker's port.

Clients use blocking connections. The broker's port runs on an event loop in a separate thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit
from weakref import WeakSet

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.server import ServerProtocol
from websockets.sync import client as websockets_client

from opendata_buffer.broker.broker import Broker, Session
from opendata_buffer.broker.client import (
    CONNECT_S,
    Channel,
    ChannelClosed,
    ChannelRefused,
    Connection,
    DiscoveryRecord,
)
from opendata_buffer.broker.protocol import (
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    BrokerEnd,
    ProtocolError,
    other_version,
)
from opendata_buffer.broker.tls import TlsSocket, TlsTransport, broker_context
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.runtime import Runtime, SystemRuntime, Task
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

HANDSHAKE_S = 2.0
"""Seconds for a client to prove that it knows the secret; then its connection is closed."""

MAX_CLIENTS = 10_000

MAX_OPEN_HANDSHAKES = 1_000
"""Most open handshakes in addition to ``MAX_CLIENTS``: the process needs files for its store."""

PING_S, PONG_S = 20.0, 60.0
"""Seconds after which a silent client is sent a ping, and then disconnected without an answer."""

QUEUED_ANSWERS = 1_024
"""Most answers that wait for a client that does not read; at one more it is disconnected."""

TRY_AGAIN_LATER = 1013


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a broker listens, and how its clients reach it.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        advertise: ``host:port`` for clients, if they must use another address. Default: the address
            listened on; for ``0.0.0.0`` and ``::`` this machine's address towards other networks.
        certificate: Path of a PEM file with the broker's certificate. Empty: the broker makes one.
        key: Path of a PEM file with its private key; empty if it is in the same file.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    certificate: str = ""
    key: str = ""


class WebSocketNetwork:
    """Connections to brokers, and a port for a broker of this process.

    Args:
        runtime: Clock and threads.
        listen: Where to listen. Default: a free port of the loopback address.
    """

    def __init__(self, runtime: Runtime, listen: Listen | None = None) -> None:
        self._runtime = runtime
        self._listen = listen or Listen()

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        """Connect to the announced broker, within :data:`.CONNECT_S`.

        Args:
            broker_record: The broker's discovery record.

        Returns:
            The connection.

        Raises:
            ChannelClosed: The broker is not reached, or shows another certificate.
            ProtocolError: It speaks another version.
        """
        return Connection(open_channel(broker_record, CONNECT_S), broker_record, self._runtime)

    def listen(self) -> WebSocketPort:
        """Open a port of this process.

        Returns:
            The port.

        Raises:
            InvalidInput: The address or the certificate cannot be used.
        """
        return WebSocketPort(self._listen, self._runtime)


def listen_for(store: Store) -> Listen:
    """Return where a broker listens by default: at the address that it announces, and no other.

    It must not announce a loopback address for a queue that several machines share: on each of them
    that would mean another process.
    """
    on_one_machine = store.url.startswith(("file://", "memory://"))
    return Listen() if on_one_machine else Listen(host=own_address())


def open_channel(broker_record: DiscoveryRecord, timeout: float) -> Channel:
    """Connect to the announced broker.

    Args:
        broker_record: Names its address and the fingerprint of its certificate.
        timeout: Seconds until the connection must be open.

    Returns:
        The channel. The handshake of the protocol comes next.

    Raises:
        ChannelRefused: No process listens at the address.
        ChannelClosed: It is not reached in time, or another process listens there. That process
            gets nothing but the first message of TLS.
        ProtocolError: The broker is of an earlier release, which needed no certificate.
    """
    if not broker_record.certificate:
        raise other_version(2)
    until = SystemRuntime.monotonic() + timeout
    stack = ExitStack()
    try:
        address = urlsplit(f"//{broker_record.address}")
        raw = socket.create_connection((address.hostname or "", address.port or 0), timeout)
        stack.callback(raw.close)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        tls = TlsSocket(raw, until - SystemRuntime.monotonic())
        if tls.peer_fingerprint != broker_record.certificate:
            raise ChannelClosed(
                f"the process at {broker_record.address} shows another certificate than the "
                "announced broker's"
            )
        connection = stack.enter_context(
            websockets_client.connect(
                # The scheme is not wss because this socket has TLS already.
                f"ws://{broker_record.address}/",
                sock=cast(socket.socket, tls),
                open_timeout=max(0.001, until - SystemRuntime.monotonic()),
                close_timeout=0.2,
                ping_interval=None,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )
        )
        return _WebSocketChannel(connection, stack.pop_all())
    except ConnectionRefusedError as error:
        raise ChannelRefused(f"no process listens at {broker_record.address}") from error
    except (OSError, ValueError, RuntimeError, WebSocketException) as error:
        # TimeoutError and ssl.SSLError are OSErrors. A ValueError means that the address is not
        # valid, and a RuntimeError that no thread is left for the connection.
        raise ChannelClosed(f"{broker_record.address} is not reached: {error}") from error
    finally:
        stack.close()


class _WebSocketChannel:
    """A :class:`Channel` over a WebSocket."""

    def __init__(self, connection: websockets_client.ClientConnection, stack: ExitStack) -> None:
        self._connection = connection
        self._stack = stack
        socket_owners.add(self)

    def descriptors(self) -> list[int]:
        """Return the file descriptor of the connection."""
        return [self._connection.socket.fileno()]

    def send(self, message: bytes) -> None:
        try:
            self._connection.send(message)
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None) -> bytes | None:
        try:
            return self._connection.recv(timeout, decode=False)
        except TimeoutError:
            return None
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        # Close the socket without the closing handshake: a suspended broker would not answer it.
        self._connection.close_socket()
        self._stack.close()


class WebSocketPort:
    """A listening port, which refuses clients until :meth:`open`.

    Args:
        listen: Where to listen, and with which certificate.
        runtime: Clock and threads.

    Raises:
        InvalidInput: The address or the certificate cannot be used.
    """

    def __init__(self, listen: Listen, runtime: Runtime) -> None:
        self._listen = listen
        self._loop = asyncio.new_event_loop()
        self._active: tuple[Broker, DiscoveryRecord] | None = None
        self._clients: set[ServerConnection] = set()
        self._open: set[ServerConnection] = set()
        self._refused: set[str] = set()
        # Clients may use only some of the files that the process may open: its store needs others.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = 2 * MAX_CLIENTS if soft == resource.RLIM_INFINITY else soft
        self._most_clients = min(MAX_CLIENTS, files // 2)
        self._most_open = min(MAX_CLIENTS + MAX_OPEN_HANDSHAKES, files * 3 // 4)
        self._size_name: str | None = None
        self._server: Server | None = None
        self.address = listen.advertise
        """``host:port`` for the discovery record."""
        self.certificate = ""
        """SHA-256 of its certificate, in hexadecimal digits."""
        socket_owners.add(self)
        self._thread: Task = runtime.spawn(self._loop.run_forever, "opendata-buffer-broker-port")
        try:
            self._context, self.certificate = broker_context(listen.certificate, listen.key)
            self._call(self._start)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self._end_loop()
            raise InvalidInput(
                f"a broker cannot listen on {listen.host}:{listen.port}: {error}. Name another "
                "address with --listen, or another --tls-cert and --tls-key."
            ) from error

    def descriptors(self) -> list[int]:
        """Return the file descriptors of the port and of its clients."""
        server = self._server
        sockets = [] if server is None else list(server.sockets)
        for client in list(self._open):
            sockets.append(client.transport.get_extra_info("socket"))
        return [each.fileno() for each in sockets]

    def open(self, broker: Broker, broker_record: DiscoveryRecord) -> None:
        """Serve the clients of one term."""
        self._loop.call_soon_threadsafe(self._set_active, (broker, broker_record))

    def shut(self) -> None:
        """End all connections and refuse new clients; the port stays open."""
        with suppress(PermanentStorageError):
            self._call(self._shut)

    def close(self) -> None:
        """Close the port. May be repeated."""
        if self._loop.is_closed():
            return
        self.shut()
        self._call(self._stop)
        self._end_loop()

    def _call(self, work: Callable[[], Any]) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            done.result(10)
        except TimeoutError as error:
            raise PermanentStorageError("the broker's port does not answer its owner") from error

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _set_active(self, active: tuple[Broker, DiscoveryRecord] | None) -> None:
        self._active = active
        self._refused.clear()

    async def _start(self) -> None:
        port = self

        class CountedConnection(ServerConnection):
            """A connection with TLS that is counted from before its handshake."""

            tls: TlsTransport

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.tls = TlsTransport(cast(asyncio.Transport, transport), port._context)
                super().connection_made(cast(asyncio.Transport, self.tls))
                port._open.add(self)
                if len(port._open) > port._most_open:
                    self.transport.abort()

            def data_received(self, data: bytes) -> None:
                self.tls.received(data, super().data_received)

            def connection_lost(self, exc: Exception | None) -> None:
                port._open.discard(self)
                super().connection_lost(exc)

        self._size_name = _name_of_size()
        self._server = await serve(
            self._serve,
            self._listen.host,
            self._listen.port,
            # Keep messages small until a client has shown that it knows the secret.
            max_size=MAX_MESSAGE_BYTES if self._size_name is None else MAX_HANDSHAKE_BYTES,
            create_connection=CountedConnection,
            compression=None,
            # The time for TLS and HTTP. A client waits as long, which hundreds of clients need
            # that connect at the same time.
            open_timeout=CONNECT_S,
            close_timeout=1,
            ping_interval=PING_S,
            ping_timeout=PONG_S,
            max_queue=16,
            server_header=None,
            # The library logs each port scan; our log names each address once.
            logger=logging.getLogger("opendata_buffer.broker.websockets"),
        )
        host, number = self._listen.host, next(iter(self._server.sockets)).getsockname()[1]
        if host in ("0.0.0.0", "::"):
            host = own_address()
        self.address = self.address or f"{f'[{host}]' if ':' in host else host}:{number}"

    async def _shut(self) -> None:
        self._set_active(None)
        for client in list(self._clients):
            client.transport.abort()

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close(close_connections=True)
        await self._server.wait_closed()
        # A client that connected in the meantime would wait for an answer until its timeout.
        for client in list(self._open):
            client.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1)

    async def _serve(self, client: ServerConnection) -> None:
        active = self._active
        if active is None or len(self._clients) >= self._most_clients:
            await client.close(TRY_AGAIN_LATER)
            return
        broker, broker_record = active
        self._clients.add(client)
        try:
            await self._run_session(client, broker, broker_record)
        except ProtocolError as error:
            self._log_once(client, error)
            client.transport.abort()
        finally:
            self._clients.discard(client)

    async def _run_session(
        self, client: ServerConnection, broker: Broker, broker_record: DiscoveryRecord
    ) -> None:
        end = new_broker_end(broker, broker_record)
        outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        def put(body: dict[str, Any]) -> None:
            if outbox.qsize() >= QUEUED_ANSWERS:
                client.transport.abort()
            else:
                outbox.put_nowait(body)

        def send(body: dict[str, Any]) -> None:
            # RuntimeError: the loop was closed, and with it the client's connection.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(put, body)

        session = Session(broker, end, send)
        writer = None
        try:
            await client.send(end.hello())
            prove = await asyncio.wait_for(client.recv(decode=False), HANDSHAKE_S)
            session.admit(prove)
            if self._size_name is not None:
                setattr(client.protocol, self._size_name, MAX_MESSAGE_BYTES)
            writer = asyncio.create_task(_write(client, end, outbox))
            # Close the connection however the writer ends: a client cannot use it without answers.
            writer.add_done_callback(lambda _: client.transport.abort())
            while True:
                session.received(await client.recv(decode=False))
        except TimeoutError as error:
            raise ProtocolError("a client did not shake hands in time") from error
        except ConnectionClosed:
            pass
        finally:
            session.close()
            if writer is not None:
                writer.cancel()

    def _log_once(self, client: ServerConnection, error: ProtocolError) -> None:
        peer = str((client.remote_address or ("?",))[0])
        if peer not in self._refused and len(self._refused) < MAX_CLIENTS:
            self._refused.add(peer)
            log.warning(
                "refused a connection from %s; further ones are not logged: %s", peer, error
            )


def new_broker_end(broker: Broker, broker_record: DiscoveryRecord) -> BrokerEnd:
    """Return the broker's end of a new connection."""
    return BrokerEnd(
        broker_record.secret,
        broker_record.term,
        broker_record.certificate,
        secrets.token_bytes(NONCE_BYTES),
        broker.runtime.ulid(),
    )


socket_owners: WeakSet[_WebSocketChannel | WebSocketPort] = WeakSet()


def _close_sockets() -> None:
    """Close this process's copies of the broker's sockets in a child that was forked.

    If the child kept them, they would seem alive after the parent is killed, and would accept
    connections that no process serves.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for owner in list(socket_owners):
            for descriptor in owner.descriptors():
                if descriptor >= 0:
                    # Replace the descriptor instead of closing it: the socket object in the child
                    # would later close this number, which may be another file's by then.
                    os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)
    socket_owners.clear()


os.register_at_fork(after_in_child=_close_sockets)


def own_address() -> str:
    """Return this machine's address towards other networks; the loopback address without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A datagram socket sends nothing on connect: the kernel only chooses the route. The
            # address belongs to a network that is reserved for documentation.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _name_of_size() -> str | None:
    """Return the attribute that limits a connection's messages, to be raised later.

    It is documented as an argument only, and its name changed between versions.

    Returns:
        None if the attribute is not known.
    """
    protocol = ServerProtocol(max_size=1)
    names = ("max_message_size", "max_size")
    return next((name for name in names if getattr(protocol, name, None) == 1), None)


async def _write(
    client: ServerConnection, end: BrokerEnd, outbox: asyncio.Queue[dict[str, Any]]
) -> None:
    try:
        while True:
            await client.send(end.encode(await outbox.get()))
    except ConnectionClosed:
        pass
    except ProtocolError as error:
        log.error("an answer is not sent, and its client disconnected: %s", error)
