"""How far a consumer has read and acknowledged: pure values, without IO and without Arrow.

Three cursors, each the sequence that comes next, move over the queue in this order::

    dequeued ............ acknowledged ............ handed out ............ end of queue
              next_dequeue              next_ack                 next_hand_out

Every move returns a new value or raises, so a consumer that fails halfway through a manifest
write still has the value from before it (OpenData RFC 0003, ack_through).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace

from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.entries import Metadata, QueueEntry
from opendata_buffer.formats.manifest import Manifest

log = logging.getLogger(__name__)

_FORM = re.compile(r"(?:([^\s:]+):)?([0-9]{1,20})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """The last batch of one queue that is surely processed.

    A sequence alone says nothing about a queue that was deleted and made again at the same
    place: its first batches would pass for read (failure F4). So save this, in the transaction
    that writes the records, and start the next consumer with it. It pickles, and
    ``Position.parse(str(position)) == position``::

        01JD5T4R3KXBMZ7QV9N2WG8Y00:41

    Attributes:
        queue_id: Of the queue; empty for one whose owner marker has none.
        sequence: Of the batch.
    """

    queue_id: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.queue_id}:{self.sequence}" if self.queue_id else str(self.sequence)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read what ``str`` printed. A bare sequence is a position in whatever queue is there.

        Raises:
            InvalidInput: It is no position.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise InvalidInput(
                f"position is {text!r}: use '<queue id>:<sequence>', as Consumer.position prints it"
            )
        return cls(found[1] or "", int(found[2]))

    @classmethod
    def of(cls, given: Position | int | str) -> Position:
        """A position from any of its forms; an int is a sequence in whatever queue is there.

        Raises:
            InvalidInput: It is none.
        """
        if isinstance(given, Position):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise InvalidInput(
                f"last_acked_sequence is {given!r}: use a sequence, a Position, or None to start "
                "at the oldest queued batch"
            )
        return cls("", given)


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """One queued batch that was handed out and is to be fetched. Small, hashable, picklable.

    Attributes:
        sequence: Position in the queue.
        location: Key of the batch object, relative to the store.
        metadata: Ranges of records with their ingestion time and payload.
        size: Bytes of the object, where a listing has shown them.
    """

    sequence: int
    location: str
    metadata: tuple[Metadata, ...] = ()
    size: int | None = None

    @classmethod
    def of(cls, entry: QueueEntry, size: int | None = None) -> BatchDescriptor:
        """The descriptor of a manifest entry."""
        return cls(entry.sequence, entry.location, entry.metadata, size)


@dataclass(frozen=True, slots=True)
class Cursors:
    """The cursors of one consumer, and the unacknowledged sequences that were ``skipped``."""

    next_dequeue: int
    next_ack: int
    next_hand_out: int
    skipped: frozenset[int] = frozenset()

    @classmethod
    def at(cls, next_sequence: int) -> Cursors:
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

    def hand_out(self, through: int) -> Cursors:
        """Sequences up to and including ``through`` were handed out; earlier ones may be again."""
        return replace(self, next_hand_out=max(self.next_hand_out, through + 1))

    def skip(self, sequence: int) -> Cursors:
        """Give up one sequence: the next to be handed out, or one that was and is not acked."""
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

    def ack(self, sequence: int) -> Cursors:
        """Acknowledge the next sequence and no other (failure F26); skipped ones are passed."""
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

    def ack_through(self, sequence: int) -> Cursors:
        """Acknowledge all up to and including a sequence that was handed out (failure F27)."""
        self._check(sequence)
        return self._acked(sequence)

    def dequeued(self) -> Cursors:
        """All that is acknowledged has left the manifest."""
        return replace(self, next_dequeue=self.next_ack)

    def jump(self, next_sequence: int) -> Cursors:
        """Go on at a later sequence because those before it are lost."""
        return Cursors(
            max(self.next_dequeue, next_sequence),
            max(self.next_ack, next_sequence),
            max(self.next_hand_out, next_sequence),
            frozenset(each for each in self.skipped if each >= next_sequence),
        )

    def _acked(self, sequence: int) -> Cursors:
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


def check_data_loss(
    cursors: Cursors, manifest: Manifest, key: str, *, allowed: bool, cause: str
) -> Cursors:
    """The cursors, moved to where the queue begins if entries are gone that were not handed out.

    Unless that is ``allowed``, ``DataLoss`` with the ``cause`` in a sentence (failure F28).
    """
    needed, oldest = cursors.next_hand_out, manifest.first_sequence
    if oldest <= needed:
        return cursors
    if not allowed:
        raise DataLoss(key, needed, oldest, cause)
    warn_data_loss(key, needed, oldest)
    return cursors.jump(oldest)


def warn_data_loss(key: str, needed: int, oldest: int) -> None:
    """Warn that entries from ``needed`` up to ``oldest`` are passed by."""
    log.warning(
        "data loss allowed: %s starts at %d, sequences %d to %d are gone unread",
        key,
        oldest,
        needed,
        oldest - 1,
    )
