"""A worker's claim of one batch: whether it may have lapsed, and what its end is told as. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opendata_buffer.broker.requests import MAX_REASON_CHARS
from opendata_buffer.runtime import Moment

__all__ = ["Claim"]


@dataclass(slots=True, eq=False)
class Claim:
    """What a worker knows of a claim that a broker gave it.

    Attributes:
        sequence: Of the batch.
        token: Drawn for this claim alone; names it to the broker.
        beaten: When the last heartbeat was sent that a broker answered; before the first one,
            when the claim was asked for.
        asked: An attempt to end it may have been stored: its answer was lost.
        over: It has ended, and that is known.
    """

    sequence: int
    token: int
    beaten: Moment
    asked: bool = False
    over: bool = False

    def is_sure(self, now: Moment, timeout_ms: int) -> bool:
        """Whether it cannot have lapsed: less than its time has passed since ``beaten``."""
        return self.beaten.precedes(now) and self.beaten.age_ms(now) < timeout_ms

    def end(self, how: str, *, reason: str = "", rest_ms: int = 0) -> dict[str, Any]:
        """The request that ends it.

        Args:
            how: ``done``, ``release`` or ``reject``.
            reason: Of a rejection.
            rest_ms: Of a release: not to be handed out again before.
        """
        return {
            "op": "finish",
            "n": 0,
            "how": how,
            "sequence": self.sequence,
            "token": self.token,
            "reason": reason[:MAX_REASON_CHARS],
            "rest_ms": rest_ms,
        }
