"""When a process may append again, so that many of them share one manifest. Pure.

Of processes that compare-and-swap on one object one wins and all others have worked for nothing.
Who wins and goes on at once wins again: it need not read what it wrote itself. So after each win
a process stands back for as long as the others need for one write each::

    pause = other writers x 1.5 x cycle          cycle: the time of its own read and write

One and a half, because those others lose races among each other, too. Who loses tries again at
once, with little jitter. A process that is alone never pauses and never reads.

How many others there are is read from the manifest, which has no room to say it: a process gives
all its batches the same first six random characters of their ULIDs, its **tag**. Tags that come
up again and again are writers. A client that knows nothing of tags draws new ones each time and
is not counted; it is noticed by the races that are lost to it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

from opendata_buffer.commit.gaps import Gaps
from opendata_buffer.formats.keys import location_tag

__all__ = ["Turns"]

CYCLES_EACH = 1.5
JITTER = 0.05
WINDOW_S = 10.0
"""A writer counts for so long after it was seen, and for two of our pauses."""

MAX_PAUSE_S = 15.0
"""Whatever tags are found in a manifest, by mistake or by malice."""

MAX_TAGS = 4_096

FIRST_CYCLE_S = 0.1
"""Before anything was measured."""


class Turns:
    """What one writer knows of the others. Times are monotonic seconds; not thread-safe.

    Args:
        tag: Of this writer: six characters of a ULID.
        random: A number in [0, 1).
    """

    def __init__(self, tag: str, random: Callable[[], float]) -> None:
        self.tag = tag
        self._random = random
        self._seen: dict[str, deque[float]] = {}
        self._conflict_at: float | None = None
        self._cycles: deque[float] = deque(maxlen=5)
        self._began: float | None = None
        self._gaps = Gaps()
        self._write_began = 0.0
        self._turn_at = 0.0
        self._window = WINDOW_S

    def saw(self, locations: Iterable[str], now: float) -> None:
        """These were appended since the last look, by anybody."""
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
        """Other writers, as far as known."""
        since = now - self._window
        known = sum(len(times) == 2 and times[0] >= since for times in self._seen.values())
        raced = self._conflict_at is not None and self._conflict_at >= since
        return max(known, int(raced))

    def begins(self, now: float) -> bool:
        """A write begins; whether to read first, because others write, too."""
        shared = self.others(now) > 0
        self._began = now if shared else None
        self._write_began = now
        return shared

    def lost(self, now: float) -> float:
        """A race was lost; seconds to wait before the next attempt, which begins with a read."""
        self._conflict_at = now
        self._gaps.lost(now)
        wait = self._random() * self._cycle() / 2
        self._began = now + wait
        return wait

    def won(self, now: float) -> None:
        """The write has landed."""
        if self._began is not None:
            self._cycles.append(now - self._began)
            self._began = None
        pause = self.others(now) * CYCLES_EACH * self._cycle()
        pause = min(pause * (1 + JITTER * (2 * self._random() - 1)), MAX_PAUSE_S)
        # Not everybody is counted: a consumer that never won a race has left no trace.
        pause = pause or self._gaps.wrote(self._write_began, now)
        self._window = max(WINDOW_S, 2 * pause)
        self._turn_at = now + pause

    def pause(self, now: float) -> float:
        """Seconds until the next write may begin; not above zero when it may."""
        return self._turn_at - now

    def _cycle(self) -> float:
        # The median: one write that hung says nothing about how long the others take.
        if self._cycles:
            return statistics.median(self._cycles)
        # A writer that was alone so far has measured writes and no read: on a disk both take a
        # millisecond, and its first lost race, to a consumer's acknowledgement, must not hold
        # what comes meanwhile for fifty.
        write = self._gaps.write
        return FIRST_CYCLE_S if write is None else 2 * write
