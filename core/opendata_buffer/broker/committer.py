"""Use a queue's broker from another process: find it, append through it, and ask it for pauses.

A producer should append through the broker while a broker serves, and must go on without it at
other times. This module makes that choice for each append. It reads the discovery record, connects
to the broker that it names, and sends it the entries. Without a broker it appends directly::

    broker announced and reached     send the entries, wait for the sequence
    none announced, or not reached   append to the manifest directly, search again later
    broker moved                     find the next broker, send the same entries
    no answer                        wait, then search for the entries while appending again

One connection serves appends, workers and pauses. A thread searches for the broker in the
background, because a busy broker takes longer to connect to than an append should wait.

**Things that can go wrong:**

* The broker gives no answer to an append. The entries may be in the queue, or may still be written.
  The committer waits until the broker cannot begin a write of them any more
  (:mod:`opendata_buffer.broker.protocol` says how it knows). Then it asks the broker that is
  announced now, or appends directly. Either way, the next write first searches for the entries in
  the manifest that its own compare-and-swap replaces. So they are appended once.
* A later attempt fails with an error that means "nothing was appended". This is true of that
  attempt, and says nothing about the first one. Such an error is never passed on to the producer,
  because the producer would then append a second time.
* A broker is suspended. Its port still accepts connections, so it is only asked again after it has
  renewed its record.
* A process that asks for pauses forks. The child does not have the thread that reads from the
  connection, so :class:`BrokerPause` opens a new connection there.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from opendata_buffer import errors
from opendata_buffer.broker.broker import find_earlier_attempt
from opendata_buffer.broker.client import ChannelClosed, Connection, DiscoveryRecord, Lease, Lost
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork, listen_for
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.producer.committer import Committer
from opendata_buffer.producer.sharing import committer_key, share, shared_committer
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import WARN_S, Queue
from opendata_buffer.runtime import Interval, Runtime, remaining, wait_for
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

FIND_S = 1.0
"""Seconds that an append or a change waits for the search for a broker. After that, this process
writes the manifest itself."""

ASK_S = 5.0
"""Seconds to wait for a live broker that is writing, or pausing for other clients. A broker that
sends nothing is given up after 1.5 seconds."""

SEARCH_S = 1.0
"""Seconds between two searches for a broker after one was lost."""

IDLE_SEARCH_S = 10.0
"""Seconds between two searches when the last one found no broker."""


class Discovery:
    """One connection to the broker of a queue, for all threads of a process. Thread-safe.

    Args:
        store: The queue's store.
        config: The queue's settings.
        runtime: Clock and threads.
        connect: Connects to the broker that a record names.
        waits_s: Most seconds that :meth:`find` waits for a search. It does not wait if the last
            search did not reach the announced broker. None waits until the search is over.
        next_search_s: Called after each search with the connection that it found, or None. Returns
            the seconds until the next search may begin.
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
        """No search begins before this time, monotonic seconds."""
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
        """Why the last search found no broker."""

    @property
    def connection(self) -> Connection | None:
        """The current connection; None without one, or if it has ended."""
        connection = self._connection
        return None if connection is None or connection.is_over else connection

    def find(self) -> Connection | None:
        """Return the connection to use, after a search if one is due.

        One thread searches, and the others wait for its result.

        Returns:
            None when no broker was found in time, or this object was closed.
        """
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
                # No thread is left, or the interpreter is ending and cannot start one.
                search_for_all()
        except BaseException:
            # Ctrl-C. It is not known whether a thread searches, and the others would wait for ever.
            with self._condition:
                if self._searching is search:
                    self._searching = None
                    self._condition.notify_all()
            raise
        with self._condition:
            return self.connection if self._await_search() else None

    def _await_search(self) -> bool:
        """Wait, with the lock, until no search runs. Return False if one still runs, or closed."""
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
        """Stop using a connection, and close it.

        Args:
            connection: The connection.
            unresponsive: Whether the broker gave no answer. It may be suspended, and would still
                accept connections. It is asked again only once it has renewed its record.
        """
        connection.close()
        with self._condition:
            if self._connection is connection:
                self._connection = None
                if unresponsive:
                    self._silent, self._beat = connection.broker_record, None

    def close(self) -> Connection | None:
        """Stop searching. May be repeated.

        Returns:
            The connection, which the caller has to close.
        """
        with self._condition:
            self.is_closed = True
            connection, self._connection = self._connection, None
            self._condition.notify_all()
        return connection

    def _search(self) -> Connection | None:
        self.announced, self.reason = True, ""
        try:
            # A search that was given up may still run next to this one, and a lease must not be
            # shared between threads.
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
        except (ChannelClosed, errors.OpenDataBufferError) as error:
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
            self._beat = found.beat  # As found by the first search after the broker was lost.
        return found.beat == self._beat


class BrokerPause:
    """A :class:`~opendata_buffer.queue.queue.WritePause` of the announced broker.

    It is for a process that writes the manifest itself. Such a process reads, decides and then
    writes, so it would lose every race against a broker that writes from memory. It therefore asks
    the broker to write nothing for a time (:class:`.WriteFairness`). If no broker is announced, or
    it does not answer, the change is made without a pause, and takes longer.

    Args:
        store: The queue's store.
        config: The queue's settings.
        runtime: Clock and threads.
        network: Connects to the broker. Default: WebSockets.
    """

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        *,
        network: WebSocketNetwork | None = None,
    ) -> None:
        self._runtime = runtime
        self._new_discovery = partial(
            Discovery,
            store,
            config,
            runtime,
            (network or WebSocketNetwork(runtime)).connect,
            waits_s=FIND_S,
            # If a connection ends on its own, there is another broker within seconds.
            next_search_s=lambda found: IDLE_SEARCH_S if found is None else SEARCH_S,
        )
        self._discovery_of: tuple[int, Discovery] | None = None  # the process id comes first

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
        # A forked child has no thread that reads, and that thread may have held locks.
        if self._discovery_of is None or self._discovery_of[0] != os.getpid():
            self._discovery_of = os.getpid(), self._new_discovery()
            # The thread that reads a connection keeps it open, even when the queue that uses it
            # was dropped without close().
            weakref.finalize(self, _abandon, self._discovery_of[1]).atexit = False
        return self._discovery_of[1]


def _abandon(discovery: Discovery) -> None:
    connection = discovery.connection
    if connection is not None:
        connection.abandon()


OFTEN_S = 0.5
"""Seconds between two searches during the first :data:`.IDLE_SEARCH_S` after a broker was lost."""

MOVED_S = 0.1
"""Seconds of a pause after a broker that is leaving refused an append."""

STOP_S = 5.0
"""Seconds that the last caller waits until this process's broker has left its record."""

NEVER = float("inf")


class BrokeredCommitter(Committer):
    """The committer of all producers of a process for one queue, which uses the queue's broker.

    Thread-safe. Made by :func:`open_brokered_committer`.
    """

    def __init__(
        self,
        store: Store,
        config: ProducerConfig,
        runtime: Runtime,
        claim: QueueClaim | None,
        network: WebSocketNetwork,
        open_alone: Callable[[], Committer],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(runtime, on_end)
        self._store = store
        self._config = config
        self._claim = claim
        self._runtime = runtime
        self._network = network
        self._open_alone = open_alone
        self._alone: Committer
        self._election: LeaderElection | None = None
        self._discovery = Discovery(
            store,
            config,
            runtime,
            network.connect,
            waits_s=FIND_S,
            next_search_s=self._next_search_s,
        )
        # Whether a broker is certain to appear, because this process hosts one.
        self._expects = config.broker == "host"
        self._search_often_until = runtime.monotonic() + IDLE_SEARCH_S if self._expects else 0.0
        self._conflicts = 0
        self._asked = 0
        self._warnings = Interval(runtime, WARN_S)

    def _begin(self) -> None:
        if self._config.broker == "host":
            self._election = LeaderElection(self._store, self._config, self._runtime, self._network)
        self._alone = self._open_alone()
        self.tag = self._alone.tag

    @property
    def attempts(self) -> int:
        """See :class:`Committer`; each append that was sent to a broker counts as one."""
        return self._alone.attempts + self._asked

    @property
    def conflicts(self) -> int:
        """See :class:`Committer`; counts only the appends that this process made directly."""
        return self._alone.conflicts

    def pause(self) -> float:
        """See :class:`Committer`."""
        return self._alone.pause() if self._discovery.connection is None else 0.0

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """See :class:`Committer`."""
        doubt: Lost | None = None
        while True:
            connection = self._find() if self._runtime.monotonic() < begin_by else None
            if connection is None:
                return self._append_alone(entries, begin_by, doubt)
            since = None if doubt is None else doubt.since
            self._asked += 1
            try:
                answer = connection.append(entries, since=since, begin_by=begin_by)
            except errors.OpenDataBufferError as error:
                if doubt is None:
                    raise
                self._retry_or_raise(error, entries, begin_by, doubt)
                continue
            match answer:
                case int():
                    return answer
                case Lost():
                    # Keep the first `since`: that is where the first attempt may have landed.
                    doubt = Lost(answer.since if since is None else since, answer.safe_at)
                    if connection.is_over:
                        self._forget(connection, unresponsive=True)
                    self._runtime.sleep(max(0.0, doubt.safe_at - self._runtime.monotonic()))
                case _ if answer.why in ("expired", "late"):
                    pass  # The answer carried the broker's clock, and the next request sends it.
                case _ if answer.why == "large":
                    return self._append_alone(entries, begin_by, doubt)
                case _ if answer.why == "busy":
                    self._runtime.sleep(OFTEN_S)
                case _:
                    self._forget(connection)
                    if answer.why == "moved":
                        # The record may still name this broker. Without a pause its clients would
                        # come back to it as fast as they can.
                        self._runtime.sleep(MOVED_S)

    def _end(self) -> None:
        connection = self._discovery.close()
        if connection is not None:
            connection.close()
        self._alone.close()
        if self._election is not None:
            self._election.stop(STOP_S)

    def _append_alone(
        self, entries: Sequence[NewEntry], begin_by: float, doubt: Lost | None
    ) -> int:
        if doubt is None:
            return self._alone.append(entries, begin_by=begin_by)
        # Use a separate queue: the shared committer would put these entries into one write with
        # appends that do not have this guard.
        queue = Queue(
            self._store, self._config, runtime=self._runtime, role="producer", claim=self._claim
        )
        error: errors.OpenDataBufferError | None = None
        while self._runtime.monotonic() < begin_by:
            try:
                guard = find_earlier_attempt(queue, entries, doubt.since)
                return queue.append(entries, guard=guard)
            except errors.OpenDataBufferError as failed:
                self._retry_or_raise(failed, entries, begin_by, doubt)
                error = failed
        raise self._unknown(entries, doubt, "the broker gave no answer in time") from error

    def _retry_or_raise(
        self,
        error: errors.OpenDataBufferError,
        entries: Sequence[NewEntry],
        begin_by: float,
        doubt: Lost,
    ) -> None:
        """Wait after an error of a later attempt, or raise if it must not be repeated.

        "Nothing was appended" is true of that attempt only. If it were passed on, the producer
        would append a second time.

        Raises:
            CommitStateUnknown: The append cannot be tried again, and the first attempt may have
                landed.
        """
        if isinstance(error, errors.CommitStateUnknown):
            raise error
        again = isinstance(error, errors.Conflict | errors.QueueFull | errors.TransientStorageError)
        if not again or self._runtime.monotonic() + OFTEN_S >= begin_by:
            raise self._unknown(entries, doubt, str(error).rstrip(".")) from error
        if self._warnings.is_due():
            log.warning("an append with an unknown outcome is searched for again: %s", error)
        self._runtime.sleep(OFTEN_S)

    def _unknown(
        self, entries: Sequence[NewEntry], doubt: Lost, reason: str
    ) -> errors.CommitStateUnknown:
        locations = tuple(entry.location for entry in entries)
        return errors.CommitStateUnknown(
            self._config.manifest_path, doubt.since, locations, None, reason
        )

    def _find(self) -> Connection | None:
        """Return the connection to use; None to append directly."""
        if self._alone.conflicts > self._conflicts:
            # Another process also appends, so there may be a broker by now.
            self._conflicts = self._alone.conflicts
            if self._discovery.search_at == NEVER:
                self._discovery.search_at = 0.0
        before = self._discovery.connection
        found = self._discovery.find()
        if found is not None and before is None:
            log.info("appending through %s", found.broker_record)
        return found

    def _next_search_s(self, _: Connection | None) -> float:
        if self._runtime.monotonic() < self._search_often_until:
            return OFTEN_S
        # If no broker ever served this queue, a process that writes alone searches once, and then
        # only after a lost race.
        may_come = self._discovery.announced or self._expects or self._conflicts
        return IDLE_SEARCH_S if may_come else NEVER

    def _forget(self, connection: Connection, *, unresponsive: bool = False) -> None:
        self._discovery.forget(connection, unresponsive=unresponsive)
        now = self._runtime.monotonic()
        self._discovery.search_at, self._search_often_until = now, now + IDLE_SEARCH_S


def open_brokered_committer(
    store: Store,
    config: ProducerConfig,
    runtime: Runtime,
    claim: QueueClaim | None,
    *,
    network: WebSocketNetwork | None = None,
) -> Committer:
    """Open the committer that finds the queue's broker, or with ``host`` becomes one.

    This is an :data:`.OpenCommitter`. If no broker is announced, the committer appends directly.
    All producers of the process share it, and the settings of the first one apply to all. Each of
    them closes it once.

    Args:
        store: The queue's store.
        config: Settings of the producer.
        runtime: Clock and threads.
        claim: The claim of the queue's prefix.
        network: Connects to brokers and listens. Default: WebSockets.

    Returns:
        The committer.
    """
    network = network or WebSocketNetwork(runtime, listen_for(store))
    open_alone = partial(shared_committer, store, config, runtime, claim=claim)
    made = partial(BrokeredCommitter, store, config, runtime, claim, network, open_alone)
    return share(_committers, (committer_key(store, config, runtime, claim), config.broker), made)


_committers: dict[Hashable, BrokeredCommitter] = {}
