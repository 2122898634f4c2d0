"""Who writes all the time leaves a gap now and then, for those who must read first. Pure.

A writer that has the manifest in memory writes again as soon as its last write has landed.
Whoever comes from outside (a consumer that acknowledges, a sink, an operator) reads and then
writes, and in between the next write has always landed already: beside a writer that never
pauses it may lose every race for a minute. So such a writer pauses for some of its writes once in
a while: seldom while it lost no race, and every second once it did, because somebody is
there.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["Gaps"]

ALONE_S = 20.0
"""Between two gaps while nobody else is known. Longer, and a consumer that begins beside a writer
that never rests waits longer; shorter, and more than one append in a hundred is late for nobody's
sake: a gap is three writes of 60 ms."""

BESIDE_S = 1.0
"""Between two gaps while others write, too."""

KNOWN_S = 60.0
"""Others are known for so long after they won a race."""

WRITES = 3.0
"""Length of a gap, in writes: another one's read and write fit in, wherever it stands just then."""

LONGEST_S = 0.5


class Gaps:
    """The gaps of one writer. Times are monotonic seconds; not thread-safe."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=5)
        self._ended: float | None = None
        self._since = 0.0
        self._idle = 0.0
        self._raced_at = float("-inf")

    @property
    def write(self) -> float | None:
        """How long a write takes that loses no race, seconds; None before the first."""
        return statistics.median(self._took) if self._took else None

    def lost(self, now: float) -> None:
        """A race was lost: somebody else writes, too."""
        self._raced_at = now

    def wrote(self, began: float, ended: float) -> float:
        """A write has landed; returns for how many seconds the next one is not to begin.

        Args:
            began: When it began.
            ended: When it had landed.
        """
        idle = 0.0 if self._ended is None else began - self._ended
        if self._raced_at < began:
            # A write that lost races says nothing about how long one takes.
            self._took.append(ended - began)
        write = self.write or 0.0
        gap = min(WRITES * write, LONGEST_S)
        # What it has nothing to write for is a gap as good as any; the moment it takes to put
        # the next write together is none.
        self._idle += idle if idle >= write / 2 else 0.0
        if self._ended is None or self._idle >= gap:
            self._since, self._idle = ended, 0.0
        self._ended = ended
        every = BESIDE_S if ended - self._raced_at < KNOWN_S else ALONE_S
        return gap if ended - self._since >= every else 0.0
