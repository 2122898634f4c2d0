"""One round of a dispatcher: what one group commit changes, and the answers once it has landed.

A round begins with the claims as they are stored. Claims without heartbeats lapse, finished batches
leave, free ones go to the workers that wait; all of it is in one new value of the claims, which is
then written at once. No answer is sent before, and nothing that outlives the round is changed but
the copies in the quarantine, which may be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from opendata_buffer.broker.claims import Claims, Heartbeats
from opendata_buffer.broker.protocol import (
    ClaimRequest,
    FinishRequest,
    Request,
    error_body,
    metadata_body,
)
from opendata_buffer.broker.secure_channel import MAX_MESSAGE_BYTES
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import ClaimLost, InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.ownership import queue_hint
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES // 2
"""About the size of one answer; the batches that do not fit are handed out later."""


class ReadyBatches:
    """The queue's batches that wait or are being worked on. Not thread-safe."""

    def __init__(self, store: Store, config: ConsumerConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._known: dict[int, BatchDescriptor] = {}
        self._stuck: set[int] = set()
        self.end = 0
        """Batches before this sequence are known."""
        self.read_at = float("-inf")
        """When the queue was last read for more, monotonic seconds."""
        self.rests: dict[int, float] = {}
        """Until when a released batch rests, monotonic seconds."""

    def begin(self, first: int) -> None:
        """Forget everything: the queue begins at this sequence."""
        self._known, self.rests, self.end = {}, {}, first

    def read_more(self, count: int, consumer: Consumer, now: float) -> bool:
        """Read which batches follow; False when there are none."""
        self.read_at = now
        found = consumer.next_entries(count)
        for each in found:
            self._known[each.sequence] = each
            self.end = each.sequence + 1
        return bool(found)

    def resting(self, now: float) -> set[int]:
        """Batches that are not to be handed out at this moment."""
        self.rests = {key: at for key, at in self.rests.items() if at > now}
        return {*self.rests, *self._stuck}

    def is_repeat(self, sequence: int) -> bool:
        """Whether the batch was queued before: then this entry is done."""
        return self._known[sequence].repeats is not None

    def size_of(self, sequence: int) -> int:
        """About how many bytes a batch takes in an answer."""
        known = self._known[sequence]
        ranges = sum(80 + len(each.payload) * 4 // 3 for each in known.metadata)
        return 200 + len(known.location) + ranges

    def body_of(self, sequence: int) -> dict[str, Any]:
        """A batch as an answer names it."""
        known = self._known[sequence]
        return {
            "sequence": sequence,
            "location": known.location,
            "metadata": metadata_body(known.metadata),
        }

    def quarantine(self, sequence: int, reason: str) -> bool:
        """Copy a batch to the quarantine; False when it is too large for that. It then stays in the
        queue and is not handed out: finished, it would be deleted."""
        try:
            quarantine(
                self._store,
                self._config.data_path_prefix,
                self._known[sequence],
                reason,
                query="worker",
                runtime=self._runtime,
            )
        except InvalidInput as error:
            self._stuck.add(sequence)
            log.error(
                "batch %d (%s) stays in the queue and is not handed out: %s. To pass it by: "
                "'opendata-buffer skip %s %d'",
                sequence,
                reason,
                error,
                queue_hint(self._store.url, self._config),
                sequence,
            )
            return False
        log.warning("batch %d goes to the quarantine: %s", sequence, reason)
        return True

    def drop_before(self, frontier: int) -> None:
        """Batches before it are acknowledged."""
        self._known = {key: each for key, each in self._known.items() if key >= frontier}
        self._stuck = {key for key in self._stuck if key >= frontier}


class DispatchRound:
    """What changes in one round that began at ``now``. Times are monotonic seconds.

    Attributes:
        claims: As they are to be stored.
        responses: Answers to send once that is stored.
        lapses: Of each batch whose claim changed, when it is checked next; None for never.
        rests: Until when released batches rest.
        ended: How claims ended in this round, by token.
        lapsed: How many claims lapsed.
    """

    def __init__(
        self,
        claims: Claims,
        ready: ReadyBatches,
        heartbeats: Heartbeats,
        ended_before: Mapping[int, str],
        now: float,
    ) -> None:
        self._ready = ready
        self._heartbeats = heartbeats
        self._ended_before = ended_before
        self._now = now
        self.claims = claims
        self.responses: list[Callable[[], None]] = []
        self.lapses: dict[int, float | None] = {}
        self.rests: dict[int, float] = {}
        self.ended: dict[int, str] = {}
        self.lapsed = 0

    def lapse(self) -> None:
        """Take batches from workers whose heartbeats stopped."""
        for sequence, at in self._heartbeats.lapses.items():
            holder = self.claims.held.get(sequence)
            if at > self._now or holder is None:
                continue
            until = self._heartbeats.until(sequence, holder, self._now)
            self.lapses[sequence] = until
            if until is None:
                log.warning("worker %s of batch %d sends no heartbeat", holder.worker, sequence)
                self.claims = self.claims.release(sequence)
                self.lapsed += 1

    def finish(self, request: FinishRequest) -> None:
        """End a claim as its worker asks, if the worker still holds it."""
        sequence, token = request.sequence, request.token
        if request.how == (self.ended.get(token) or self._ended_before.get(token)):
            # The worker did not get the answer, and asks again.
            self._respond(request, "finished")
            return
        if not self.claims.holds(sequence, token):
            self._respond(request, "failed", error=error_body(ClaimLost(sequence)))
            return
        if request.how == "release":
            self.claims = self.claims.release(sequence)
            self.rests[sequence] = self._now + request.rest_ms / 1000
        elif request.how == "done":
            self.claims = self.claims.finish(sequence)
        else:
            self.claims = self.claims.release(sequence)
            self._quarantine(sequence, request.reason)
        self.lapses[sequence] = None
        self.ended[token] = request.how
        self._heartbeats.drop(token)
        self._respond(request, "finished")

    def hand_out(
        self, claiming: Sequence[ClaimRequest], read_more: Callable[[int], object] | None
    ) -> list[ClaimRequest]:
        """Give free batches to the workers that wait longest; returns the requests that go on
        waiting.

        ``claiming`` are their requests, the oldest first. ``read_more`` reads so many more batches
        where too few are known; None when that is not to be done now.
        """
        ready = self._ready
        # Also when no worker waits: this forgets rests that are over.
        resting = ready.resting(self._now)
        resting.update(key for key, at in self.rests.items() if at > self._now)
        wanted = sum(each.most for each in claiming)
        free = self.claims.free(ready.end, resting) if wanted else []
        if len(free) < wanted and read_more is not None:
            read_more(wanted - len(free))
            free = self.claims.free(ready.end, resting)
        left = []
        place = 0
        for request in claiming:
            given: list[int] = []
            size = 0
            while len(given) < request.most and place < len(free):
                sequence = free[place]
                if ready.is_repeat(sequence):
                    self.claims = self.claims.finish(sequence)
                    place += 1
                    continue
                size += ready.size_of(sequence)
                if given and size > MAX_ANSWER_BYTES:
                    break
                place += 1
                count = self.claims.deliveries.get(sequence, 0)
                if 0 < request.max_deliveries <= count:
                    self._quarantine(sequence, f"handed out {count} times and never finished")
                    continue
                if ready.size_of(sequence) > MAX_ANSWER_BYTES:
                    reason = "its metadata is larger than what a broker and a worker exchange"
                    self._quarantine(sequence, reason)
                    continue
                given.append(sequence)
            if given:
                self._give(request, given)
            elif self._now >= request.until:
                self._respond(request, "claimed", batches=[])
            else:
                left.append(request)
        return left

    def _quarantine(self, sequence: int, reason: str) -> None:
        if self._ready.quarantine(sequence, reason):
            self.claims = self.claims.finish(sequence)

    def _give(self, request: ClaimRequest, given: Sequence[int]) -> None:
        self.claims = self.claims.claim(given, request.worker, request.timeout_ms)
        batches = []
        for sequence in given:
            self.lapses[sequence] = self._now + request.timeout_ms / 1000
            self.rests.pop(sequence, None)
            batches.append(
                {
                    **self._ready.body_of(sequence),
                    "token": self.claims.held[sequence].token,
                    "deliveries": self.claims.deliveries[sequence],
                }
            )
        self._respond(request, "claimed", batches=batches)

    def _respond(self, request: Request, op: str, **body: Any) -> None:
        self.responses.append(partial(request.respond, op, **body))
