"""How long a writer waits after each of its writes, so that all writers get the manifest. Pure.

Of processes that compare-and-swap on one object one wins, and all others have worked for nothing.
The winner has the new version in memory; if it wrote again at once it would win again, because the
others must read first. So after each write it leaves the manifest to the others:

* **Known writers.** It waits for as long as each of them needs for one write::

      pause = other writers x 1.5 x cycle        cycle: the time of its own read and write

  One and a half, because the others lose races among each other, too. A writer that loses tries
  again at once, with little jitter. One that is alone neither waits nor reads.

  The number of writers is read from the manifest, which has no field for it: a process gives all
  its batches the same first six random characters of their ULIDs, its **tag**. Tags that come up
  again and again are writers. A client that does not know tags draws new ones each time and is
  not counted; it is noticed by the races that are lost to it.
* **Unknown ones.** A consumer that acknowledges, a sink or an operator reads and then writes, and
  in between the next write has landed. It may lose every race and leave no trace. So a writer that
  never rests leaves a **gap** of a few writes now and then: seldom while it lost no race, and every
  second after it lost one.

A broker writes for all writers that are known, so it leaves gaps only.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

from opendata_buffer.formats.keys import location_tag

CYCLES_EACH = 1.5
JITTER = 0.05
WINDOW_S = 10.0
"""A writer counts for so long after it was seen, and for two of our pauses."""

MAX_PAUSE_S = 15.0
"""Whatever tags are found in a manifest, by mistake or by malice."""

MAX_TAGS = 4_096

FIRST_CYCLE_S = 0.1
"""Before anything was measured."""

ALONE_S = 20.0
"""Between two gaps while no other writer is known. Longer, and a consumer that begins beside a
writer that never rests waits longer; shorter, and more than one append in a hundred is late
although no other writer waits: a gap is three writes of 60 ms."""

BESIDE_S = 1.0
"""Between two gaps for :data:`KNOWN_S` after a lost race."""

KNOWN_S = 60.0

GAP_WRITES = 3.0
"""Length of a gap, in writes: a read and a write of another process fit in, wherever they begin."""

MAX_GAP_S = 0.5


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
        self._cycle_began: float | None = None
        self._writes: deque[float] = deque(maxlen=5)
        self._write_began = 0.0
        self._write_ended: float | None = None
        self._gap_at = 0.0
        self._idle = 0.0
        self._next_at = 0.0

    def saw(self, locations: Iterable[str], now: float) -> None:
        """These were appended since the last look, by any writer."""
        for location in locations:
            tag = location_tag(location)
            if tag is not None and tag != self.tag:
                # Behind the others: the first ones are those not seen for longest.
                times = self._seen.pop(tag, None) or deque(maxlen=2)
                times.append(now)
                self._seen[tag] = times
        while self._seen:
            oldest = next(iter(self._seen))
            if len(self._seen) <= MAX_TAGS and self._seen[oldest][-1] >= now - self._window:
                break
            del self._seen[oldest]

    def others(self, now: float) -> int:
        """Other writers that are known; a lost race tells of one."""
        if self.tag is None:
            return 0
        since = now - self._window
        known = sum(len(times) == 2 and times[0] >= since for times in self._seen.values())
        return max(known, int(self._raced_at >= since))

    def begins(self, now: float) -> bool:
        """A write begins; whether to read first, because others write, too."""
        shared = self.others(now) > 0
        self._cycle_began = now if shared else None
        self._write_began = now
        return shared

    def lost(self, now: float) -> float:
        """A race was lost; seconds to wait before the next attempt, which begins with a read."""
        self._raced_at = now
        wait = self._random() * self._cycle() / 2
        self._cycle_began = now + wait
        return wait

    def won(self, now: float) -> None:
        """The write has landed."""
        if self._cycle_began is not None:
            self._cycles.append(max(0.0, now - self._cycle_began))
            self._cycle_began = None
        pause = self.others(now) * CYCLES_EACH * self._cycle()
        pause = min(pause * (1 + JITTER * (2 * self._random() - 1)), MAX_PAUSE_S)
        pause = pause or self._gap(now)
        self._window = max(WINDOW_S, 2 * pause)
        self._next_at = now + pause

    def pause(self, now: float) -> float:
        """Seconds until the next write may begin; not above zero when it may."""
        return self._next_at - now

    def _gap(self, now: float) -> float:
        """Seconds to leave to writers that are not known, after a write that ended now."""
        idle = 0.0 if self._write_ended is None else self._write_began - self._write_ended
        if self._raced_at < self._write_began:
            # A write that lost races says nothing about how long one takes.
            self._writes.append(now - self._write_began)
        write = statistics.median(self._writes) if self._writes else 0.0
        gap = min(GAP_WRITES * write, MAX_GAP_S)
        # Time without anything to write is as good as a gap; the moment that it takes to put the
        # next write together is not.
        self._idle += idle if idle >= write / 2 else 0.0
        if self._write_ended is None or self._idle >= gap:
            self._gap_at, self._idle = now, 0.0
        self._write_ended = now
        every = BESIDE_S if now - self._raced_at < KNOWN_S else ALONE_S
        return gap if now - self._gap_at >= every else 0.0

    def _cycle(self) -> float:
        # The median: one write that hung says nothing about how long the others take.
        if self._cycles:
            return statistics.median(self._cycles)
        # A writer that was alone so far has measured writes and no read: on a disk both take a
        # millisecond, and its first lost race, to a consumer's acknowledgement, must not hold
        # what comes meanwhile for fifty.
        return 2 * statistics.median(self._writes) if self._writes else FIRST_CYCLE_S
