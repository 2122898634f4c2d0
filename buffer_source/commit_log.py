"""What Spark's commit log certainly holds, told from the order of Spark's calls. Pure.

A batch may leave the queue only when no restart can ask for it again, that is when its end
offset is in the commit log. ``commit(end)`` says so, but comes only with the next batch that has
data: an idle query would never acknowledge its last one. In a normal query ``latestOffset(start)``
says so too. With asynchronous progress tracking it does not, and a source is not told which
of the two it serves, so this watches:

- a normal query calls ``commit(start)`` between ``latestOffset(start)`` and
  ``partitions(start, end)``, always;
- with asynchronous tracking ``commit`` follows the log's writes, some batches later; but a write
  that is done before Spark's main thread looks for it comes in the place a normal query's
  would, so one commit in its place proves nothing yet;
- ``Trigger.AvailableNow`` refuses asynchronous tracking;
- what the first call of a run hands over was read from the log;
- with asynchronous tracking the log is always written for the first batch of a run, in the
  background, so after some idle time that one is on record as well.
"""

from __future__ import annotations

from enum import Enum

from buffer_source.offsets import SourceOffset

FIRST_BATCH_SETTLES_S = 60.0
"""Idle seconds after which the first batch of a run counts as being on record."""

PROOF = 2
"""So many commits in a row, each in its place, prove synchronous tracking.

Asynchronous tracking would have to win the same race as often: its log would have to be written,
by another thread, between two statements of Spark's main thread."""


class Tracking(Enum):
    """How the query keeps its progress."""

    UNKNOWN = "unknown"
    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


class CommitLog:
    """Watches one run of one query."""

    def __init__(self) -> None:
        self.tracking = Tracking.UNKNOWN
        self._planned = 0  # Micro-batches planned in this run.
        self._planned_from: tuple[SourceOffset | None] | None = None  # Where the last one begins.
        self._in_place = 0
        self._handed: SourceOffset | None = None
        self._handed_at = 0.0
        self._committed: SourceOffset | None = None

    def available_now(self) -> None:
        """The trigger is AvailableNow, which has no asynchronous tracking."""
        self.tracking = Tracking.SYNCHRONOUS

    def handed(self, start: SourceOffset | None, now: float) -> bool:
        """``latestOffset(start)`` was called: is ``start`` in the commit log for sure?"""
        if start != self._handed:
            self._handed = start
            self._handed_at = now
        if start is None:
            return False
        if self._planned == 0 or self.tracking is Tracking.SYNCHRONOUS:
            return True
        if self.tracking is Tracking.ASYNCHRONOUS:
            return False
        return self._planned == 1 and now - self._handed_at >= FIRST_BATCH_SETTLES_S

    def committed(self, end: SourceOffset) -> None:
        """``commit(end)`` was called: ``end`` is in the commit log, whatever the tracking."""
        self._committed = end
        if self._handed is not None and end != self._handed:
            # Only a log that lags commits an older offset than the one just handed over.
            self.tracking = Tracking.ASYNCHRONOUS

    def planned(self, start: SourceOffset | None) -> None:
        """``partitions(start, end)`` was called.

        A query that scans the source in two places, as a union of a DataFrame with itself
        does, calls it twice for each micro-batch; the second call proves nothing.
        """
        if self._planned_from == (start,):
            return
        self._planned_from = (start,)
        self._planned += 1
        if start is None or start != self._handed:
            return  # The first batch of a query, or a replay: not preceded by a commit.
        if self._committed != start:
            self.tracking = Tracking.ASYNCHRONOUS
            return
        self._in_place += 1
        if self._in_place >= PROOF and self.tracking is Tracking.UNKNOWN:
            self.tracking = Tracking.SYNCHRONOUS
