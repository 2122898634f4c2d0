"""How far a reader is in one partition: what is delivered, processed, and may be let go. Pure.

Entries come in the order of the manifest; batches are delivered in the order in which
:class:`.ReadCommitted` releases them, which for transactions is later. Both orders are fixed by
the manifest alone. So a position is a place in the first order, and how many batches of the
next entry are processed; whoever resumes there goes on with exactly the next batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from opendata_buffer.consumer.read_committed import ReadCommitted, Replay
from opendata_buffer.errors import InvalidInput
from opendata_buffer.topic.position import PartitionPosition

__all__ = ["Progress"]


@dataclass(slots=True)
class _Offered:
    """An entry that was offered, and not all it releases is processed yet."""

    sequence: int
    location: str
    released: list[int]
    processed: int = 0
    skipped: set[int] = field(default_factory=set)
    acked: bool = False
    """Whether its last batch was acknowledged: then a position that was saved is behind it."""

    @property
    def done(self) -> bool:
        return self.processed == len(self.released)

    def move(self, by: int) -> None:
        """So many more are processed; given up ones need no acknowledgement."""
        self.processed += by
        while not self.done and self.released[self.processed] in self.skipped:
            self.processed += 1


class Progress:
    """The state of a reader in one partition. Not thread-safe.

    It keeps the rule twice: where entries are offered, and where they are processed. The second
    one trails behind and is what positions are made of.

    Args:
        partition: The data prefix.
        isolation: See :class:`.ReadCommitted`.
        start: Sequence of the first entry there is, without a position.
        position: Where to go on.

    Raises:
        InvalidInput: The position's transactions cannot be read, or no such isolation.
    """

    def __init__(
        self,
        partition: str,
        isolation: str,
        start: int = 0,
        position: PartitionPosition | None = None,
    ) -> None:
        self._partition = partition
        if position is None or not position.transactions:
            self._ahead = ReadCommitted(partition, isolation)
        else:
            self._ahead = ReadCommitted.from_dict(dict(position.transactions), partition, isolation)
        self._behind = self._ahead.copy()
        self._next_offer = start if position is None else position.sequence + 1
        self._next_processed = self._next_offer
        self._already = 0 if position is None else position.delivered
        self._offered: deque[_Offered] = deque()
        self._kept_from = self.floor

    @property
    def next_offer(self) -> int:
        """Sequence of the entry to be offered next."""
        return self._next_offer

    @property
    def idle(self) -> bool:
        """Whether everything offered is processed, and nothing waits to be decided."""
        return not self._offered and self._behind.floor(self._next_offer) == self._next_offer

    @property
    def floor(self) -> int:
        """The first sequence that whoever goes on at :meth:`position` still needs."""
        return self._behind.floor(self._next_processed)

    @property
    def kept_from(self) -> int:
        """The first one that must stay in the manifest: where the last acknowledged batch was.

        Positions are saved with batches. Entries behind the last one that deliver nothing, such as
        acknowledgements and what was rolled back, are behind its position, too: if they left, who
        goes on there would find a gap, and could not tell it from a loss.
        """
        return self._kept_from

    def offer(self, sequence: int, location: str, replay: Replay) -> list[int]:
        """Take the next entry in; the sequences that are to be delivered now, in order.

        An entry behind a gap is taken for the first one after a loss. One that was offered
        before the position is passed by.
        """
        if sequence < self._next_offer:
            return []
        if sequence > self._next_offer:
            # Both at once: what was released before the gap is delivered and acknowledged all the
            # same, and then stands for nothing that could still change.
            self._ahead.lost(sequence - 1)
            self._already = 0
        released = self._ahead.offer(sequence, location, replay)
        self._next_offer = sequence + 1
        # An acknowledgement whose transaction was in part processed before the restart.
        processed, self._already = min(self._already, len(released)), 0
        self._offered.append(_Offered(sequence, location, released, processed))
        if not self._offered[0].released:
            self._pass(replay)
        return released[processed:]

    def ack(self, sequence: int, replay: Replay) -> None:
        """The batch that was delivered first of those not yet processed is processed.

        Raises:
            InvalidInput: It is another batch's sequence. Nothing changed.
        """
        for each in self._offered:
            if not each.done:
                wanted = each.released[each.processed]
                if wanted == sequence:
                    each.acked = each.processed == len(each.released) - 1
                    each.move(1)
                    self._pass(replay)
                    return
                raise InvalidInput(
                    f"cannot ack sequence {sequence} of partition {self._partition}: {wanted} "
                    "comes first. Acknowledge the batches of a partition in the order in which "
                    "they were delivered."
                )
        raise InvalidInput(
            f"cannot ack sequence {sequence} of partition {self._partition}: everything that was "
            "delivered is acknowledged"
        )

    def skip(self, sequence: int, replay: Replay) -> None:
        """A batch was given up: it needs no acknowledgement any more.

        Raises:
            InvalidInput: It was not delivered, or is acknowledged already. Nothing changed.
        """
        for each in self._offered:
            if sequence in each.released[each.processed :]:
                each.skipped.add(sequence)
                each.move(0)
                self._pass(replay)
                return
        raise self._unknown(sequence)

    def position(self, queue_id: str) -> PartitionPosition | None:
        """Where to resume; None before the partition's first entry is processed."""
        if not self._next_processed:
            return None
        # Not offered again yet after a restart: what was processed of it still is.
        processed = self._offered[0].processed if self._offered else self._already
        return self._position(queue_id, self._next_processed - 1, processed, self._behind)

    def position_after(self, sequence: int, queue_id: str, replay: Replay) -> PartitionPosition:
        """Where to resume once this batch, and all delivered before it, are processed.

        Raises:
            InvalidInput: It was not delivered, or is acknowledged already.
        """
        rule, last, found = self._behind.copy(), self._next_processed - 1, False
        for each in self._offered:
            if found and not each.done:
                break
            if sequence in each.released[each.processed :]:
                found = True
                processed = each.released.index(sequence) + 1
                if processed < len(each.released):
                    return self._position(queue_id, last, processed, rule)
            self._catch_up(rule, last, each, replay)
            last = each.sequence
        if not found:
            raise self._unknown(sequence)
        return self._position(queue_id, last, 0, rule)

    def prune(self, now_ms: int) -> None:
        """See :meth:`.ReadCommitted.prune`."""
        self._ahead.prune(now_ms)
        self._behind.prune(now_ms)

    def _unknown(self, sequence: int) -> InvalidInput:
        return InvalidInput(
            f"sequence {sequence} of partition {self._partition} was not delivered, or is "
            "acknowledged already"
        )

    def _position(
        self, queue_id: str, sequence: int, processed: int, rule: ReadCommitted
    ) -> PartitionPosition:
        state = rule.to_dict()
        plain = state == ReadCommitted(self._partition).to_dict()
        return PartitionPosition(queue_id, sequence, processed, {} if plain else state)

    def _pass(self, replay: Replay) -> None:
        while self._offered and self._offered[0].done:
            each = self._offered.popleft()
            self._catch_up(self._behind, self._next_processed - 1, each, replay)
            self._next_processed = each.sequence + 1
            if each.acked:
                self._kept_from = self.floor

    @staticmethod
    def _catch_up(rule: ReadCommitted, last: int, each: _Offered, replay: Replay) -> None:
        if each.sequence > last + 1:
            rule.lost(each.sequence - 1)
        rule.offer(each.sequence, each.location, replay)
