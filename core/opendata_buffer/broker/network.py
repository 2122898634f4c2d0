"""How processes reach a broker: connections over WebSockets, and a port for a broker."""

from __future__ import annotations

import hashlib
import secrets
import ssl
from contextlib import ExitStack
from typing import Protocol

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync import client as websockets_client

from opendata_buffer.broker.broker import Broker
from opendata_buffer.broker.client import (
    CONNECT_S,
    Channel,
    ChannelClosed,
    ChannelRefused,
    Connection,
)
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.secure_channel import MAX_MESSAGE_BYTES, NONCE_BYTES
from opendata_buffer.broker.server import Listen, WebSocketPort, close_in_children, own_address
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store


class ListeningPort(Protocol):
    """Where clients connect to a broker."""

    certificate: str

    @property
    def address(self) -> str:
        """``host:port`` for the discovery record."""
        ...

    def open(self, broker: Broker, broker_record: DiscoveryRecord) -> None:
        """Serve the clients of one term."""
        ...

    def shut(self) -> None:
        """End the connections and serve no client; the port stays open."""
        ...

    def close(self) -> None:
        """Close the port."""
        ...


class Network(Protocol):
    """Connections to brokers, and a port for a broker of this process."""

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        """A connection to the announced broker. Raises ChannelClosed where it is not reached,
        ProtocolError where another process answers."""
        ...

    def listen(self) -> ListeningPort:
        """A port of this process. Raises InvalidInput where the address cannot be used."""
        ...


class WebSocketNetwork:
    """The real network; ``listen`` is where a broker of this process listens."""

    def __init__(self, runtime: Runtime, listen: Listen | None = None) -> None:
        self._runtime = runtime
        self._listen = listen or Listen()

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        """See :class:`Network`. It takes :data:`.CONNECT_S` at most."""
        channel = open_channel(broker_record, CONNECT_S)
        random = secrets.token_bytes(NONCE_BYTES)
        return Connection(channel, broker_record, self._runtime, random)

    def listen(self) -> ListeningPort:
        """See :class:`Network`."""
        return WebSocketPort(self._listen, self._runtime)


def listen_for(store: Store) -> Listen:
    """Where a broker listens by default: at the address that it announces, and no other.

    A loopback address in the record of a queue that machines share would mean another process on
    each of them: refused there, the broker would be replaced.
    """
    on_one_machine = store.url.startswith(("file://", "memory://"))
    return Listen() if on_one_machine else Listen(host=own_address())


def open_channel(broker_record: DiscoveryRecord, timeout: float) -> Channel:
    """A channel to the announced address, within ``timeout`` seconds. Raises ChannelRefused where
    no process listens there, ChannelClosed where it is not reached."""
    scheme = "wss" if broker_record.certificate else "ws"
    stack = ExitStack()
    try:
        socket = stack.enter_context(
            websockets_client.connect(
                f"{scheme}://{broker_record.address}/",
                ssl=_context() if broker_record.certificate else None,
                open_timeout=timeout,
                close_timeout=0.2,
                ping_interval=None,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )
        )
    except ConnectionRefusedError as error:
        raise ChannelRefused(f"no process listens at {broker_record.address}") from error
    except (OSError, ValueError, RuntimeError, WebSocketException) as error:
        # TimeoutError and ssl.SSLError are OSErrors; a ValueError says that the address is not
        # valid, a RuntimeError that no thread is left for the connection.
        raise ChannelClosed(f"{broker_record.address} is not reached: {error}") from error
    if broker_record.certificate:
        _check_certificate(socket, broker_record.certificate)
    return _WebSocketChannel(socket, stack)


class _WebSocketChannel:
    """A :class:`Channel` over a WebSocket."""

    def __init__(self, socket: websockets_client.ClientConnection, stack: ExitStack) -> None:
        self._socket = socket
        self._stack = stack
        close_in_children(self)

    def descriptors(self) -> list[int]:
        """The file descriptor of the connection."""
        return [self._socket.socket.fileno()]

    def send(self, message: bytes) -> None:
        try:
            self._socket.send(message)
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None) -> bytes | None:
        try:
            message = self._socket.recv(timeout)
        except TimeoutError:
            return None
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(str(error)) from error
        return message if isinstance(message, bytes) else message.encode()

    def close(self) -> None:
        # First without the closing handshake: a suspended broker would not answer it.
        self._socket.close_socket()
        self._stack.close()


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The discovery record names the one right certificate; neither an authority nor a host name
    # could say it better.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _check_certificate(socket: websockets_client.ClientConnection, expected: str) -> None:
    transport = socket.socket
    shown = transport.getpeercert(binary_form=True) if isinstance(transport, ssl.SSLSocket) else b""
    if hashlib.sha256(shown or b"").hexdigest() != expected:
        socket.close_socket()
        raise ChannelClosed("the port shows another certificate than the announced one")
