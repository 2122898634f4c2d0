"""Appends through the queue's broker, or alone while there is none.

A :class:`~opendata_buffer.producer.group_commit.Committer` like the local one, with the same
meaning
of every answer. What it adds is finding the broker, and what to do when it gives no answer:

1. Wait until the broker cannot begin a write of the append any more
   (:mod:`opendata_buffer.broker.protocol` says how that is known).
2. Ask the broker that is announced now, or append directly; either looks first whether the
   append has landed, on the manifest that its own compare-and-swap replaces.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendata_buffer.broker.broker import Landed, look_up
from opendata_buffer.broker.client import Appended, Connection, Lost
from opendata_buffer.broker.discovery import Discovery
from opendata_buffer.broker.dispatcher_term import OpenConsumer
from opendata_buffer.broker.election import Host
from opendata_buffer.broker.lease import DiscoveryRecord
from opendata_buffer.broker.network import (
    Network,
    WebSocketNetwork,
    listen_for,
    websockets_installed,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    Conflict,
    InvalidInput,
    OpenDataBufferError,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.producer.group_commit import Committer, shared_committer
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store

__all__ = ["BrokeredCommitter", "open_committer"]


log = logging.getLogger(__name__)

FIND_S = 1.0
"""How long an append waits while a broker is looked for; then it is made alone."""

LOOK_S = 0.5
"""Between two looks for a broker after one was lost."""

MOVED_S = 0.1
"""After a broker said that it leaves."""

PATIENCE_S = 10.0
"""After a broker was lost its successor is looked for so often; later every so many seconds."""


@dataclass(slots=True)
class _Doubt:
    """An append of which an attempt may have landed.

    Attributes:
        since: At this sequence or later, if it has.
        safe_at: From when on nobody begins a write of that attempt, monotonic seconds.
    """

    since: int
    safe_at: float


class BrokeredCommitter:
    """Appends to one queue for all producers of a process. Thread-safe.

    Args:
        alone: Appends where there is no broker; closed with this one.
        store: Where the queue lives.
        config: The queue.
        runtime: Clock and threads.
        connect: Opens a connection to a broker.
        expects: Whether a broker is sure to come although none is announced yet, as in a process
            that would serve itself.
    """

    def __init__(
        self,
        alone: Committer,
        store: Store,
        config: QueueConfig,
        runtime: Runtime,
        connect: Callable[[DiscoveryRecord], Connection],
        *,
        expects: bool = False,
        claim: QueueClaim | None = None,
    ) -> None:
        self._alone = alone
        self._store = store
        self._config = config
        self._claim = claim
        self._runtime = runtime
        self._finder = Discovery(store, config, runtime, connect, waits_s=FIND_S)
        self._look_at: float | None = 0.0
        self._hopeful_until = runtime.monotonic() + PATIENCE_S if expects else 0.0
        self._expects = expects
        self._conflicts = 0
        self._asked = 0

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
        connection = self._finder.connection
        return None if connection is None else connection.announcement

    def pause(self) -> float:
        """See :class:`Committer`."""
        return self._alone.pause() if self.broker is None else 0.0

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """See :class:`Committer`."""
        doubt: _Doubt | None = None
        while True:
            connection = self._find() if self._runtime.monotonic() < begin_by else None
            if connection is None:
                return self._append_alone(entries, begin_by, doubt)
            since = None if doubt is None else doubt.since
            self._asked += 1
            try:
                answer = connection.append(entries, since=since, begin_by=begin_by)
            except OpenDataBufferError as error:
                if doubt is None:
                    raise
                self._weigh(error, entries, begin_by, doubt)
                continue
            match answer:
                case Appended(sequence):
                    return sequence
                case Lost():
                    # What is looked for begins where the first attempt may have landed.
                    doubt = _Doubt(answer.since if since is None else since, answer.safe_at)
                    if connection.is_over:
                        self._forget(connection, fell_silent=True)
                    self._await(doubt.safe_at)
                case _ if answer.why in ("expired", "late"):
                    pass  # It says what time it is; the next request is young again.
                case _ if answer.why == "large":
                    return self._append_alone(entries, begin_by, doubt)
                case _ if answer.why == "busy":
                    self._runtime.sleep(LOOK_S)
                case _:
                    self._forget(connection)
                    if answer.why == "moved":
                        # It may be announced for a moment yet: without a pause its clients
                        # would come back as fast as they can.
                        self._runtime.sleep(MOVED_S)

    def close(self) -> None:
        """See :class:`Committer`."""
        connection = self._finder.close()
        if connection is not None:
            connection.close()
        self._alone.close()

    def _append_alone(
        self, entries: Sequence[NewEntry], begin_by: float, doubt: _Doubt | None
    ) -> int:
        if doubt is None:
            return self._alone.append(entries, begin_by=begin_by)
        # Its own queue: the shared committer would mix it with appends that need no look-up.
        queue = Queue(
            self._store, self._config, runtime=self._runtime, role="producer", claim=self._claim
        )
        error: OpenDataBufferError | None = None
        while self._runtime.monotonic() < begin_by:
            try:
                found = queue.append(entries, guard=look_up(queue.key, entries, doubt.since))
            except OpenDataBufferError as failed:
                self._weigh(failed, entries, begin_by, doubt)
                error = failed
            else:
                return found.sequence if isinstance(found, Landed) else found
        raise self._unknown(entries, doubt, "the broker gave no answer in time") from error

    def _weigh(
        self,
        error: OpenDataBufferError,
        entries: Sequence[NewEntry],
        begin_by: float,
        doubt: _Doubt,
    ) -> None:
        """After an error of a later attempt: returns when it is to be tried again.

        "Nothing was appended" is said of that attempt alone. Passed on, it would make the
        producer append afresh what the first attempt may have appended.
        """
        if isinstance(error, CommitStateUnknown):
            raise error
        again = isinstance(error, Conflict | QueueFull | TransientStorageError)
        if not again or self._runtime.monotonic() + LOOK_S >= begin_by:
            raise self._unknown(entries, doubt, str(error).rstrip(".")) from error
        log.warning("looking for a doubtful append goes on: %s", error)
        self._runtime.sleep(LOOK_S)

    def _unknown(
        self, entries: Sequence[NewEntry], doubt: _Doubt, reason: str
    ) -> CommitStateUnknown:
        locations = tuple(entry.location for entry in entries)
        return CommitStateUnknown(self._config.manifest_path, doubt.since, locations, None, reason)

    def _find(self) -> Connection | None:
        """The connection to use; None to append alone."""
        before = self._finder.connection
        found = self._finder.find(self._is_time, self._plan_next_look)
        if found is not None and before is None:
            log.info("appending through %s", found.announcement)
        return found

    def _is_time(self) -> bool:
        if self._alone.conflicts > self._conflicts:
            # Somebody else appends, too: there may be a broker by now.
            self._conflicts = self._alone.conflicts
            if self._look_at is None:
                self._look_at = 0.0
        return self._look_at is not None and self._runtime.monotonic() >= self._look_at

    def _plan_next_look(self) -> None:
        now = self._runtime.monotonic()
        if now < self._hopeful_until:
            self._look_at = now + LOOK_S
        elif self._finder.announced or self._expects or self._conflicts:
            self._look_at = now + PATIENCE_S
        else:
            # Nobody ever served this queue: a lone process asks once, and then only when it
            # meets another writer.
            self._look_at = None

    def _forget(self, connection: Connection, *, fell_silent: bool = False) -> None:
        self._finder.forget(connection, fell_silent=fell_silent)
        now = self._runtime.monotonic()
        self._look_at, self._hopeful_until = now, now + PATIENCE_S

    def _await(self, moment: float) -> None:
        left = moment - self._runtime.monotonic()
        if left > 0:
            self._runtime.sleep(left)


# ---- The committer of a process for one queue: through a broker, as one, or alone. ----


HOST_STOP_S = 5.0


def open_committer(
    store: Store,
    config: QueueConfig,
    runtime: Runtime,
    open_consumer: OpenConsumer,
    *,
    claim: QueueClaim | None = None,
    broker: str = "auto",
    network: Network | None = None,
) -> Committer:
    """The process's committer for this manifest, with one more caller, who must close it.

    Args:
        store: Where the queue lives.
        config: The queue; the first caller's settings count for all.
        runtime: Clock and threads.
        open_consumer: Takes the queue over, where this process is the broker and has workers.
        claim: The first caller's claim of the prefix.
        broker: ``auto`` uses an announced broker, ``host`` also serves as one while there is
            none, ``off`` appends alone.
        network: How brokers are reached; WebSockets by default.

    Raises:
        InvalidInput: ``broker`` is ``host`` and the extra ``broker`` is not installed.
    """
    if network is None and not websockets_installed():
        if broker == "host":
            raise InvalidInput(
                "broker='host' needs the package websockets: pip install 'opendata-buffer[broker]'"
            )
        broker = "off"
    if broker == "off":
        return shared_committer(store, config, runtime, claim=claim)
    process = os.getpid() if isinstance(runtime, SystemRuntime) else id(runtime)
    # As in shared_committer: another queue once it was started over.
    queue_id = "" if claim is None else claim.queue_id
    key = (process, id(store), config.manifest_path, queue_id, broker)
    while True:
        shared = _shared.get(key)
        if shared is None:
            made = _Shared(key, runtime)
            shared = _shared.setdefault(key, made)
            if shared is made:
                try:
                    shared.open(
                        store,
                        config,
                        open_consumer,
                        claim,
                        broker,
                        network or WebSocketNetwork(runtime, listen_for(store)),
                    )
                except BaseException:
                    shared.give_up()
                    raise
                return shared
        if shared.join():
            return shared


class _Shared:
    """One :class:`BrokeredCommitter`, and the broker beside it, for several producers."""

    def __init__(self, key: tuple[int, int, str, str, str], runtime: Runtime) -> None:
        self._key = key
        self._runtime = runtime
        self._condition = runtime.condition()
        self._callers = 1
        self._opened = False
        self._committer: BrokeredCommitter | None = None
        self._host: Host | None = None

    @property
    def attempts(self) -> int:
        """See :class:`Committer`."""
        return self._inner.attempts

    @property
    def conflicts(self) -> int:
        """See :class:`Committer`."""
        return self._inner.conflicts

    @property
    def tag(self) -> str:
        """See :class:`Committer`."""
        return self._inner.tag

    def pause(self) -> float:
        """See :class:`Committer`."""
        return self._inner.pause()

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """See :class:`Committer`."""
        return self._inner.append(entries, begin_by=begin_by)

    def open(
        self,
        store: Store,
        config: QueueConfig,
        open_consumer: OpenConsumer,
        claim: QueueClaim | None,
        broker: str,
        network: Network,
    ) -> None:
        """Make what is shared; the first caller does."""
        runtime = self._runtime
        alone = shared_committer(store, config, runtime, claim=claim)
        if broker == "host":
            self._host = Host(
                store,
                config,
                runtime,
                network.listen,
                network.connect,
                secrets.token_bytes,
                open_consumer,
            )
        self._committer = BrokeredCommitter(
            alone, store, config, runtime, network.connect, expects=broker == "host", claim=claim
        )
        with self._condition:
            self._opened = True
            self._condition.notify_all()

    def join(self) -> bool:
        """Count one more caller; False when the last one has closed it, or it was given up."""
        with self._condition:
            while self._callers and not self._opened:
                self._condition.wait()
            if self._callers == 0:
                return False
            self._callers += 1
            return True

    def give_up(self) -> None:
        """It could not be made: who waits for it, or comes later, makes another."""
        _shared.pop(self._key, None)
        with self._condition:
            self._callers = 0
            self._condition.notify_all()

    def close(self) -> None:
        """See :class:`Committer`."""
        with self._condition:
            self._callers -= 1
            if self._callers:
                return
        _shared.pop(self._key, None)
        if self._committer is not None:
            self._committer.close()
        if self._host is not None:
            self._host.stop(HOST_STOP_S)

    @property
    def _inner(self) -> BrokeredCommitter:
        assert self._committer is not None
        return self._committer


_shared: dict[tuple[int, int, str, str, str], _Shared] = {}
