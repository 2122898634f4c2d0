"""One turn of a foreman: what one group commit changes, and what is said once it has landed.

A turn begins with the claims as they are stored. Silent workers lose theirs, finished batches are
taken out, free ones are given to who waits; all of it is in one new value of the claims, which is
then written at once. Nothing is said before, and nothing that outlives the turn is changed but
what the shelf copies to the quarantine, which is free to repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opendata_buffer.broker.claims import Claims
from opendata_buffer.broker.heartbeats import Heartbeats
from opendata_buffer.broker.messages import error_body
from opendata_buffer.broker.requests import ClaimRequest, FinishRequest, Responder
from opendata_buffer.broker.shelf import MAX_ANSWER_BYTES, Shelf
from opendata_buffer.errors import ClaimLost

__all__ = ["Turn"]

log = logging.getLogger(__name__)


class Turn:
    """What changes in one turn. Times are monotonic seconds.

    Args:
        claims: As they are stored.
        shelf: The queue's batches.
        heartbeats: Who lives.
        ended_before: How the last claims ended, by token.
        now: When the turn began.

    Attributes:
        claims: As they shall be.
        said: Whom to answer what, once that is stored.
        lapses: Of each batch whose claim changed, when it is looked at next; None for never.
        rests: Until when released batches rest.
        ended: How claims ended in this turn, by token.
        lapsed: Claims that were lost by silence.
    """

    def __init__(
        self,
        claims: Claims,
        shelf: Shelf,
        heartbeats: Heartbeats,
        ended_before: Mapping[int, str],
        now: float,
    ) -> None:
        self._shelf = shelf
        self._heartbeats = heartbeats
        self._ended_before = ended_before
        self._now = now
        self.claims = claims
        self.said: list[tuple[Responder, dict[str, Any]]] = []
        self.lapses: dict[int, float | None] = {}
        self.rests: dict[int, float] = {}
        self.ended: dict[int, str] = {}
        self.lapsed = 0

    def lapse(self) -> None:
        """Take batches from workers that fell silent."""
        for sequence, at in self._heartbeats.lapses.items():
            holder = self.claims.held.get(sequence)
            if at > self._now or holder is None:
                continue
            until = self._heartbeats.until(sequence, holder, self._now)
            self.lapses[sequence] = until
            if until is None:
                log.warning("worker %s of batch %d fell silent", holder.worker, sequence)
                self.claims = self.claims.release(sequence)
                self.lapsed += 1

    def finish(self, request: FinishRequest) -> None:
        """End a claim as its worker says, if it is the worker's still."""
        sequence, token = request.sequence, request.token
        finished = {"op": "finished", "n": request.number}
        if request.how == (self.ended.get(token) or self._ended_before.get(token)):
            # Asked again, by a worker that heard no answer.
            self.said.append((request.answer, finished))
            return
        if not self.claims.holds(sequence, token):
            error = error_body(ClaimLost(sequence))
            self.said.append(
                (request.answer, {"op": "failed", "n": request.number, "error": error})
            )
            return
        if request.how == "release":
            self.claims = self.claims.release(sequence)
            self.rests[sequence] = self._now + request.rest_ms / 1000
        elif request.how == "done" or self._shelf.quarantine(sequence, request.reason):
            self.claims = self.claims.finish(sequence)
        else:
            self.claims = self.claims.release(sequence)
        self.lapses[sequence] = None
        self.ended[token] = request.how
        self._heartbeats.drop(token)
        self.said.append((request.answer, finished))

    def hand_out(
        self, claiming: Sequence[ClaimRequest], look: Callable[[int], object] | None
    ) -> list[ClaimRequest]:
        """Give what is free to who waits longest.

        Args:
            claiming: Who waits, the longest first.
            look: Looks for so many more batches, where too few are known; None when that is not
                to be done now.

        Returns:
            Who goes on waiting.
        """
        shelf = self._shelf
        # Also when nobody waits: rests that are over are forgotten by this.
        resting = shelf.resting(self._now)
        resting.update(key for key, at in self.rests.items() if at > self._now)
        wanted = sum(each.most for each in claiming)
        free = self.claims.free(shelf.end, resting) if wanted else []
        if len(free) < wanted and look is not None:
            look(wanted - len(free))
            free = self.claims.free(shelf.end, resting)
        left = []
        place = 0
        for request in claiming:
            given: list[int] = []
            size = 0
            while len(given) < request.most and place < len(free):
                sequence = free[place]
                size += shelf.size_of(sequence)
                if given and size > MAX_ANSWER_BYTES:
                    break
                place += 1
                if self._is_worn_out(sequence, request):
                    continue
                if shelf.size_of(sequence) > MAX_ANSWER_BYTES:
                    reason = "its metadata is larger than what a broker and a worker exchange"
                    if shelf.quarantine(sequence, reason):
                        self.claims = self.claims.finish(sequence)
                    continue
                given.append(sequence)
            if given:
                self._give(request, given)
            elif self._now >= request.until:
                body = {"op": "claimed", "n": request.number, "batches": []}
                self.said.append((request.answer, body))
            else:
                left.append(request)
        return left

    def _is_worn_out(self, sequence: int, request: ClaimRequest) -> bool:
        count = self.claims.deliveries.get(sequence, 0)
        if not 0 < request.max_deliveries <= count:
            return False
        if self._shelf.quarantine(sequence, f"handed out {count} times and never finished"):
            self.claims = self.claims.finish(sequence)
        return True

    def _give(self, request: ClaimRequest, given: Sequence[int]) -> None:
        self.claims = self.claims.claim(given, request.worker, request.timeout_ms)
        batches = []
        for sequence in given:
            self.lapses[sequence] = self._now + request.timeout_ms / 1000
            self.rests.pop(sequence, None)
            batches.append(
                {
                    **self._shelf.body_of(sequence),
                    "token": self.claims.held[sequence].token,
                    "deliveries": self.claims.deliveries[sequence],
                }
            )
        body = {"op": "claimed", "n": request.number, "batches": batches}
        self.said.append((request.answer, body))
