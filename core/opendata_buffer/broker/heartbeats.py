"""When claims lapse: by the heartbeats of those who hold them, in the memory of one foreman."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opendata_buffer.broker.claims import Holder
from opendata_buffer.runtime import Condition

__all__ = ["Heartbeats"]

LATE_S = 0.5
"""A foreman that looks at a claim so long after its end was suspended, or storage held it up. It
may have missed heartbeats, so it gives the worker the whole time anew, once, as a successor would.
"""

MOST_TOKENS = 100_000
"""Of one heartbeat."""


class Heartbeats:
    """The time that each claim has yet. Times are monotonic seconds.

    Heartbeats come from any thread; all else is asked by the foreman's.

    Args:
        condition: The foreman's lock.
        steady_since: Since when this broker has been at work without a long pause. Heartbeats of
            a pause may have been missed.
    """

    def __init__(self, condition: Condition, steady_since: Callable[[], float]) -> None:
        self._condition = condition
        self._steady_since = steady_since
        self._alive: dict[int, float] = {}
        self._renewed: dict[int, int] = {}
        self.lapses: dict[int, float] = {}
        """When the claim of each batch is looked at next."""

    def hear(self, tokens: Iterable[int], now: float) -> None:
        """Who holds these lives. With the lock held."""
        for token in list(tokens)[:MOST_TOKENS]:
            self._alive.pop(token, None)  # behind the others: the first ones were not heard longest
            self._alive[token] = now
        # While nobody asks for anything, nothing is forgotten.
        while len(self._alive) > 2 * MOST_TOKENS:
            del self._alive[next(iter(self._alive))]

    def begin(self, held: Mapping[int, Holder], now: float) -> None:
        """Give each holder the whole time: nobody knows when it gave its last sign of life."""
        self.lapses = {key: now + each.timeout_ms / 1000 for key, each in held.items()}

    def end(self) -> None:
        """The claims are somebody else's."""
        self.lapses, self._renewed = {}, {}

    def until(self, sequence: int, holder: Holder, now: float) -> float | None:
        """For a claim whose time is over: until when it holds all the same; None when it lapses."""
        with self._condition:
            alive = self._alive.get(holder.token, float("-inf"))
        # After a pause of its own the broker is as ignorant as a successor, and does as one.
        until = max(alive, self._steady_since()) + holder.timeout_ms / 1000
        if until > now:
            return until
        if now - self.lapses[sequence] > LATE_S and self._renewed.get(sequence) != holder.token:
            self._renewed[sequence] = holder.token
            return now + holder.timeout_ms / 1000
        return None

    def landed(self, lapses: Mapping[int, float | None]) -> None:
        """What a turn has changed is stored."""
        for sequence, at in lapses.items():
            if at is None:
                self.lapses.pop(sequence, None)
            else:
                self.lapses[sequence] = at

    def drop(self, token: int) -> None:
        """Its claim has ended."""
        with self._condition:
            self._alive.pop(token, None)

    def forget(self, held: Mapping[int, Holder]) -> None:
        """Keep what is held; what ended long ago is dropped now and then."""
        if len(self._alive) <= 2 * len(held) + 1_000:
            return
        tokens = {each.token for each in held.values()}
        self._renewed = {key: each for key, each in self._renewed.items() if each in tokens}
        with self._condition:
            self._alive = {key: at for key, at in self._alive.items() if key in tokens}
