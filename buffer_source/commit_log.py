"""Infer from the order of Spark's calls what its commit log certainly holds.

The problem: a batch may leave its queue only when Spark can no longer ask for it, that is, when the
micro-batch that read it is in the commit log of the checkpoint. A Python source cannot see that
log. It only sees Spark's calls, and a query that tracks its progress asynchronously writes the log
later than these calls suggest.

The idea: a normal query makes its calls in one order, always::

    latestOffset(start)            start is in the log
    commit(start)
    partitions(start, end)

With asynchronous tracking ``commit`` follows the writes of the log, some micro-batches later. A
``commit`` that comes too late, or with an older offset, proves asynchronous tracking. One that
comes in time proves nothing yet; several in a row prove synchronous tracking (decision 0006).

What can go wrong: taking an asynchronous query for a synchronous one loses data after a crash,
because the batches that it plans again have left the queue. So where nothing is proved, nothing is
acknowledged before ``commit``; the cost is that batches stay in the queue a little longer.
"""

from __future__ import annotations

from enum import Enum

from buffer_source.partitions import SourceOffset

FIRST_BATCH_LOGGED_S = 60.0
"""Idle seconds after which the first micro-batch of a run counts as being in the log."""

COMMITS_THAT_PROVE = 2
"""Commits in a row, each at the point where a normal query makes it, that prove synchronous
tracking. With asynchronous tracking, each of them would need another thread to write the log
between two consecutive statements of Spark's main thread."""

Tracking = Enum("Tracking", ("UNKNOWN", "SYNCHRONOUS", "ASYNCHRONOUS"))
"""How the query keeps its progress."""


class CommitLog:
    """The part of Spark's commit log that is certain from Spark's calls in one run.

    ``commit(end)`` proves that ``end`` is in the log, but Spark only calls it with the next
    micro-batch that has data. ``latestOffset(start)`` proves that ``start`` is in the log, unless
    the query tracks its progress asynchronously. With asynchronous tracking, Spark still writes the
    log for the first micro-batch of a run, in the background. So that micro-batch is in the log
    after some idle time.
    """

    def __init__(self) -> None:
        self.tracking = Tracking.UNKNOWN
        self._planned = 0  # Micro-batches planned in this run.
        self._planned_start: tuple[SourceOffset | None] | None = None  # The last one.
        self._on_time = 0  # Commits in a row, where a normal query makes them.
        self._start: SourceOffset | None = None  # Spark's last latestOffset().
        self._start_since = 0.0
        self._committed: SourceOffset | None = None

    def holds(self, start: SourceOffset | None, now: float) -> bool:
        """Note the call ``latestOffset(start)``.

        Args:
            start: The offset that Spark handed over; None for a query that has read nothing.
            now: Monotonic seconds.

        Returns:
            Whether ``start`` is certainly in the commit log.
        """
        if start != self._start:
            self._start = start
            self._start_since = now
        if start is None:
            return False
        if self._planned == 0 or self.tracking is Tracking.SYNCHRONOUS:
            return True
        if self.tracking is Tracking.ASYNCHRONOUS:
            return False
        return self._planned == 1 and now - self._start_since >= FIRST_BATCH_LOGGED_S

    def idle_s(self, now: float) -> float:
        """Return for how many seconds Spark has handed over the same offset."""
        return now - self._start_since

    def committed(self, end: SourceOffset) -> None:
        """Note the call ``commit(end)``: ``end`` is in the commit log, whatever the tracking."""
        self._committed = end
        if self._start is not None and end != self._start:
            # Only a log that lags behind commits an older offset than the one just handed over.
            self.tracking = Tracking.ASYNCHRONOUS

    def planned(self, start: SourceOffset | None) -> None:
        """Note the call ``partitions(start, end)``."""
        if self._planned_start == (start,):
            return  # Another scan of the source, as in a union, proves nothing.
        self._planned_start = (start,)
        self._planned += 1
        if start is None or start != self._start:
            return  # No commit precedes the first micro-batch of a query, or a replay.
        if self._committed != start:
            self.tracking = Tracking.ASYNCHRONOUS
            return
        self._on_time += 1
        if self._on_time >= COMMITS_THAT_PROVE and self.tracking is Tracking.UNKNOWN:
            self.tracking = Tracking.SYNCHRONOUS
