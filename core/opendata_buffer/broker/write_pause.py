"""Asks a queue's broker for a pause when this process writes the manifest itself.

Some writes are not the broker's to make. Whether Spark's sink appends a micro-batch depends on
the manifest at that instant, so the sink reads, decides and writes. Against a broker that writes
from memory it would lose every race. So it sends the broker one request, ``pause``. The broker
finishes the write under way, answers ``given``, and writes nothing for the time of a read and a
write and a half (:mod:`opendata_buffer.producer.write_fairness`). Nothing is held and nothing has
to be ended. Only time depends on the pause: both sides write by compare-and-swap.
"""

from __future__ import annotations

import logging
import os
import weakref

from opendata_buffer.broker.client import Lost
from opendata_buffer.broker.discovery import Discovery
from opendata_buffer.broker.network import Network, WebSocketNetwork
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.runtime import Runtime, remaining

log = logging.getLogger(__name__)

FIND_S = 1.0
"""Seconds that a change waits while a broker is searched for; then it goes on without a pause."""

ASK_S = 5.0
"""Seconds that it waits for a live broker that writes or pauses for other clients. A broker
that sends nothing is given up after 1.5 seconds."""

SEARCH_S = 1.0
"""Seconds between two searches for a broker after one was lost."""

IDLE_SEARCH_S = 10.0
"""Seconds between two searches where none was found."""


class BrokerPause:
    """A :class:`~opendata_buffer.queue.queue.WritePause` of the announced broker.

    Where no broker is announced, or it does not answer, a change is made without a pause.

    Args:
        store: Where the queue lives.
        config: The queue.
        runtime: Clock and threads.
        network: How brokers are reached; WebSockets by default.
    """

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        *,
        network: Network | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._connect = (network or WebSocketNetwork(runtime)).connect
        self._pid = os.getpid()
        self._discovery = self._new_discovery()
        self._search_at = float("-inf")

    @property
    def is_connected(self) -> bool:
        """See :class:`.WritePause`."""
        self._start_over_in_child()
        return self._discovery.connection is not None

    def ask(self, writes: int) -> bool:
        """See :class:`.WritePause`."""
        self._start_over_in_child()
        connection = self._discovery.find(self._is_time, self._plan_next_search)
        if connection is None:
            return False
        left = remaining()
        asked = {"op": "pause", "writes": writes}
        answer = connection.ask(asked, ASK_S if left is None else min(ASK_S, left))
        if isinstance(answer, dict):
            return True
        if connection.is_over or not isinstance(answer, Lost):
            log.warning("the broker does not pause: going on without it (%s)", answer)
            self._discovery.forget(connection, unresponsive=isinstance(answer, Lost))
            self._search_at = self._runtime.monotonic() + SEARCH_S
        return False

    def close(self) -> None:
        """See :class:`.WritePause`."""
        self._start_over_in_child()
        connection = self._discovery.connection
        if connection is not None:
            self._discovery.forget(connection)

    def _new_discovery(self) -> Discovery:
        made = Discovery(self._store, self._config, self._runtime, self._connect, waits_s=FIND_S)
        # The thread that reads a connection keeps it open, also when the queue that uses it was
        # dropped without close().
        weakref.finalize(self, _abandon, made).atexit = False
        return made

    def _start_over_in_child(self) -> None:
        """In a forked child the thread that reads the connection, and may have held its locks, is
        missing."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._discovery = self._new_discovery()
            self._search_at = float("-inf")

    def _is_time(self) -> bool:
        return self._runtime.monotonic() >= self._search_at

    def _plan_next_search(self) -> None:
        # A connection that ends by itself has a successor within seconds.
        found = self._discovery.connection is not None
        self._search_at = self._runtime.monotonic() + (SEARCH_S if found else IDLE_SEARCH_S)


def _abandon(discovery: Discovery) -> None:
    connection = discovery.connection
    if connection is not None:
        connection.abandon()
