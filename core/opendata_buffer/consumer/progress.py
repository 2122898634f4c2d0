"""How far a reader that follows transactions has come in one queue; pure.

Entries come in the order of the manifest, and batches are delivered in the order in which
:class:`.ReadCommitted` releases them: those of a transaction at its acknowledgement. So a position
is a sequence, and a number of the batches that the next entry releases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from opendata_buffer.consumer.isolation import ReadCommitted, Replay
from opendata_buffer.consumer.position import Position
from opendata_buffer.errors import InvalidInput


@dataclass(slots=True)
class _Offered:
    """An entry of which not all released batches are processed."""

    sequence: int
    location: str
    released: list[int]
    processed: int = 0
    skipped: set[int] = field(default_factory=set)
    repeats: bool = False
    """Whether its batch was queued before: no rule needs to see it."""
    acked: bool = False
    """Whether its last batch was acknowledged, so that a saved position is behind the entry."""

    @property
    def done(self) -> bool:
        return self.processed == len(self.released)

    def move(self, by: int) -> None:
        """So many more batches are processed; skipped ones need no acknowledgement."""
        self.processed += by
        while not self.done and self.released[self.processed] in self.skipped:
            self.processed += 1


class QueueProgress:
    """The delivered, processed and needed entries of one queue. Not thread-safe; pure.

    It has two filters, one at the entry that is offered next and one at the last entry whose
    batches are all processed. Positions are the state of the second one. Without a position the
    first entry is that of sequence ``start``.
    """

    def __init__(
        self,
        prefix: str,
        isolation: str,
        start: int = 0,
        position: Position | None = None,
    ) -> None:
        self._prefix = prefix
        if position is None or not position.transactions:
            self._ahead = ReadCommitted(prefix, isolation)
        else:
            self._ahead = ReadCommitted.from_dict(dict(position.transactions), prefix, isolation)
        self._behind = self._ahead.copy()
        self.next_offer = start if position is None else position.sequence + 1
        """Sequence of the entry to be offered next."""
        self._next_processed = self.next_offer
        self._already = 0 if position is None else position.delivered
        self._offered: deque[_Offered] = deque()
        self.kept_from = self.first_needed
        """The first sequence that must stay in the manifest for positions, which are saved with
        batches. Markers and rolled back batches behind the last acknowledged one must stay: to
        a reader that resumes, their absence would look like a loss."""

    @property
    def idle(self) -> bool:
        """Whether everything offered is processed, and no transaction is undecided."""
        return not self._offered and self._behind.stable_end(self.next_offer) == self.next_offer

    @property
    def first_needed(self) -> int:
        """The first sequence that a reader needs that resumes at :meth:`position`."""
        return self._behind.stable_end(self._next_processed)

    def offer(
        self, sequence: int, location: str, replay: Replay, *, repeats: bool = False
    ) -> list[int]:
        """The sequences to deliver once this next entry is known, in order.

        Of one that ``repeats`` an earlier entry there are none. Entries that are missing before it
        are lost; an entry before the position is ignored.
        """
        if sequence < self.next_offer:
            return []
        if sequence > self.next_offer:
            self._ahead.lost(sequence - 1)
            self._already = 0
        released = [] if repeats else self._ahead.offer(sequence, location, replay)
        self.next_offer = sequence + 1
        # The entry may release a transaction that was processed in part before the restart.
        processed, self._already = min(self._already, len(released)), 0
        self._offered.append(_Offered(sequence, location, released, processed, repeats=repeats))
        if not self._offered[0].released:
            self._advance(replay)
        return released[processed:]

    def ack(self, sequence: int, replay: Replay) -> None:
        """Acknowledge the first delivered batch that is not processed; refuse any other one."""
        refused = f"cannot ack sequence {sequence} of {self._prefix}: "
        each = next((each for each in self._offered if not each.done), None)
        if each is None:
            raise InvalidInput(f"{refused}everything that was delivered is acknowledged")
        wanted = each.released[each.processed]
        if wanted != sequence:
            raise InvalidInput(
                f"{refused}{wanted} comes first. Acknowledge batches in the order in which "
                "they were delivered."
            )
        each.acked = each.processed == len(each.released) - 1
        each.move(1)
        self._advance(replay)

    def check_next(self, sequences: Sequence[int]) -> None:
        """Raise ``InvalidInput`` unless these are the next to be acknowledged, in this order."""
        waiting = [
            each
            for offered in self._offered
            for each in offered.released[offered.processed :]
            if each not in offered.skipped
        ]
        if waiting[: len(sequences)] != list(sequences):
            raise InvalidInput(
                f"cannot process sequences {list(sequences)} of {self._prefix} next: "
                f"{waiting[: len(sequences)]} come first. Take batches in the order of delivery."
            )

    def skip(self, sequence: int, replay: Replay) -> None:
        """Skip a delivered batch: it needs no acknowledgement any more."""
        for each in self._offered:
            if sequence in each.released[each.processed :]:
                each.skipped.add(sequence)
                each.move(0)
                self._advance(replay)
                return
        raise self._unknown(sequence)

    def position(self, queue_id: str) -> Position | None:
        """Where to resume; None before the queue's first entry is processed."""
        if not self._next_processed:
            return None
        # After a restart the entry may not be offered again yet.
        processed = self._offered[0].processed if self._offered else self._already
        return self._position(queue_id, self._next_processed - 1, processed, self._behind)

    def position_after(self, sequence: int, queue_id: str, replay: Replay) -> Position:
        """Where to resume once this batch, and all delivered before it, are processed."""
        behind, last, found = self._behind.copy(), self._next_processed - 1, False
        for each in self._offered:
            if found and not each.done:
                break
            if sequence in each.released[each.processed :]:
                found = True
                processed = each.released.index(sequence) + 1
                if processed < len(each.released):
                    return self._position(queue_id, last, processed, behind)
            self._catch_up(behind, last, each, replay)
            last = each.sequence
        if not found:
            raise self._unknown(sequence)
        return self._position(queue_id, last, 0, behind)

    def prune(self, now_ms: int) -> None:
        """See :meth:`.ReadCommitted.prune`."""
        self._ahead.prune(now_ms)
        self._behind.prune(now_ms)

    def _unknown(self, sequence: int) -> InvalidInput:
        return InvalidInput(
            f"sequence {sequence} of {self._prefix} was not delivered, or is acknowledged already"
        )

    def _position(
        self, queue_id: str, sequence: int, processed: int, behind: ReadCommitted
    ) -> Position:
        state = behind.to_dict()
        plain = state == ReadCommitted(self._prefix).to_dict()
        return Position(queue_id, sequence, processed, {} if plain else state)

    def _advance(self, replay: Replay) -> None:
        while self._offered and self._offered[0].done:
            each = self._offered.popleft()
            self._catch_up(self._behind, self._next_processed - 1, each, replay)
            self._next_processed = each.sequence + 1
            if each.acked:
                self.kept_from = self.first_needed

    @staticmethod
    def _catch_up(behind: ReadCommitted, last: int, each: _Offered, replay: Replay) -> None:
        if each.sequence > last + 1:
            behind.lost(each.sequence - 1)
        if not each.repeats:
            behind.offer(each.sequence, each.location, replay)
