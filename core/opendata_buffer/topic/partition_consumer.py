"""One partition of a topic as its consumer reads it: a queue's consumer, and the rule over it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.cursors import Position, report_loss
from opendata_buffer.consumer.fetch import ArrowBatch, BatchDescriptor, ConsumedBatch, PooledBatch
from opendata_buffer.consumer.isolation import ReadCommitted, Replay
from opendata_buffer.errors import DataLoss, Drained, InvalidInput, PoisonBatch, QueueReset
from opendata_buffer.queue.queue import OpenPause, broker_pause
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["PartitionPosition", "PartitionReader", "Progress"]


# ---- Where a reader is in one partition of a topic ----
#
# As a value to be saved beside what it wrote.


_MAX_SEQUENCE = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PartitionPosition:
    """Everything up to here is processed. ``PartitionPosition.parse(str(position)) == position``.

    Attributes:
        queue_id: Of the partition's queue, so that a position is not taken for one in another.
        sequence: Of the last entry of the manifest whose batches are all processed.
        delivered: How many of the batches that the entry behind it releases are processed, too:
            an acknowledgement releases those of a whole transaction.
        transactions: What the reader knows of writers and open transactions at that point:
            :meth:`.ReadCommitted.to_dict`.
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
        """Read what ``str`` printed.

        Raises:
            InvalidInput: It is no position.
        """
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
        """A position from either of its forms.

        Raises:
            InvalidInput: It is none.
        """
        return given if isinstance(given, PartitionPosition) else cls.parse(given)


# ---- How far a reader is in one partition ----
#
# What is delivered, processed, and may be let go. Pure.
#
# Entries come in the order of the manifest; batches are delivered in the order in which
# :class:`.ReadCommitted` releases them, which for transactions is later. Both orders are fixed by
# the manifest alone. So a position is a place in the first order, and how many batches of the
# next entry are processed; whoever resumes there goes on with exactly the next batch.


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


LOOK = 256
"""Entries that one look takes at most."""


class PartitionReader:
    """Owns one partition's queue. Not thread-safe.

    Args:
        name: The partition.
        config: Its settings, as :meth:`.Topic.config_of` gives them.
        position: Where to go on; None: at the oldest queued batch.
        isolation: See :class:`.ReadCommitted`.
        store: Where it is.
        runtime: Clock and threads.
        allow_data_loss: Go on behind a gap.
        program: What reads it, for the person who asks.
        open_pause: See :class:`.Consumer`.

    Attributes:
        name: The partition.
        ready: Batches to be delivered, in order.

    Raises:
        Drained: It was closed for good.
        QueueReset: The position is of another queue, or beyond this one's end.
        DataLoss: What the position needs was taken by somebody else, and that is not allowed.
        OpenDataBufferError: As :class:`.Consumer`.
    """

    def __init__(
        self,
        name: str,
        config: ConsumerConfig,
        position: PartitionPosition | None,
        isolation: str,
        *,
        store: Store,
        runtime: Runtime,
        allow_data_loss: bool,
        program: str,
        open_pause: OpenPause = broker_pause,
    ) -> None:
        self.name = name
        self.ready: deque[BatchDescriptor] = deque()
        self._runtime = runtime
        self._ack_interval = config.ack_interval
        self._handed: deque[BatchDescriptor] = deque()
        resumed = None if position is None else Progress(name, isolation, position=position)
        self._consumer = Consumer(
            config,
            _start_of(position, resumed),
            store=store,
            runtime=runtime,
            allow_data_loss=allow_data_loss,
            program=program,
            open_pause=open_pause,
        )
        self._handle = self._consumer.fetch_handle()
        try:
            self._check(position)
            self._check_begin(resumed, config.manifest_path, allowed=allow_data_loss)
        except (QueueReset, DataLoss):
            self._consumer.close()
            raise
        self._progress = resumed or Progress(name, isolation, self._consumer.first_sequence)
        self._saves = position is not None  # Whether positions are saved, as far as is known.

    @property
    def finished(self) -> bool:
        """Whether all that was found at the last look is processed, and nothing is undecided."""
        return not self._handed and not self.ready and self._progress.idle

    @property
    def position(self) -> PartitionPosition | None:
        """Where to resume; None before the queue's first batch."""
        self._saves = True
        return self._progress.position(self._queue_id)

    def position_after(self, sequence: int) -> PartitionPosition:
        """Where to resume once a delivered batch is processed."""
        self._saves = True
        return self._progress.position_after(sequence, self._queue_id, self._replay)

    def look(self) -> bool:
        """Look at the manifest, and put what is to be delivered into :attr:`ready`.

        Returns whether there were new entries, delivered or not.

        Raises:
            Drained, Fenced, DataLoss, QueueReset, CorruptManifest, StorageError: Nothing new was
                taken.
        """
        # What is ready already is not looked for again and again; but whether the queue is still
        # this consumer's is looked at each time.
        room = max(1, LOOK - len(self.ready))
        self._handed.extend(self._consumer.next_descriptors(room))
        found = bool(self._handed)
        while self._handed:
            # Taken out when it was offered: an entry that is missed would pass for a loss.
            entry = self._handed[0]
            for sequence in self._progress.offer(entry.sequence, entry.location, self._replay):
                self.ready.append(entry if sequence == entry.sequence else self._queued(sequence))
            self._handed.popleft()
        return found

    def read(self, descriptor: BatchDescriptor) -> PooledBatch:
        """Fetch one batch as it is stored; from any thread."""
        try:
            return self._handle.fetch_pooled(descriptor)
        except PoisonBatch as error:
            raise error.of(self.name) from error

    def decode(self, stored: PooledBatch, *, arrow: bool) -> ConsumedBatch | ArrowBatch:
        """What :meth:`read` gave as a list of records, or as an Arrow array."""
        try:
            return self._handle.decode_arrow(stored) if arrow else self._handle.decode(stored)
        except PoisonBatch as error:
            raise error.of(self.name) from error

    def ack(self, sequence: int) -> None:
        """The next delivered batch is processed; the manifest is written now and then.

        Raises:
            InvalidInput: Another one is next. Nothing changed.
            Fenced, Conflict, QueueReset, CorruptManifest, StorageError: It is noted, and the
                manifest was due to be written and was not.
        """
        self._progress.ack(sequence, self._replay)
        self.let_go(self._ack_interval)

    def skip(self, sequence: int) -> None:
        """Give up a batch that cannot be delivered."""
        self._consumer.skip(sequence)
        self._progress.skip(sequence, self._replay)
        self.ready = deque(each for each in self.ready if each.sequence != sequence)

    def let_go(self, least: int = 1) -> None:
        """Take what is processed out of the manifest, if it is so many entries or more.

        What an undecided transaction needs stays, and so does all behind it; and what a saved
        position may still ask for.
        """
        progress = self._progress
        self._let_go(progress.kept_from if self._saves else progress.floor, least)

    def let_all_go(self) -> None:
        """Take out what saved positions may ask for, too: the partition will be closed for good."""
        self._let_go(self._progress.floor, 1)

    def _let_go(self, before: int, least: int) -> None:
        last = self._consumer.last_acked_sequence
        if before - (0 if last is None else last + 1) >= least:
            self._consumer.ack_through(before - 1)

    def prune(self) -> None:
        """Forget writers that have long ended."""
        self._progress.prune(self._runtime.now_ms())

    def close(self) -> None:
        """Write acknowledgements out and end; a partition that was closed for good needs none."""
        try:
            try:
                self.let_go()
            finally:
                self._consumer.close()
        except Drained:
            return

    @property
    def _queue_id(self) -> str:
        return self._consumer.position_of(0).queue_id

    def _check(self, position: PartitionPosition | None) -> None:
        if position is None:
            return
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

    def _check_begin(self, resumed: Progress | None, key: str, *, allowed: bool) -> None:
        """As the consumer would, could it be opened behind the sequence before the first."""
        first = self._consumer.first_sequence
        if resumed is None or resumed.floor or not first:
            return
        if not allowed:
            raise DataLoss(
                key, 0, first, "Another consumer read this queue. Accept the loss explicitly."
            )
        report_loss(key, 0, first)

    def _replay(self, begin: int, end: int) -> Iterable[tuple[int, str]]:
        return [(each.sequence, each.location) for each in self._consumer.queued(begin, end)]

    def _queued(self, sequence: int) -> BatchDescriptor:
        (found,) = self._consumer.queued(sequence, sequence + 1)
        return found


def _start_of(position: PartitionPosition | None, resumed: Progress | None) -> Position | None:
    """Read from the first entry that an open transaction needs: those in between are known."""
    if position is None or resumed is None:
        return None
    # At the queue's very beginning there is no sequence before the first; see _check_begin().
    return Position(position.queue_id, resumed.floor - 1) if resumed.floor else None
