"""How long a writer pauses after each of its writes, so that all writers get the manifest. Pure.

Of processes that compare-and-swap on one object one wins, and all others have worked for nothing.
The winner has the new version in memory; if it wrote again at once it would win again, because the
others must read first. So after each write it leaves the manifest to the other writers::

    pause = other writers x 1.5 x cycle        cycle: the time of its own read and write

One and a half, because the others lose races among each other, too. A writer that loses tries
again at once, with little jitter. One that is alone neither pauses nor reads.

How a writer knows of others:

* **By their batches.** A process gives all its batches the same first six random characters of
  their ULIDs, its **tag**. Tags that come up again and again in the manifest are writers. A broker
  does not count them: it writes for all of them. A client that does not know tags draws new ones
  each time and is not counted; it is noticed by the races that are lost to it.
* **By a request.** A consumer that acknowledges, or Spark's sink, reads and then writes, and in
  between the next write of a busy broker has landed: it may lose every race and leave no trace in
  the manifest. So it asks the broker for one pause, as long as for one writer that is known.
* **By chance.** A process that cannot ask writes in the pauses that a busy writer makes from time
  to time: seldom while no race was lost, and every second after one was lost.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

from opendata_buffer.formats.keys import location_tag

CYCLES_EACH = 1.5
JITTER = 0.05
WINDOW_S = 10.0
"""Seconds for which a writer counts after it was seen, and for two of our pauses."""

MAX_PAUSE_S = 15.0
"""Seconds; the limit whatever tags a manifest has, by mistake or by malice."""

MAX_UNKNOWN_PAUSE_S = 2.0
"""Seconds; the limit for a writer that is not known by its tag, however long a write took."""

MAX_TAGS = 4_096

FIRST_CYCLE_S = 0.1
"""Seconds of a cycle before any was measured."""

ALONE_S = 20.0
"""Seconds between two pauses while no other writer is known. If it were longer, a consumer that
begins beside a writer that never rests would wait longer; if shorter, more than one append in a
hundred would be late without need: a pause is three writes of 60 ms."""

BESIDE_S = 1.0
"""Seconds between two pauses for :data:`KNOWN_S` after a lost race."""

KNOWN_S = 60.0


class WriteFairness:
    """The pauses of one writer. Times are monotonic seconds; not thread-safe.

    Args:
        random: A number in [0, 1).
        tag: Six characters of a ULID, of this writer's batches; None for a broker.
    """

    def __init__(self, random: Callable[[], float], tag: str | None = None) -> None:
        self.tag = tag
        self._random = random
        self._seen: dict[str, deque[float]] = {}
        self._window = WINDOW_S
        self._raced_at = float("-inf")
        self._cycles: deque[float] = deque(maxlen=5)
        self._writes: deque[float] = deque(maxlen=5)
        self._reads_first = False
        self._cycle_began = 0.0
        self._ended_at: float | None = None
        self._paused_at: float | None = None
        self._let_in = False
        self._next_at = 0.0

    def saw(self, locations: Iterable[str], now: float) -> None:
        """Note the batches that any writer appended since the last call."""
        for location in locations:
            tag = location_tag(location)
            if tag is not None and tag != self.tag:
                # Moved to the end: the first tags are those not seen for longest.
                times = self._seen.pop(tag, None) or deque(maxlen=2)
                times.append(now)
                self._seen[tag] = times
        while self._seen:
            oldest = next(iter(self._seen))
            if len(self._seen) <= MAX_TAGS and self._seen[oldest][-1] >= now - self._window:
                break
            del self._seen[oldest]

    def others(self, now: float) -> int:
        """Other writers that are known; a lost race shows one."""
        if self.tag is None:
            return 0
        since = now - self._window
        known = sum(len(times) == 2 and times[0] >= since for times in self._seen.values())
        return max(known, int(self._raced_at >= since))

    def let_in(self, writes: int, now: float) -> float:
        """Seconds to leave to others that asked for so many reads and writes."""
        self._let_in, self._paused_at = True, now
        return self._unknown_pause(writes)

    def begins(self, now: float) -> bool:
        """A write begins; whether to read first, because others have written or soon will."""
        if self._ended_at is not None and now - self._ended_at >= self._cycle():
            self._paused_at = now  # Time without anything to write is as good as a pause.
        self._reads_first = self._let_in or self.others(now) > 0
        self._let_in = False
        self._cycle_began = now
        return self._reads_first

    def lost(self, now: float) -> float:
        """A race was lost; seconds to wait before the next attempt, which begins with a read."""
        wait = self._random() * self._cycle() / 2
        self._raced_at, self._reads_first, self._cycle_began = now, True, now + wait
        return wait

    def won(self, now: float) -> None:
        """The write has landed."""
        took = now - self._cycle_began
        if took > 0:  # A broker's queue repeats a lost race itself, and reports it after the write.
            (self._cycles if self._reads_first else self._writes).append(took)
        if self._paused_at is None:
            self._paused_at = now
        pause = self.others(now) * CYCLES_EACH * self._cycle()
        if not pause and now - self._paused_at >= self._unknown_every(now):
            pause = self._unknown_pause(1)
        if pause:
            self._paused_at = now
        pause = min(pause * (1 + JITTER * (2 * self._random() - 1)), MAX_PAUSE_S)
        self._window = max(WINDOW_S, 2 * pause)
        self._ended_at, self._next_at = now, now + pause

    def pause(self, now: float) -> float:
        """Seconds until the next write may begin; not above zero when it may."""
        return self._next_at - now

    def _unknown_pause(self, writes: int) -> float:
        return min(writes * CYCLES_EACH * self._cycle(), MAX_UNKNOWN_PAUSE_S)

    def _unknown_every(self, now: float) -> float:
        return BESIDE_S if now - self._raced_at < KNOWN_S else ALONE_S

    def _cycle(self) -> float:
        # The median: one write that hung does not show how long the others take.
        if self._cycles and len(self._cycles) >= len(self._writes):
            return statistics.median(self._cycles)
        # A writer that was alone so far has measured writes and few reads: on a disk both take a
        # millisecond, and its first lost race, to a consumer's acknowledgement, must not hold
        # what comes meanwhile for fifty.
        return 2 * statistics.median(self._writes) if self._writes else FIRST_CYCLE_S
