"""How far a consumer has read and acknowledged: a pure value, no IO.

Three cursors, each the sequence that comes next, move over the queue in this order::

    dequeued ............ acknowledged ............ handed out ............ end of queue
              next_dequeue              next_ack                 next_hand_out

Every move returns a new value or raises, so a consumer that fails halfway through a manifest
write still has the value from before it (OpenData RFC 0003, ack_through).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from opendata_buffer.errors import InvalidInput

__all__ = ["Frontier"]


@dataclass(frozen=True, slots=True)
class Frontier:
    """The cursors of one consumer.

    Attributes:
        next_dequeue: Everything before is out of the manifest.
        next_ack: Everything before is acknowledged.
        next_hand_out: Everything before was handed out or skipped.
        skipped: Unacknowledged sequences that were given up; ``ack`` may pass over them.
    """

    next_dequeue: int
    next_ack: int
    next_hand_out: int
    skipped: frozenset[int] = frozenset()

    @classmethod
    def at(cls, next_sequence: int) -> Frontier:
        """A consumer that starts reading at ``next_sequence``."""
        return cls(next_sequence, next_sequence, next_sequence)

    @property
    def last_acked(self) -> int | None:
        """The last acknowledged sequence; None when there is none before the cursor."""
        return self.next_ack - 1 if self.next_ack else None

    @property
    def last_handed_out(self) -> int | None:
        """The last sequence handed out; None when there is none before the cursor."""
        return self.next_hand_out - 1 if self.next_hand_out else None

    @property
    def undequeued(self) -> int:
        """Acknowledged entries that the manifest still lists."""
        return self.next_ack - self.next_dequeue

    def hand_out(self, through: int) -> Frontier:
        """Sequences up to and including ``through`` were handed out; earlier ones may be again."""
        return replace(self, next_hand_out=max(self.next_hand_out, through + 1))

    def skip(self, sequence: int) -> Frontier:
        """Give up one sequence: the next to be handed out, or one that was and is not acked.

        Raises:
            InvalidInput: Any other sequence. Nothing changed.
        """
        if not self.next_ack <= sequence <= self.next_hand_out:
            raise InvalidInput(
                f"cannot skip sequence {sequence}: only {self._range(self.next_hand_out)} can be "
                "skipped, those handed out and not acknowledged and the next one"
            )
        return replace(
            self,
            next_hand_out=max(self.next_hand_out, sequence + 1),
            skipped=self.skipped | {sequence},
        )

    def ack(self, sequence: int) -> Frontier:
        """Acknowledge the next sequence; skipped ones before it need no acknowledgement.

        Raises:
            InvalidInput: It was not handed out, is acknowledged already, or leaves a gap
                (failure F26). Nothing changed.
        """
        self._check(sequence)
        missing = next(
            (each for each in range(self.next_ack, sequence) if each not in self.skipped), None
        )
        if missing is not None:
            raise InvalidInput(
                f"cannot ack sequence {sequence}: {missing} comes first. Acknowledge in order, or "
                "everything up to a sequence with ack_through."
            )
        return self._acked(sequence)

    def ack_through(self, sequence: int) -> Frontier:
        """Acknowledge everything up to and including ``sequence``.

        Raises:
            InvalidInput: It was not handed out (failure F27) or is acknowledged already.
                Nothing changed.
        """
        self._check(sequence)
        return self._acked(sequence)

    def dequeued(self) -> Frontier:
        """All that is acknowledged has left the manifest."""
        return replace(self, next_dequeue=self.next_ack)

    def jump(self, next_sequence: int) -> Frontier:
        """Go on at a later sequence because those before it are lost."""
        return Frontier(
            max(self.next_dequeue, next_sequence),
            max(self.next_ack, next_sequence),
            max(self.next_hand_out, next_sequence),
            frozenset(each for each in self.skipped if each >= next_sequence),
        )

    def _acked(self, sequence: int) -> Frontier:
        skipped = self.skipped and frozenset(each for each in self.skipped if each > sequence)
        return replace(self, next_ack=sequence + 1, skipped=skipped)

    def _check(self, sequence: int) -> None:
        if sequence < self.next_ack:
            raise InvalidInput(
                f"cannot ack sequence {sequence}: everything through {self.next_ack - 1} is "
                "acknowledged already"
            )
        if sequence >= self.next_hand_out:
            raise InvalidInput(
                f"cannot ack sequence {sequence}: it was not handed out. "
                f"{self._range(self.next_hand_out - 1).capitalize()} can be acknowledged."
            )

    def _range(self, last: int) -> str:
        if last < self.next_ack:
            return "nothing"
        if last == self.next_ack:
            return f"sequence {last}"
        return f"sequences {self.next_ack} to {last}"
