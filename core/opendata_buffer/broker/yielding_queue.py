"""A queue for who changes it by himself beside a broker: it asks the broker for the floor.

Who reads before he writes loses every race against a broker that writes from memory. So after a
lost race, the sign that somebody else writes, too, it is looked whether a broker is announced, and
that one pauses while this process reads and writes (:mod:`.write_pause`). As long as it is
connected it
is asked before the first attempt of each change. Who never loses a race looks for nothing, and
loads nothing: a query's first plan does not wait for modules that it may never need.

The broker is asked for time and for nothing else. Where there is none, or it does not answer, the
change goes on as it would without: the compare-and-swap decides in any case.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.late import late_imports
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, remaining
from opendata_buffer.stores.base import Store

if TYPE_CHECKING:  # loaded at the first lost race
    from opendata_buffer.broker.client import Connection
    from opendata_buffer.broker.discovery import Discovery
    from opendata_buffer.broker.network import Network

__all__ = ["YieldingQueue"]

log = logging.getLogger(__name__)

FIND_S = 1.0
"""How long a change waits while a broker is looked for; then it goes on alone."""

ASK_S = 5.0
"""How long it waits for a broker that is alive, and writes or lets others write first. One that
gives no sign of life is given up after 1.5 seconds."""

LOOK_S = 1.0
"""Between two looks for a broker after one was lost."""

PATIENCE_S = 10.0
"""Between two looks where none was found."""


class YieldingQueue(Queue):
    """A :class:`Queue` whose changes have a broker beside them pause.

    Args:
        store: Where it lives.
        config: The queue.
        runtime: Clock and threads.
        claim: Of the prefix.
        broker: ``auto``, or ``off``: as if there was none. Without the extra ``broker`` it is off.
        network: How brokers are reached; WebSockets by default.
        role: See :class:`Queue`.
    """

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        *,
        runtime: Runtime,
        claim: QueueClaim | None = None,
        broker: str = "auto",
        network: Network | None = None,
        role: str = "producer",
    ) -> None:
        super().__init__(
            store,
            config,
            runtime=runtime,
            role=role,
            claim=claim,
            after_conflict=self._after_conflict,
        )
        self._asks = broker != "off"
        self._found_in = store
        self._network = network
        self._pid = os.getpid()
        self._finder: Discovery | None = None
        self._look_at = float("-inf")
        self._floor: Connection | None = None
        self._floor_until = float("-inf")

    def _update(self, *args: Any, from_memory: bool = False) -> outcomes.Outcome[Manifest | None]:
        self._give_up_in_child()
        try:
            if self._finder is not None and self._finder.connection is not None:
                # The broker has written since, so what is remembered is out of date.
                from_memory = False
                self._take_floor()
            return super()._update(*args, from_memory=from_memory)
        finally:
            self._give_floor_back()

    def close(self) -> None:
        """See :meth:`Queue.close`; ends the connection, too."""
        super().close()
        self.disconnect()

    def disconnect(self) -> None:
        """End the connection to the broker; the next append makes one if it has to."""
        self._give_up_in_child()
        connection = None if self._finder is None else self._finder.connection
        if self._finder is not None and connection is not None:
            self._finder.forget(connection)

    def _give_up_in_child(self) -> None:
        """The thread that reads the connection, and may have its locks, is the parent's."""
        if self._pid != os.getpid():
            self._pid, self._finder, self._floor = os.getpid(), None, None
            self._look_at = self._floor_until = float("-inf")

    def _after_conflict(self) -> float | None:
        """Somebody was faster: have him wait, where that is a broker."""
        if self._runtime.monotonic() < self._floor_until:
            return 0.0  # Not the broker: it waits.
        return 0.0 if self._take_floor() else self._conflict_pause_s()

    def _take_floor(self) -> bool:
        """Whether the broker writes nothing from now on, for a while."""
        self._give_floor_back()
        connection = self._find()
        if connection is None:
            return False
        left = remaining()
        # Before the answer: who is interrupted while he waits gives back what he would get.
        self._floor = connection
        answer = connection.ask({"op": "floor"}, ASK_S if left is None else min(ASK_S, left))
        if isinstance(answer, dict):
            from opendata_buffer.broker.write_pause import FLOOR_S

            self._floor_until = self._runtime.monotonic() + FLOOR_S
            return True
        from opendata_buffer.broker.client import Lost

        if connection.is_over or not isinstance(answer, Lost):
            log.warning("the broker does not let this process write: going on alone (%s)", answer)
            assert self._finder is not None
            self._floor = None
            self._finder.forget(connection, fell_silent=isinstance(answer, Lost))
            self._look_at = self._runtime.monotonic() + LOOK_S
        else:
            # It lives, and may still give what nobody waits for any more.
            self._give_floor_back()
        return False

    def _find(self) -> Connection | None:
        """A connection to the broker, if one is announced and reached."""
        if not self._asks:
            return None
        if self._finder is None:
            with late_imports():
                from opendata_buffer.broker.discovery import Discovery
                from opendata_buffer.broker.network import WebSocketNetwork, websockets_installed
            if self._network is None:
                if not websockets_installed():
                    self._asks = False
                    return None
                self._network = WebSocketNetwork(self._runtime)
            self._finder = Discovery(
                self._found_in, self._config, self._runtime, self._network.connect, waits_s=FIND_S
            )
            # The thread that reads a connection keeps it open, also when whoever had this queue
            # dropped it without a word.
            weakref.finalize(self, _abandon, self._finder).atexit = False
        return self._finder.find(self._is_time, self._plan_next_look)

    def _give_floor_back(self) -> None:
        connection, self._floor = self._floor, None
        self._floor_until = float("-inf")
        if connection is not None:
            connection.tell({"op": "over"})

    def _is_time(self) -> bool:
        return self._runtime.monotonic() >= self._look_at

    def _plan_next_look(self) -> None:
        # A connection that ends by itself has a successor within seconds.
        found = self._finder is not None and self._finder.connection is not None
        self._look_at = self._runtime.monotonic() + (LOOK_S if found else PATIENCE_S)


def _abandon(finder: Discovery) -> None:
    connection = finder.connection
    if connection is not None:
        connection.abandon()
