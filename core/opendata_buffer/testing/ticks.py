"""Times of a simulation: whole ticks, so that sums and differences of them are exact. Pure.

With rounding errors, the time left until a deadline can be so short that adding it does not move
the clock, and a loop that waits for the deadline never ends.
"""

from __future__ import annotations

import math

__all__ = ["TICK_S", "later", "up_to_tick"]

TICK_S = 2**-20


def up_to_tick(seconds: float) -> float:
    """The time, rounded up to a tick."""
    return math.ceil(seconds / TICK_S) * TICK_S


def later(now: float, seconds: float) -> float:
    """``now + seconds``, but at least one tick after ``now`` when ``seconds`` is not 0.

    Less than a tick may not change ``now`` at all: whoever waits for a moment just beyond it
    would wait for ever, where a real clock goes on.
    """
    return max(now + seconds, now + TICK_S) if seconds > 0 else now
