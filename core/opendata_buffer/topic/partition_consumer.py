"""One partition of a topic as the topic's consumer reads it: position, progress and reader.

Entries come in the order of the manifest, and batches are delivered in the order in which
:class:`.ReadCommitted` releases them: those of a transaction at its acknowledgement. So a position
is a sequence, and a number of the batches that the next entry releases.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer, Position, warn_data_loss
from opendata_buffer.consumer.fetch import ArrowBatch, ConsumedBatch, PooledBatch
from opendata_buffer.consumer.isolation import ReadCommitted, Replay
from opendata_buffer.errors import DataLoss, Drained, InvalidInput, PoisonBatch, QueueReset
from opendata_buffer.formats.manifest import BatchDescriptor

_MAX_SEQUENCE = 2**64 - 1

POLL_ENTRIES = 256
"""Most entries that one poll takes."""


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """Everything up to here is processed. ``PartitionPosition.parse(str(position)) == position``.

    Attributes:
        queue_id: Of the partition's queue: a position of another queue is refused.
        sequence: Of the last entry of the manifest whose batches are all processed.
        delivered: How many of the batches that the next entry releases are processed, too: an
            acknowledgement releases those of a whole transaction.
        transactions: Writers and open transactions there, as :meth:`.ReadCommitted.to_dict`.
    """

    queue_id: str
    sequence: int
    delivered: int = 0
    transactions: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        fields: dict[str, Any] = {"queue": self.queue_id, "sequence": self.sequence}
        if self.delivered:
            fields["delivered"] = self.delivered
        if self.transactions:
            fields["transactions"] = self.transactions
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> PartitionPosition:
        """Read what ``str`` printed. ``InvalidInput`` if it is no position."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError, TypeError):
            fields = None
        match fields:
            case {"queue": str(queue_id), "sequence": int(sequence)} if (
                0 <= sequence <= _MAX_SEQUENCE
            ):
                delivered = fields.get("delivered", 0)
                transactions = fields.get("transactions", {})
                if isinstance(delivered, int) and delivered >= 0 and isinstance(transactions, dict):
                    return cls(queue_id, sequence, delivered, transactions)
        raise InvalidInput(
            f"position is {text!r:.200}: use what str() of TopicConsumer.positions gave"
        )

    @classmethod
    def of(cls, given: PartitionPosition | str) -> PartitionPosition:
        """A position from either of its forms. ``InvalidInput`` if it is none."""
        return given if isinstance(given, PartitionPosition) else cls.parse(given)


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


class PartitionProgress:
    """The delivered, processed and needed entries of one partition. Not thread-safe; pure.

    It has two filters, one at the entry that is offered next and one at the last entry whose
    batches are all processed. Positions are the state of the second one. Without a position the
    first entry is that of sequence ``start``.
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
        refused = f"cannot ack sequence {sequence} of partition {self._partition}: "
        each = next((each for each in self._offered if not each.done), None)
        if each is None:
            raise InvalidInput(f"{refused}everything that was delivered is acknowledged")
        wanted = each.released[each.processed]
        if wanted != sequence:
            raise InvalidInput(
                f"{refused}{wanted} comes first. Acknowledge the batches of a partition in the "
                "order in which they were delivered."
            )
        each.acked = each.processed == len(each.released) - 1
        each.move(1)
        self._advance(replay)

    def skip(self, sequence: int, replay: Replay) -> None:
        """Skip a delivered batch: it needs no acknowledgement any more."""
        for each in self._offered:
            if sequence in each.released[each.processed :]:
                each.skipped.add(sequence)
                each.move(0)
                self._advance(replay)
                return
        raise self._unknown(sequence)

    def position(self, queue_id: str) -> PartitionPosition | None:
        """Where to resume; None before the partition's first entry is processed."""
        if not self._next_processed:
            return None
        # After a restart the entry may not be offered again yet.
        processed = self._offered[0].processed if self._offered else self._already
        return self._position(queue_id, self._next_processed - 1, processed, self._behind)

    def position_after(self, sequence: int, queue_id: str, replay: Replay) -> PartitionPosition:
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
            f"sequence {sequence} of partition {self._partition} was not delivered, or is "
            "acknowledged already"
        )

    def _position(
        self, queue_id: str, sequence: int, processed: int, behind: ReadCommitted
    ) -> PartitionPosition:
        state = behind.to_dict()
        plain = state == ReadCommitted(self._partition).to_dict()
        return PartitionPosition(queue_id, sequence, processed, {} if plain else state)

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


class PartitionReader:
    """Owns and reads one partition's queue, behind a position or from its oldest batch on.

    Not thread-safe. Raises as :class:`.Consumer`, which ``open_consumer`` makes.
    """

    def __init__(
        self,
        open_consumer: Callable[[ConsumerConfig, Position | None], Consumer],
        isolation: str,
        allow_data_loss: bool,
        name: str,
        config: ConsumerConfig,
        position: PartitionPosition | None,
    ) -> None:
        self.name = name
        self.ready: deque[BatchDescriptor] = deque()
        """Batches to be delivered, in order."""
        self._ack_interval = config.ack_interval
        self._dequeued: deque[BatchDescriptor] = deque()
        """Taken from the consumer and not yet offered."""
        resumed, start = None, None
        if position is not None:
            resumed = PartitionProgress(name, isolation, position=position)
            if resumed.first_needed:  # there is no position before sequence 0
                start = Position(position.queue_id, resumed.first_needed - 1)
        self._consumer = open_consumer(config, start)
        self._handle = self._consumer.fetch_handle()
        try:
            if position is not None:
                self._check_queue(position)
            first = self._consumer.first_sequence
            if start is None and resumed is not None and first:
                # The position needs sequence 0, which the consumer did not check.
                if not allow_data_loss:
                    hint = "Another consumer read this queue. Accept the loss explicitly."
                    raise DataLoss(config.manifest_path, 0, first, hint)
                warn_data_loss(config.manifest_path, 0, first)
        except (QueueReset, DataLoss):
            self._consumer.close()
            raise
        self._progress = resumed or PartitionProgress(
            name, isolation, self._consumer.first_sequence
        )
        self._saves = position is not None
        """Whether the caller saves positions, as far as is known."""

    @property
    def finished(self) -> bool:
        """Whether everything up to the last poll is processed, and no transaction is undecided."""
        return not self._dequeued and not self.ready and self._progress.idle

    @property
    def position(self) -> PartitionPosition | None:
        """Where to resume; None before the queue's first batch."""
        self._saves = True
        return self._progress.position(self._queue_id)

    def position_after(self, sequence: int) -> PartitionPosition:
        """Where to resume once a delivered batch is processed."""
        self._saves = True
        return self._progress.position_after(sequence, self._queue_id, self._replay)

    def poll(self) -> bool:
        """Put new batches into :attr:`ready`. Whether there were entries, delivered or not."""
        # At least one, so that each poll finds out whether the consumer is fenced.
        room = max(1, POLL_ENTRIES - len(self.ready))
        self._dequeued.extend(self._consumer.next_entries(room))
        found = bool(self._dequeued)
        while self._dequeued:
            entry = self._dequeued[0]
            repeats = entry.repeats is not None
            for sequence in self._progress.offer(
                entry.sequence, entry.location, self._replay, repeats=repeats
            ):
                self.ready.append(entry if sequence == entry.sequence else self._queued(sequence))
            # Removed last: an entry that is never offered would look like a loss.
            self._dequeued.popleft()
        return found

    def read(self, descriptor: BatchDescriptor) -> PooledBatch:
        """Fetch one batch as it is stored; from any thread."""
        try:
            return self._handle.fetch_pooled(descriptor)
        except PoisonBatch as error:
            raise error.of(self.name) from error

    def decode(self, stored: PooledBatch, *, arrow: bool) -> ConsumedBatch | ArrowBatch:
        """The batch of :meth:`read` as a list of records, or as an Arrow array."""
        try:
            return self._handle.decode_arrow(stored) if arrow else self._handle.decode(stored)
        except PoisonBatch as error:
            raise error.of(self.name) from error

    def ack(self, sequence: int) -> None:
        """Acknowledge the next delivered batch; the manifest is written every ``ack_interval``."""
        self._progress.ack(sequence, self._replay)
        self.flush(self._ack_interval)

    def skip(self, sequence: int) -> None:
        """Skip a batch that cannot be delivered."""
        self._consumer.skip(sequence)
        self._progress.skip(sequence, self._replay)
        self.ready = deque(each for each in self.ready if each.sequence != sequence)

    def flush(self, least: int = 1) -> None:
        """Dequeue what is processed, if it is so many entries or more.

        Entries that an undecided transaction or a saved position needs stay, and all behind them.
        """
        progress = self._progress
        self._ack_before(progress.kept_from if self._saves else progress.first_needed, least)

    def flush_all(self) -> None:
        """Also dequeue what saved positions need; for a partition that is about to be sealed."""
        self._ack_before(self._progress.first_needed, 1)

    def _ack_before(self, before: int, least: int) -> None:
        last = self._consumer.last_acked_sequence
        if before - (0 if last is None else last + 1) >= least:
            self._consumer.ack_through(before - 1)

    def prune(self, now_ms: int) -> None:
        """Forget writers that have long ended."""
        self._progress.prune(now_ms)

    def close(self) -> None:
        """Write acknowledgements out and end; a sealed partition has none."""
        with suppress(Drained):
            try:
                self.flush()
            finally:
                self._consumer.close()

    @property
    def _queue_id(self) -> str:
        return self._consumer.position_of(0).queue_id

    def _check_queue(self, position: PartitionPosition) -> None:
        if position.queue_id and self._queue_id and position.queue_id != self._queue_id:
            raise QueueReset(
                f"cannot resume partition {self.name} after {position}: it belongs to queue "
                f"{self._queue_id}. The topic was deleted and made again, or the position is "
                "another topic's. Start without it to read what is queued now."
            )
        if position.sequence >= self._consumer.next_sequence:
            raise QueueReset(
                f"cannot resume partition {self.name} after {position}: its queue ends at "
                f"{self._consumer.next_sequence - 1}. Start without the position to read what is "
                "queued now."
            )

    def _replay(self, begin: int, end: int) -> Iterable[tuple[int, str]]:
        return [(each.sequence, each.location) for each in self._consumer.queued(begin, end)]

    def _queued(self, sequence: int) -> BatchDescriptor:
        (found,) = self._consumer.queued(sequence, sequence + 1)
        return found
