"""The committer of a process for one queue: through a broker, as one, or alone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from opendata_buffer.broker.committer import BrokeredCommitter
from opendata_buffer.broker.host import Host
from opendata_buffer.broker.network import (
    Network,
    WebSocketNetwork,
    listen_for,
    websockets_installed,
)
from opendata_buffer.broker.tenure import OpenConsumer
from opendata_buffer.commit.committer import Committer, shared_committer
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.owner import Claim
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores import Store

__all__ = ["open_committer"]

HOST_STOP_S = 5.0


def open_committer(
    store: Store,
    config: QueueConfig,
    runtime: Runtime,
    open_consumer: OpenConsumer,
    *,
    claim: Claim | None = None,
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
        claim: Claim | None,
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
