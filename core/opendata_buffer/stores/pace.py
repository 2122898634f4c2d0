"""How often a store takes writes of one object, learned from the writes that it refused."""

from __future__ import annotations

__all__ = ["Pace"]

REMEMBERED_S = 600.0
"""So long after a refusal its store counts as one that refuses. Then a write is tried at once, in
case it has become another one; at most one in ten minutes is refused for that."""

MOST_KEYS = 1_000
"""Objects remembered; those that are written under a condition are few."""


class Pace:
    """When an object may be written again. Times are monotonic seconds.

    A write that is refused costs its sender until the next one is let through, and holds what
    has come meanwhile out. Who waits instead, and gathers, is refused no more, and has all that
    has come in the write.

    Thread-safe: what threads may lose of each other is one observation. It pickles as its rate.

    Args:
        every_s: Seconds between two writes of one object that the store takes.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._taken: dict[str, float] = {}
        self._refused: dict[str, float] = {}

    def taken(self, key: str, now: float) -> None:
        """A write of the object was carried out."""
        _keep(self._taken, key, now)

    def refused(self, key: str, now: float) -> None:
        """A write of the object was refused for its rate."""
        _keep(self._refused, key, now)

    def due(self, key: str, now: float) -> float:
        """Seconds until the next write of the object is taken; 0 where it is as far as known."""
        refused, taken = self._refused.get(key), self._taken.get(key)
        if refused is None or taken is None or now - refused > REMEMBERED_S:
            return 0.0
        return max(0.0, taken + self._every_s - now)

    def __getstate__(self) -> float:
        return self._every_s  # another process has another clock

    def __setstate__(self, every_s: float) -> None:
        Pace.__init__(self, every_s)


def _keep(times: dict[str, float], key: str, now: float) -> None:
    if len(times) >= MOST_KEYS and key not in times:
        times.clear()
    times[key] = now
