"""How a process reaches brokers, and becomes one. Needs the extra ``broker`` when it is used."""

from __future__ import annotations

from typing import Protocol

from opendata_buffer.broker.announcement import Announcement
from opendata_buffer.broker.client import Connection
from opendata_buffer.broker.host import ListeningPort
from opendata_buffer.broker.server import Listen
from opendata_buffer.errors import InvalidInput
from opendata_buffer.runtime import Runtime

__all__ = ["Network", "WebSocketNetwork", "websockets_installed"]


class Network(Protocol):
    """Connections to brokers, and a port for a broker of this process."""

    def connect(self, announcement: Announcement) -> Connection:
        """A connection to the announced broker.

        Raises:
            ChannelClosed: It is not reached.
            ProtocolError: Who answers is not the announced broker.
        """
        ...

    def listen(self) -> ListeningPort:
        """A port of this process.

        Raises:
            InvalidInput: The address cannot be used.
        """
        ...


class WebSocketNetwork:
    """The real network.

    Args:
        runtime: Clock and threads.
        listen: Where a broker of this process listens.
    """

    def __init__(self, runtime: Runtime, listen: Listen | None = None) -> None:
        self._runtime = runtime
        self._listen = listen if listen is not None else Listen()

    def connect(self, announcement: Announcement) -> Connection:
        """See :class:`Network`."""
        from opendata_buffer.broker.dial import connect

        return connect(announcement, self._runtime)

    def listen(self) -> ListeningPort:
        """See :class:`Network`."""
        from opendata_buffer.broker.server import WebSocketPort

        if not websockets_installed():
            raise InvalidInput(
                "a broker needs the package websockets: pip install 'opendata-buffer[broker]'"
            )
        return WebSocketPort(self._listen, self._runtime)


def websockets_installed() -> bool:
    """Whether the extra ``broker`` is there."""
    from importlib.util import find_spec

    return find_spec("websockets") is not None
