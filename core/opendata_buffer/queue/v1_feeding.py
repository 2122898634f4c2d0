"""Feed v1 consumers next to a process that appends to a log, without delaying its appends.

The process tells :class:`Feeding` which manifest it has written. A thread then appends the new
entries to the queues of the v1 consumers (:mod:`opendata_buffer.queue.v1_feed`), from the memory of
the last write: one small write for each queue, and usually no read. Appends that arrive meanwhile
go into the next write.

A log without v1 consumers costs a look at its index once a minute.
"""

from __future__ import annotations

import logging

from opendata_buffer import errors
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.v1_feed import Feeders
from opendata_buffer.runtime import Interval, Runtime, Task, locked, wait_for
from opendata_buffer.stores.base import RateLimited

log = logging.getLogger(__name__)

CHECK_S = 60.0
"""Seconds between two looks for v1 consumers, and between two writes of their positions."""
PAUSE_S = 0.2
"""Seconds between two writes of one queue. The consumer reads before it writes, and would lose its
races against a feeder that writes all the time."""
_YIELD_S = 1.0  # Pause after another feeder was faster: one is enough.
_BEHIND_S = 1.0  # How often a queue that was full is looked at.
_STOP_S = 5.0


class Feeding:
    """Feeds the v1 consumers of one queue's log in a thread, while there are any. Thread-safe.

    Args:
        store: Where the log is.
        config: The queue.
        runtime: Clock and threads.
        queue_id: The id of the queue.
        is_log: Whether the queue is known to be a log. Otherwise the first look is a minute away.
    """

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, queue_id: str, *, is_log: bool
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._queue_id = queue_id
        self._condition = runtime.condition()
        self._checks = Interval(runtime, CHECK_S)
        if not is_log:
            self._checks.is_due()
        self._newest: Manifest | None = None
        self._runs = False
        self._closing = False
        self._task: Task | None = None

    @locked
    def appended(self, manifest: Manifest) -> None:
        """Feed what is new in a manifest that this process has written. Does not wait."""
        if self._closing:
            return
        self._newest = manifest
        if self._runs:
            self._condition.notify_all()
        elif self._checks.is_due():
            self._runs = True
            self._task = self._runtime.spawn(self._run, "opendata-buffer-v1-feed")

    def close(self) -> None:
        """Feed what was appended last, and end the thread. Repeatable; raises nothing."""
        self._close()
        if self._task is not None:
            self._task.join(_STOP_S)

    @locked
    def _close(self) -> None:
        self._closing = True
        self._condition.notify_all()

    def _run(self) -> None:
        log_ = Log(self._store, self._config, self._runtime, self._queue_id)
        feeders, checks = Feeders(log_), Interval(self._runtime, CHECK_S)
        last: Manifest | None = None
        try:
            while (manifest := self._next(last, feeders)) is not None:
                last = manifest
                try:
                    due = checks.is_due()
                    if due:
                        index = log_.read()
                        if index is not None:
                            feeders.find(index)
                    if feeders.feeders:
                        feeders.feed(manifest, note=due)
                    else:
                        return
                except errors.OpenDataBufferError as error:
                    log.warning("v1 consumers of %s were not fed: %s", self._queue_id, error)
                self._pause(feeders)
        finally:
            self._ended()

    @locked
    def _ended(self) -> None:
        self._runs = False

    @locked
    def _next(self, last: Manifest | None, feeders: Feeders) -> Manifest | None:
        """Wait until there is something to feed; return None when it is time to end."""
        while self._newest is last and not self._closing:
            behind = last is not None and any(
                feeder.lacks(last.next_sequence) for feeder in feeders.feeders.values()
            )
            self._condition.wait(_BEHIND_S if behind else None)
            if behind:
                break
        return None if self._closing and self._newest is last else self._newest

    @locked
    def _pause(self, feeders: Feeders) -> None:
        pause = PAUSE_S
        for feeder in feeders.feeders.values():
            if feeder.lost_race:
                pause = max(pause, _YIELD_S * (0.5 + self._runtime.random()))
            if isinstance(self._store, RateLimited):
                pause = max(pause, self._store.write_due(feeder.key))
        until = self._runtime.monotonic() + pause
        wait_for(self._runtime, self._condition, lambda: self._closing, until=until)
