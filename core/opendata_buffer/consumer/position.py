"""Positions in a queue: those that a program saves, and the progress of a consumer. No I/O.

The problem: a program saves with its results how far it has read. At its next start it must get
every batch after that and none before. The number of the last entry is not enough. Transactions
release batches late: an acknowledgement of a transaction releases all of its batches, and the
program may stop in the middle of these. And batches of an open transaction lie before the position
but are delivered after it.

The idea: a position has three parts. They are the last entry whose batches are all processed, the
number of processed batches among those that the next entry releases, and the state of the rule of
transactions at that last entry. For example, producer A writes 0 and 2, and commits with entry 3;
entry 1 has no transaction::

    entry       0    1    2    3
    releases         1         0, 2

    after batch 1 is processed     sequence 2, delivered 0, and A's transaction is open since 0
    after batch 0 is processed     sequence 2, delivered 1
    after batch 2 is processed     sequence 3, delivered 0

What can go wrong: a reader that resumes needs the open transaction's entries again, from 0 on. So
:attr:`QueueProgress.first_needed` tells which entries must stay in the queue. Batches are processed
in the order of delivery, and only the next one can be acknowledged. Otherwise a position would skip
a batch.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opendata_buffer.arguments import check_fields, checked, wrong_type
from opendata_buffer.consumer.isolation import ReadCommitted, Replay
from opendata_buffer.errors import InvalidInput
from opendata_buffer.queue.sidecar import is_number

_PLAIN = re.compile(r"(?:([^\s:{]+):)?([0-9]{1,20})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in one queue, up to which everything is processed.

    A sequence alone does not show that a queue was deleted and created again at the same place. The
    first batches of the new queue would then count as processed (failure F4). So save this object
    in the transaction that writes the records, and start the next consumer with it::

        with database.transaction():
            write(batch.records())
            save(str(consumer.position_of(batch)))
        batch.ack()
        ...
        consumer = Consumer("s3://bucket/orders", load())

    It can be pickled, and ``Position.parse(str(position)) == position``. With transactions its
    string is a line of JSON, otherwise::

        01JD5T4R3KXBMZ7QV9N2WG8Y00:41

    Attributes:
        queue_id: The queue's id; empty for a queue whose owner marker has none.
        sequence: The last entry of the manifest whose batches are all processed.
        delivered: How many of the batches that the next entry releases are processed too. The end
            of a transaction releases all of its batches.
        transactions: Writers and open transactions there, as :meth:`.ReadCommitted.to_dict`.
    """

    queue_id: str
    sequence: int
    delivered: int = 0
    transactions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        if not self.delivered and not self.transactions:
            return f"{self.queue_id}:{self.sequence}" if self.queue_id else str(self.sequence)
        fields: dict[str, Any] = {"queue": self.queue_id, "sequence": self.sequence}
        if self.delivered:
            fields["delivered"] = self.delivered
        if self.transactions:
            fields["transactions"] = self.transactions
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    @checked
    def parse(cls, text: str) -> Position:
        """Parse the result of ``str``. A bare sequence is a position in whatever queue is there.

        Args:
            text: The result of ``str``, or a sequence in decimal digits.

        Returns:
            The position.

        Raises:
            InvalidInput: The text is not a position.
        """
        found = _PLAIN.fullmatch(text)
        if found is not None:
            return cls(found[1] or "", int(found[2]))
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            fields = None
        match fields:
            case {"queue": str(queue_id), "sequence": sequence} if is_number(sequence):
                delivered = fields.get("delivered", 0)
                transactions = fields.get("transactions", {})
                if is_number(delivered) and isinstance(transactions, dict):
                    return cls(queue_id, sequence, delivered, transactions)
        raise InvalidInput(
            f"position is {text!r:.200}: use what str() of Consumer.position or batch.position "
            "gave. To begin at a place, use start, such as start='latest'"
        )

    @classmethod
    def of(cls, given: Position | int | str) -> Position:
        """Return a position from any of its forms.

        An int is a sequence in whatever queue is there.

        Args:
            given: A position, its text, or a sequence of at least 0.

        Returns:
            The position.

        Raises:
            InvalidInput: ``given`` is not a position.
        """
        if isinstance(given, Position):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        use = "a Position, its text, a sequence, or None to start at the oldest queued batch"
        if type(given) is not int:
            raise wrong_type("position", given, use)
        if given < 0:
            raise InvalidInput(f"position is {given!r}: use {use}")
        return cls("", given)


@dataclass(frozen=True, slots=True)
class Cursors:
    """The cursors of one consumer, and the unacknowledged sequences that were ``skipped``.

    There are three cursors. Each is the sequence that comes next, and they move over the queue in
    this order::

        dequeued ............ acknowledged ............ handed out ............ end of queue
                  next_dequeue              next_ack                 next_hand_out

    Every move returns a new value or raises, so a failed write leaves the earlier value in place.
    """

    next_dequeue: int
    next_ack: int
    next_hand_out: int
    skipped: frozenset[int] = frozenset()

    @classmethod
    def at(cls, next_sequence: int) -> Cursors:
        """Return the cursors of a consumer that starts reading at ``next_sequence``."""
        return cls(next_sequence, next_sequence, next_sequence)

    @property
    def last_acked(self) -> int | None:
        """The last acknowledged sequence; None before the first."""
        return self.next_ack - 1 if self.next_ack else None

    @property
    def last_handed_out(self) -> int | None:
        """The last sequence handed out; None before the first."""
        return self.next_hand_out - 1 if self.next_hand_out else None

    @property
    def undequeued(self) -> int:
        """The number of acknowledged entries that the manifest still lists."""
        return self.next_ack - self.next_dequeue

    @property
    def next_open(self) -> int:
        """The first sequence that is neither acknowledged nor skipped."""
        found = self.next_ack
        while found in self.skipped:
            found += 1
        return found

    def hand_out(self, through: int, repeats: Iterable[int] = ()) -> Cursors:
        """Move past entries that were handed out.

        Args:
            through: The last sequence that was handed out.
            repeats: Those among them that count as skipped.

        Returns:
            The cursors after ``through``.
        """
        return replace(
            self,
            next_hand_out=max(self.next_hand_out, through + 1),
            skipped=self.skipped.union(repeats),
        )

    def skip(self, sequence: int) -> Cursors:
        """Give up one sequence: the next one, or one that was handed out and not acknowledged.

        Args:
            sequence: The sequence of the batch.

        Returns:
            The cursors, which pass it.

        Raises:
            InvalidInput: The batch comes later than the next one, or is acknowledged already.
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

    def ack(self, sequence: int) -> Cursors:
        """Acknowledge the next sequence and no other (failure F26). Skipped ones are passed.

        Args:
            sequence: The sequence of the batch.

        Returns:
            The cursors after it.

        Raises:
            InvalidInput: The batch was not handed out, is acknowledged already, or is not the next
                one.
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

    def ack_through(self, sequence: int) -> Cursors:
        """Acknowledge all up to and including a sequence that was handed out (failure F27)."""
        self._check(sequence)
        return self._acked(sequence)

    def check_next(self, sequences: Iterable[int]) -> None:
        """Check that these are the next to be acknowledged, in this order.

        Args:
            sequences: The sequences of the batches.

        Raises:
            InvalidInput: Others come first.
        """
        cursors = self
        for each in sequences:
            cursors = cursors.ack(each)

    def dequeued(self) -> Cursors:
        """Return the cursors after everything that is acknowledged has left the manifest."""
        return replace(self, next_dequeue=self.next_ack)

    def jump(self, next_sequence: int) -> Cursors:
        """Return the cursors at a later sequence, because the entries before it are lost."""
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


@dataclass(slots=True)
class _Offered:
    """An entry with released batches that are not all processed yet."""

    sequence: int
    location: str
    released: list[int]
    processed: int = 0
    skipped: set[int] = field(default_factory=set)
    repeats: bool = False
    """Whether its batch was queued before. Such an entry does not change the state of any rule."""
    acked: bool = False
    """Whether its last batch was acknowledged, so that a saved position is past the entry."""

    @property
    def done(self) -> bool:
        return self.processed == len(self.released)

    def move(self, by: int) -> None:
        """Count ``by`` more batches as processed. Skipped ones need no acknowledgement."""
        self.processed += by
        while not self.done and self.released[self.processed] in self.skipped:
            self.processed += 1


class QueueProgress:
    """The progress of delivery and processing in a queue, for a reader that uses transactions.

    It keeps the rule's state at two places: at the entry that is offered next, and at the last
    processed entry. Positions contain the state of the second place. Not thread-safe.

    Args:
        prefix: The queue's data prefix.
        isolation: Which batches are delivered; see :class:`.ReadCommitted`.
        start: The first sequence to be offered, without a position.
        position: Where to resume; None to begin at ``start``.
    """

    def __init__(
        self, prefix: str, isolation: str, start: int = 0, position: Position | None = None
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
        batches. Markers and rolled-back batches after the last acknowledged one must stay, because
        a reader that resumes would take their absence for a loss."""

    @property
    def idle(self) -> bool:
        """Whether everything offered is processed, and no transaction is undecided."""
        return not self._offered and self._behind.stable_end(self.next_offer) == self.next_offer

    @property
    def open_from(self) -> int | None:
        """The first sequence of the transactions that are undecided after the last offer.

        None if all are decided.
        """
        first = self._ahead.stable_end(self.next_offer)
        return first if first < self.next_offer else None

    @property
    def first_needed(self) -> int:
        """The first sequence that a reader needs if it resumes at :meth:`position`."""
        return self._behind.stable_end(self._next_processed)

    def offer(
        self, sequence: int, location: str, replay: Replay, *, repeats: bool = False
    ) -> list[int]:
        """Note the next entry, and return the sequences that can be delivered now.

        Missing entries before it count as lost. Entries before the position are ignored.

        Args:
            sequence: The entry's sequence.
            location: The entry's location.
            replay: Returns earlier entries again; see :meth:`.ReadCommitted.offer`.
            repeats: The entry repeats another, and is not delivered.

        Returns:
            The sequences to deliver, in order.
        """
        if sequence < self.next_offer:
            return []
        if sequence > self.next_offer:
            self._ahead.lost(sequence - 1)
            self._already = 0
        released = [] if repeats else self._ahead.offer(sequence, location, replay)
        self.next_offer = sequence + 1
        # The entry may release a transaction that was partly processed before the restart.
        processed, self._already = min(self._already, len(released)), 0
        self._offered.append(_Offered(sequence, location, released, processed, repeats=repeats))
        if not self._offered[0].released:
            self._advance(replay)
        return released[processed:]

    def ack(self, sequence: int, replay: Replay) -> None:
        """Acknowledge the first delivered batch that is not processed.

        Args:
            sequence: Sequence of the batch.
            replay: Returns earlier entries again; see :meth:`.ReadCommitted.offer`.

        Raises:
            InvalidInput: Another batch comes first.
        """
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
        """Check that these are the next to be acknowledged, in this order.

        Args:
            sequences: The sequences of the batches.

        Raises:
            InvalidInput: Others come first.
        """
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
        """Skip a delivered batch. It needs no acknowledgement any more.

        Args:
            sequence: The sequence of the batch.
            replay: Returns earlier entries again; see :meth:`.ReadCommitted.offer`.

        Raises:
            InvalidInput: The batch was not delivered, or is acknowledged already.
        """
        for each in self._offered:
            if sequence in each.released[each.processed :]:
                each.skipped.add(sequence)
                each.move(0)
                self._advance(replay)
                return
        raise self._unknown(sequence)

    def position(self, queue_id: str) -> Position | None:
        """Return where to resume; None before the queue's first entry is processed."""
        if not self._next_processed:
            return None
        # After a restart, this entry may not have been offered again yet.
        processed = self._offered[0].processed if self._offered else self._already
        return self._position(queue_id, self._next_processed - 1, processed, self._behind)

    def position_after(self, sequence: int, queue_id: str, replay: Replay) -> Position:
        """Return where to resume once this batch, and all delivered before it, are processed.

        Args:
            sequence: Sequence of a delivered batch.
            queue_id: The queue's id, which becomes part of the position.
            replay: Returns earlier entries again; see :meth:`.ReadCommitted.offer`.

        Returns:
            The position.

        Raises:
            InvalidInput: The batch was not delivered, or is acknowledged already.
        """
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
        """Forget old writers; see :meth:`.ReadCommitted.prune`."""
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
