"""How a process reaches brokers, and becomes one. Needs the extra ``broker`` when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from opendata_buffer.broker.client import (
    Connection,
)
from opendata_buffer.broker.lease import DiscoveryRecord
from opendata_buffer.broker.ws_client import connect
from opendata_buffer.errors import InvalidInput
from opendata_buffer.late import late_imports
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

if TYPE_CHECKING:
    from opendata_buffer.broker.election import ListeningPort
    from opendata_buffer.broker.server import Listen

__all__ = [
    "Network",
    "WebSocketNetwork",
    "listen_for",
    "require_websockets",
    "websockets_installed",
]


_ONE_MACHINE = ("file", "memory")


class Network(Protocol):
    """Connections to brokers, and a port for a broker of this process."""

    def connect(self, announcement: DiscoveryRecord) -> Connection:
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
        self._listen = listen

    def connect(self, announcement: DiscoveryRecord) -> Connection:
        """See :class:`Network`."""
        return connect(announcement, self._runtime)

    def listen(self) -> ListeningPort:
        """See :class:`Network`."""
        require_websockets()
        with late_imports():
            from opendata_buffer.broker.server import Listen, WebSocketPort

        return WebSocketPort(self._listen or Listen(), self._runtime)


def listen_for(store: Store) -> Listen:
    """Where a broker listens that was told nothing else: whoever reaches the store reaches it.

    A loopback address in the announcement of a queue that machines share would mean another
    process on each of them: refused there, the broker would be taken for dead.
    """
    with late_imports():
        from opendata_buffer.broker.server import Listen

    on_one_machine = store.url.partition("://")[0] in _ONE_MACHINE
    return Listen() if on_one_machine else Listen(host="0.0.0.0")


def require_websockets() -> None:
    """Raises :class:`InvalidInput`, with what to install, without the extra ``broker``."""
    if not websockets_installed():
        raise InvalidInput(
            "a broker needs the package websockets: pip install 'opendata-buffer[broker]'"
        )


def websockets_installed() -> bool:
    """Whether the extra ``broker`` is there."""
    from importlib.util import find_spec

    return find_spec("websockets") is not None
