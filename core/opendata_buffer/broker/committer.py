"""Appends through the queue's broker, or alone while there is none.

After an append without an answer it waits until the broker cannot begin a write any more
(:mod:`opendata_buffer.broker.protocol` says how that is known). Then it asks the broker that is
announced now, or appends directly: both first search for the append in the manifest that their own
compare-and-swap replaces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from opendata_buffer import errors
from opendata_buffer.broker.broker import find_earlier_attempt
from opendata_buffer.broker.client import Appended, Connection, Lost
from opendata_buffer.broker.discovery import FIND_S, IDLE_SEARCH_S, Discovery
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import Network, WebSocketNetwork, listen_for
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.producer.group_commit import (
    Committer,
    committer_key,
    share,
    shared_committer,
)
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import WARN_S, Queue
from opendata_buffer.runtime import Interval, Runtime, locked
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

SEARCH_S = 0.5
"""Seconds between two searches for :data:`.IDLE_SEARCH_S` after a broker was lost."""

MOVED_S = 0.1
"""Seconds of a pause after a broker that is leaving refused an append."""

STOP_S = 5.0
"""Seconds that the last caller waits until this process's broker has left its record."""

NEVER = float("inf")


class BrokeredCommitter:
    """Appends to one queue for all producers of a process, from the first :meth:`join` to the last
    :meth:`close`. Thread-safe. Made by :func:`open_brokered_committer`."""

    def __init__(
        self,
        store: Store,
        config: ProducerConfig,
        runtime: Runtime,
        claim: QueueClaim | None,
        network: Network,
        open_alone: Callable[[], Committer],
        on_end: Callable[[], object] = lambda: None,
        *,
        expects: bool = False,
    ) -> None:
        self._store = store
        self._config = config
        self._claim = claim
        self._runtime = runtime
        self._network = network
        self._open_alone = open_alone
        self._on_end = on_end
        self._condition = runtime.condition()
        self._callers = 0
        self._ended = False
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
        # Whether a broker will come for certain, as in a process that hosts one.
        self._expects = expects or config.broker == "host"
        self._search_often_until = runtime.monotonic() + IDLE_SEARCH_S if self._expects else 0.0
        self._conflicts = 0
        self._asked = 0
        self._warnings = Interval(runtime, WARN_S)

    @locked
    def join(self) -> bool:
        """Count one more caller; False when the last one has closed it, or it could not start."""
        if self._ended:
            return False
        if not self._callers:
            try:
                if self._config.broker == "host":
                    self._election = LeaderElection(
                        self._store, self._config, self._runtime, self._network
                    )
                self._alone = self._open_alone()
            except BaseException:
                self._ended = True
                self._on_end()
                raise
        self._callers += 1
        return True

    @property
    def attempts(self) -> int:
        """See :class:`Committer`; each append that a broker was asked for counts as one."""
        return self._alone.attempts + self._asked

    @property
    def conflicts(self) -> int:
        """See :class:`Committer`; of the appends this process made alone."""
        return self._alone.conflicts

    @property
    def tag(self) -> str:
        """See :class:`Committer`."""
        return self._alone.tag

    @property
    def broker(self) -> DiscoveryRecord | None:
        """The broker that is connected; None while this process appends alone."""
        connection = self._discovery.connection
        return None if connection is None else connection.broker_record

    def pause(self) -> float:
        """See :class:`Committer`."""
        return self._alone.pause() if self.broker is None else 0.0

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
                case Appended(sequence):
                    return sequence
                case Lost():
                    # The search begins where the first attempt may have landed.
                    doubt = Lost(answer.since if since is None else since, answer.safe_at)
                    if connection.is_over:
                        self._forget(connection, unresponsive=True)
                    self._runtime.sleep(max(0.0, doubt.safe_at - self._runtime.monotonic()))
                case _ if answer.why in ("expired", "late"):
                    pass  # Its answer carried its clock, which the next request sends.
                case _ if answer.why == "large":
                    return self._append_alone(entries, begin_by, doubt)
                case _ if answer.why == "busy":
                    self._runtime.sleep(SEARCH_S)
                case _:
                    self._forget(connection)
                    if answer.why == "moved":
                        # Its record may still name it: without a pause its clients would come back
                        # as fast as they can.
                        self._runtime.sleep(MOVED_S)

    def close(self) -> None:
        """See :class:`Committer`. After the last caller, the next one gets a new committer."""
        if not self._leave():
            return
        connection = self._discovery.close()
        if connection is not None:
            connection.close()
        self._alone.close()
        if self._election is not None:
            self._election.stop(STOP_S)

    @locked
    def _leave(self) -> bool:
        self._callers -= 1
        self._ended = self._callers == 0
        if self._ended:
            self._on_end()
        return self._ended

    def _append_alone(
        self, entries: Sequence[NewEntry], begin_by: float, doubt: Lost | None
    ) -> int:
        if doubt is None:
            return self._alone.append(entries, begin_by=begin_by)
        # A queue of its own: the shared committer would join it with appends without this guard.
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
        """Wait after an error of a later attempt that is to be repeated, or raise. "Nothing was
        appended" is true of that attempt alone: passed on, it would make the producer append a
        second time."""
        if isinstance(error, errors.CommitStateUnknown):
            raise error
        again = isinstance(error, errors.Conflict | errors.QueueFull | errors.TransientStorageError)
        if not again or self._runtime.monotonic() + SEARCH_S >= begin_by:
            raise self._unknown(entries, doubt, str(error).rstrip(".")) from error
        if self._warnings.is_due():
            log.warning("an append with an unknown outcome is searched for again: %s", error)
        self._runtime.sleep(SEARCH_S)

    def _unknown(
        self, entries: Sequence[NewEntry], doubt: Lost, reason: str
    ) -> errors.CommitStateUnknown:
        locations = tuple(entry.location for entry in entries)
        return errors.CommitStateUnknown(
            self._config.manifest_path, doubt.since, locations, None, reason
        )

    def _find(self) -> Connection | None:
        """The connection to use; None to append alone."""
        if self._alone.conflicts > self._conflicts:
            # Another process appends, too: there may be a broker by now.
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
            return SEARCH_S
        # Where no broker ever served this queue, a lone process searches once, and then only after
        # a lost race.
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
    network: Network | None = None,
) -> Committer:
    """An :data:`.OpenCommitter` that finds the queue's broker, and with ``host`` becomes one.

    Where no broker is announced the committer appends alone. All producers of the process share it,
    the first one's settings count for all, and each of them closes it once.
    """
    network = network or WebSocketNetwork(runtime, listen_for(store))
    open_alone = partial(shared_committer, store, config, runtime, claim=claim)
    made = partial(BrokeredCommitter, store, config, runtime, claim, network, open_alone)
    return share(_committers, (committer_key(store, config, runtime, claim), config.broker), made)


_committers: dict[Hashable, BrokeredCommitter] = {}
