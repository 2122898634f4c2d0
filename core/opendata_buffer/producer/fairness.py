"""How the writers of one manifest take turns.

**The problem.** Several processes append to one manifest by compare-and-swap: read it, add
entries, write it if no other process wrote in between. The winner of a race knows the new version,
because it wrote it. It can write again at once, while the losers must read first. So one busy
writer would win every race, and the others would wait forever.

**The idea.** After each write, a writer pauses for long enough that every other writer gets a
turn::

    pause = other writers x 1.5 x cycle        cycle: the time of one read and one write

A writer that lost a race does not pause longer, it tries again soon, beginning with a read.

**An example.** Three processes share a manifest, and a cycle takes 60 ms. Each of them pauses for
about 2 x 1.5 x 60 = 180 ms after its write. In this time both others read and write, and each
process writes every 240 ms. Records that a process produces during its pause go into its next
write, so throughput does not suffer.

**How a writer knows the others** (decision 0017):

* *By their batches.* A process puts the same first six random characters, its **tag**, into all
  its ULIDs. The manifest shows the tags. A broker has none, since it writes for many processes.
* *By a request.* A process that would lose every race asks the broker for one pause.
* *By chance.* A process that cannot ask writes in a pause that a busy writer makes from time to
  time: every 20 s while no race was lost, and every second after one was lost.

**What can go wrong.** Anyone can put tags into a manifest, so pauses have an upper limit, as has
the number of tags that are remembered. One write that hung says nothing about the others, so a
cycle is the median of five.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

from opendata_buffer.formats.batch import location_tag

CYCLES_EACH = 1.5
"""Cycles that a pause leaves to each other writer."""

JITTER = 0.05
"""Share by which a pause is made longer or shorter at random."""

WINDOW_S = 10.0
"""A writer counts if it appended twice within these seconds. Never less than two own pauses."""

MAX_PAUSE_S = 15.0
"""Longest pause in seconds, however many tags a manifest has, by mistake or by malice."""

MAX_UNKNOWN_PAUSE_S = 2.0
"""Longest pause in seconds for a writer without a known tag, however slow the writes are."""

MAX_TAGS = 4_096
"""Most writers that are remembered."""

FIRST_CYCLE_S = 0.1
"""Seconds that a cycle is assumed to take before one was measured."""

ALONE_S = 20.0
"""Seconds between two pauses while no other writer is known.

At most one append in a hundred is late because of them, and a consumer that starts next to a writer
that never rests waits no longer than this.
"""

CONTENDED_S = 1.0
"""Seconds between two pauses for :data:`KNOWN_S` after a lost race."""

KNOWN_S = 60.0
"""Seconds after a lost race during which another writer is expected."""


class WriteFairness:
    """Decide how long one writer pauses after each of its writes.

    It does no IO and reads no clock. All times are monotonic seconds, passed by the caller. It is
    not thread-safe.

    Args:
        random: Returns a number in [0, 1).
        tag: The writer's own tag. None for a broker, which writes for many processes.
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
        """Note the batches that were appended since the last call, by any writer."""
        for location in locations:
            tag = location_tag(location)
            if tag is not None and tag != self.tag:
                # Move the tag to the end, so that the first one was not seen for the longest time.
                times = self._seen.pop(tag, None) or deque(maxlen=2)
                times.append(now)
                self._seen[tag] = times
        while self._seen:
            oldest = next(iter(self._seen))
            if len(self._seen) <= MAX_TAGS and self._seen[oldest][-1] >= now - self._window:
                break
            del self._seen[oldest]

    def others(self, now: float) -> int:
        """Return the number of other writers that are known. A lost race shows one."""
        if self.tag is None:
            return 0
        since = now - self._window
        known = sum(len(times) == 2 and times[0] >= since for times in self._seen.values())
        return max(known, int(self._raced_at >= since))

    def let_in(self, writes: int, now: float) -> float:
        """Pause for others that asked for it.

        Args:
            writes: How many reads and writes they need.
            now: The time.

        Returns:
            Seconds until this writer may write again.
        """
        self._let_in = True
        self._paused_at = now
        return self._unknown_pause(writes)

    def begins(self, now: float) -> bool:
        """Note that a write begins.

        Args:
            now: The time in seconds, by the runtime's monotonic clock.

        Returns:
            Whether to read the manifest first, because others have written or soon will.
        """
        if self._ended_at is not None and now - self._ended_at >= self._cycle():
            self._paused_at = now  # A time without anything to write is as good as a pause.
        self._reads_first = self._let_in or self.others(now) > 0
        self._let_in = False
        self._cycle_began = now
        return self._reads_first

    def lost(self, now: float) -> float:
        """Note a lost race.

        Args:
            now: The time in seconds, by the runtime's monotonic clock.

        Returns:
            Seconds to wait before the next attempt, which begins with a read.
        """
        wait = self._random() * self._cycle() / 2
        self._raced_at = now
        self._reads_first = True
        self._cycle_began = now + wait
        return wait

    def won(self, now: float) -> None:
        """Note that the write has landed, and set the pause after it."""
        took = now - self._cycle_began
        # A broker's queue repeats a lost race by itself and reports it after the write. Then the
        # cycle seems to begin later than it ended.
        if took > 0:
            durations = self._cycles if self._reads_first else self._writes
            durations.append(took)
        if self._paused_at is None:
            self._paused_at = now
        pause = self.others(now) * CYCLES_EACH * self._cycle()
        if not pause and now - self._paused_at >= self._unknown_every(now):
            pause = self._unknown_pause(1)
        if pause:
            self._paused_at = now
        pause = min(pause * (1 + JITTER * (2 * self._random() - 1)), MAX_PAUSE_S)
        self._window = max(WINDOW_S, 2 * pause)
        self._ended_at = now
        self._next_at = now + pause

    def pause(self, now: float) -> float:
        """Return the seconds until the next write may begin; zero or less if it may begin now."""
        return self._next_at - now

    def _unknown_pause(self, writes: int) -> float:
        return min(writes * CYCLES_EACH * self._cycle(), MAX_UNKNOWN_PAUSE_S)

    def _unknown_every(self, now: float) -> float:
        return CONTENDED_S if now - self._raced_at < KNOWN_S else ALONE_S

    def _cycle(self) -> float:
        # The median, because one write that hung does not show how long the others take.
        if self._cycles and len(self._cycles) >= len(self._writes):
            return statistics.median(self._cycles)
        # A writer that was alone so far has measured writes, but few reads. So it takes a read for
        # as slow as a write. On a disk both take a millisecond. Without this estimate, its first
        # lost race, against a consumer's acknowledgement, would delay its records by 50 ms.
        return 2 * statistics.median(self._writes) if self._writes else FIRST_CYCLE_S
