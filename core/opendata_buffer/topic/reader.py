"""One partition of a topic as its consumer reads it: a queue's consumer, and the rule over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from opendata_buffer.broker.network import Network
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch, PooledBatch
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.gap import report_loss
from opendata_buffer.consumer.position import Position
from opendata_buffer.errors import DataLoss, Drained, PoisonBatch, QueueReset
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store
from opendata_buffer.topic.position import PartitionPosition
from opendata_buffer.topic.progress import Progress

__all__ = ["PartitionReader"]

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
        network: How brokers are reached; WebSockets by default.

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
        network: Network | None = None,
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
            network=network,
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
