"""WebSocket channels to brokers."""

from __future__ import annotations

import hashlib
import os
import secrets
import ssl
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from opendata_buffer.broker.channel import MAX_MESSAGE_BYTES, NONCE_BYTES
from opendata_buffer.broker.client import (
    CONNECT_S,
    Channel,
    ChannelClosed,
    ChannelRefused,
    Connection,
)
from opendata_buffer.broker.lease import DiscoveryRecord
from opendata_buffer.late import late_imports
from opendata_buffer.runtime import Runtime

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection


__all__ = ["SocketOwner", "connect", "dial", "give_up_in_children", "load_websockets"]


# ---- A forked child gives up the sockets of the process that forked it. ----
#
# The kernel closes a connection, or a port, when its last holder does. A child that kept its
# parent's would make a parent that was killed look alive: its clients would wait for a word of it
# instead of seeing the connection end, and its port would take connections that nobody serves.


class SocketOwner(Protocol):
    """An object that has sockets."""

    def descriptors(self) -> Iterable[int]:
        """The file descriptors of its sockets now; a negative one is closed. Takes no lock."""
        ...


_owners: WeakSet[SocketOwner] = WeakSet()


def give_up_in_children(owner: SocketOwner) -> None:
    """A child that is forked from now on does not keep the sockets of ``owner``."""
    _owners.add(owner)


def _give_up() -> None:
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for owner in list(_owners):
            for descriptor in owner.descriptors():
                if descriptor >= 0:
                    # Replaced and not closed: the socket's object in the child, which knows of
                    # nothing, would later close a number that means something else by then.
                    os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)
    _owners.clear()


# ---- Loads all of websockets at once. ----
#
# A process that hosts a broker dials from one thread while it opens its port in another: both want
# modules of one package at the same moment.


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_give_up)


def load_websockets() -> None:
    """Import all that websockets and the connections through it use; cheap when it is done.

    Raises:
        ImportError: The extra ``broker`` is not installed.
    """
    with late_imports():
        # The standard library imports the codec of host names when the first one is looked up.
        import encodings.idna  # noqa: F401

        import websockets.asyncio.server
        import websockets.exceptions
        import websockets.sync.client  # noqa: F401


# ---- Opens WebSocket channels to brokers. Needs the extra ``broker``. ----


def connect(announcement: DiscoveryRecord, runtime: Runtime) -> Connection:
    """A connection to the announced broker.

    Raises:
        ChannelClosed: It cannot be reached within :data:`CONNECT_S`, or says nothing.
        ProtocolError: Who answers is not the announced broker.
    """
    channel = dial(announcement, CONNECT_S)
    return Connection(channel, announcement, runtime, secrets.token_bytes(NONCE_BYTES))


def dial(announcement: DiscoveryRecord, timeout: float) -> Channel:
    """A channel to the announced address, within ``timeout`` seconds.

    Raises:
        ChannelRefused: Nobody listens there.
        ChannelClosed: It cannot be reached.
    """
    load_websockets()
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect as open_socket

    scheme = "wss" if announcement.certificate else "ws"
    stack = ExitStack()
    try:
        socket = stack.enter_context(
            open_socket(
                f"{scheme}://{announcement.address}/",
                ssl=_context() if announcement.certificate else None,
                open_timeout=timeout,
                close_timeout=0.2,
                ping_interval=None,
                max_size=MAX_MESSAGE_BYTES,
                compression=None,
                proxy=None,
            )
        )
    except ConnectionRefusedError as error:
        raise ChannelRefused(f"nobody listens at {announcement.address}") from error
    except (OSError, ValueError, RuntimeError, WebSocketException) as error:
        # TimeoutError and ssl.SSLError are OSErrors; a ValueError says that the address is none,
        # a RuntimeError that no thread is left for the connection.
        raise ChannelClosed(f"{announcement.address} is not reached: {error}") from error
    if announcement.certificate:
        _check_certificate(socket, announcement.certificate)
    return _WebSocketChannel(socket, stack)


class _WebSocketChannel:
    """A :class:`Channel` over a WebSocket."""

    def __init__(self, socket: ClientConnection, stack: ExitStack) -> None:
        self._socket = socket
        self._stack = stack
        give_up_in_children(self)

    def descriptors(self) -> list[int]:
        """The file descriptor of the connection."""
        return [self._socket.socket.fileno()]

    def send(self, message: bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(message)
        except (ConnectionClosed, OSError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None) -> bytes | None:
        from websockets.exceptions import ConnectionClosed

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
    # The announcement names the one certificate that is right; no authority and no host name
    # could say it better.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _check_certificate(socket: ClientConnection, expected: str) -> None:
    transport = socket.socket
    shown = transport.getpeercert(binary_form=True) if isinstance(transport, ssl.SSLSocket) else b""
    if hashlib.sha256(shown or b"").hexdigest() != expected:
        socket.close_socket()
        raise ChannelClosed("the port shows another certificate than the announced one")
