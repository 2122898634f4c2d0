"""Finds a queue's broker, and keeps the connection to it for appends, workers and pauses.

The search runs in a thread of its own: a busy broker takes longer than an append should wait.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial

from opendata_buffer.broker.client import ChannelClosed, Connection, Lost
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.broker.network import Network, WebSocketNetwork
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.runtime import Runtime, remaining, wait_for

log = logging.getLogger(__name__)

FIND_S = 1.0
"""Seconds that an append or a change waits while a broker is searched for; then this process makes
it alone."""

ASK_S = 5.0
"""Seconds that it waits for a live broker that writes or pauses for other clients. A broker
that sends nothing is given up after 1.5 seconds."""

SEARCH_S = 1.0
"""Seconds between two searches for a broker after one was lost."""

IDLE_SEARCH_S = 10.0
"""Seconds between two searches where none was found."""


class Discovery:
    """One connection to the broker of a queue, for all threads of a process. Thread-safe.

    :meth:`find` waits ``waits_s`` seconds at most, and not at all if the last search did not reach
    the announced broker. With None it waits until the search is over. After each search
    ``next_search_s`` is called with what was found: no search begins for so many seconds.
    """

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        connect: Callable[[DiscoveryRecord], Connection],
        *,
        waits_s: float | None = None,
        next_search_s: Callable[[Connection | None], float] = lambda found: 0.0,
    ) -> None:
        self._connect = connect
        self._store, self._config = store, config
        self._runtime = runtime
        self._waits_s = waits_s
        self._next_search_s = next_search_s
        self.search_at = float("-inf")
        """No search begins before this, monotonic seconds."""
        self._wait_until: float | None = None
        self._unreached = False
        self._condition = runtime.condition()
        self._connection: Connection | None = None
        self._silent: DiscoveryRecord | None = None
        self._beat: int | None = None
        self._searching: object | None = None
        self.is_closed = False
        self.announced = False
        """Whether the last search found a broker announced, or failed."""
        self.reason = ""
        """Why the last search found none."""

    @property
    def connection(self) -> Connection | None:
        """The connection there is, if it has not ended."""
        connection = self._connection
        return None if connection is None or connection.is_over else connection

    def find(self) -> Connection | None:
        """The connection to use, or None. One thread searches, the others wait for what it
        finds."""
        search = object()
        try:
            with self._condition:
                if not self._await_search():
                    return None
                if self.connection is not None or self._runtime.monotonic() < self.search_at:
                    return self.connection
                self._searching = search
                self._wait_until = None
                if self._waits_s is not None:
                    wait_s = 0.0 if self._unreached else self._waits_s
                    self._wait_until = self._runtime.monotonic() + wait_s
            search_for_all = partial(self._search_for_all, search)
            try:
                self._runtime.spawn(search_for_all, "opendata-buffer-broker-finder")
            except RuntimeError:
                # No thread is left, or the interpreter ends and starts none.
                search_for_all()
        except BaseException:
            # Ctrl-C: whether a thread searches is not known, and the others would wait for ever.
            with self._condition:
                if self._searching is search:
                    self._searching = None
                    self._condition.notify_all()
            raise
        with self._condition:
            return self.connection if self._await_search() else None

    def _await_search(self) -> bool:
        """With the lock: whether no search is under way any more, after waiting for it."""
        has_ended = wait_for(
            self._runtime,
            self._condition,
            lambda: self.is_closed or not self._searching,
            until=self._wait_until,
        )
        return has_ended and not self.is_closed

    def _search_for_all(self, search: object) -> None:
        connection = None
        try:
            connection = self._search()
        finally:
            with self._condition:
                is_awaited = self._searching is search
                if connection is not None and (self.is_closed or not is_awaited):
                    connection.close()
                    connection = None
                if is_awaited:
                    self._searching, self._connection = None, connection
                    self.search_at = self._runtime.monotonic() + self._next_search_s(connection)
                    self._condition.notify_all()

    def forget(self, connection: Connection, *, unresponsive: bool = False) -> None:
        """Use a connection no more. An ``unresponsive`` broker may be suspended, and would still
        accept connections: it is asked again once it has renewed its record."""
        connection.close()
        with self._condition:
            if self._connection is connection:
                self._connection = None
                if unresponsive:
                    self._silent, self._beat = connection.broker_record, None

    def close(self) -> Connection | None:
        """Stop searching; returns the connection, which the caller closes. Free to repeat."""
        with self._condition:
            self.is_closed = True
            connection, self._connection = self._connection, None
            self._condition.notify_all()
        return connection

    def _search(self) -> Connection | None:
        self.announced, self.reason = True, ""
        try:
            # A search that was given up may go on beside this one, and no two may use one lease.
            found = Lease(self._store, self._config, self._runtime).read()
            if found is None or not found.serves:
                self.announced = found is not None
                no_broker = "none is announced; start one, or use broker='host'"
                self.reason = no_broker if found is None else found.fault or no_broker
                return None
            if self._is_silent(found):
                self.reason = f"{found.address} has not renewed its record"
                return None
            connection = self._connect(found)
            try:
                connection.show_may_write(self._store, self._config.manifest_path)
            except BaseException:
                connection.close()
                raise
        except (ChannelClosed, OpenDataBufferError) as error:
            self.reason = str(error)
            self._unreached = True
            log.warning("no broker is reached: %s", error)
            return None
        self._silent = None
        self._unreached = False
        return connection

    def _is_silent(self, found: DiscoveryRecord) -> bool:
        if self._silent is None or not self._silent.same_broker(found):
            return False
        if self._beat is None:
            self._beat = found.beat  # As of the first search after it was lost.
        return found.beat == self._beat


class BrokerPause:
    """A :class:`~opendata_buffer.queue.queue.WritePause` of the announced broker, where
    this process writes the manifest itself.

    A process that reads, decides and then writes would lose every race against a broker that writes
    from memory. So it asks the broker to write nothing for a time (:class:`.WriteFairness`). Where
    none is announced, or it does not answer, a change is made without a pause, and takes longer.
    """

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        *,
        network: Network | None = None,
    ) -> None:
        self._runtime = runtime
        self._new_discovery = partial(
            Discovery,
            store,
            config,
            runtime,
            (network or WebSocketNetwork(runtime)).connect,
            waits_s=FIND_S,
            # A connection that ends by itself has a successor within seconds.
            next_search_s=lambda found: IDLE_SEARCH_S if found is None else SEARCH_S,
        )
        self._discovery_of: tuple[int, Discovery] | None = None  # its process, and what it uses

    @property
    def is_connected(self) -> bool:
        """See :class:`.WritePause`."""
        return self._discovery.connection is not None

    def ask(self, writes: int) -> bool:
        """See :class:`.WritePause`."""
        connection = self._discovery.find()
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
            self._discovery.search_at = self._runtime.monotonic() + SEARCH_S
        return False

    def close(self) -> None:
        """See :class:`.WritePause`."""
        connection = self._discovery.connection
        if connection is not None:
            self._discovery.forget(connection)

    @property
    def _discovery(self) -> Discovery:
        # In a forked child the thread that reads, and may have held its locks, is missing.
        if self._discovery_of is None or self._discovery_of[0] != os.getpid():
            self._discovery_of = os.getpid(), self._new_discovery()
            # The thread that reads a connection keeps it open, also when the queue that uses it was
            # dropped without close().
            weakref.finalize(self, _abandon, self._discovery_of[1]).atexit = False
        return self._discovery_of[1]


def _abandon(discovery: Discovery) -> None:
    connection = discovery.connection
    if connection is not None:
        connection.abandon()
