"""Decide which entries of an owned queue are delivered, and when they leave the queue.

There are two ways, with the same methods:

* :class:`PlainDelivery` delivers each entry as it is. Acknowledged entries leave the queue.
* :class:`TransactionalDelivery` follows an isolation level. It reads entries ahead and offers them
  to :class:`.QueueProgress`, which says which of them can be delivered now. Entries that an
  undecided transaction or a saved position needs stay in the queue after they are acknowledged.

For example, a transaction has the entries 4 and 6, and its commit is entry 7::

    read            4  5  6  7
    ready after 5      5            4 waits for the end of its transaction
    ready after 7         4, 6      the commit releases both
    leaves the queue when 6 is acknowledged: 4 to 7

Not thread-safe: :class:`.EntryConsumer` calls them with its lock held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from opendata_buffer import metrics
from opendata_buffer.consumer.owned_queue import OwnedQueue
from opendata_buffer.consumer.position import Position, QueueProgress
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.runtime import Runtime

POLL_ENTRIES = 256
"""The most entries that are offered to the rule of transactions at once."""

PRUNE_S = 3_600.0
"""Seconds between two searches for writers that ended long ago."""


class PlainDelivery:
    """Delivers every entry of a queue, in order.

    Args:
        owned: The queue.
    """

    def __init__(self, owned: OwnedQueue) -> None:
        self._owned = owned

    @property
    def position(self) -> Position | None:
        """The position after everything acknowledged; None before the first acknowledgement."""
        last_acked = self._owned.cursors.last_acked
        return None if last_acked is None else self.position_of(last_acked)

    def position_of(self, sequence: int) -> Position:
        """Return the position after a batch."""
        return Position(self._owned.queue.queue_id, sequence)

    def peek(self, limit: int) -> list[BatchDescriptor]:
        """Return the next entries. The cursor moves only past a loss that is allowed."""
        return self._owned.read_next(limit)

    def hand_out(self, found: Sequence[BatchDescriptor]) -> None:
        """Move the cursor past entries that :meth:`peek` returned."""
        self._owned.pass_over(found)
        metrics.descriptors_handed_out.add(sum(entry.repeats is None for entry in found))

    def check_next(self, sequences: Sequence[int]) -> None:
        """Raise ``InvalidInput`` unless these are the next to be acknowledged, in this order."""
        self._owned.cursors.check_next(sequences)

    def ack(self, sequence: int, interval: int) -> None:
        """Acknowledge the next batch.

        Args:
            sequence: Its sequence.
            interval: Number of acknowledged entries at which the manifest is written.

        Raises:
            InvalidInput: Another batch comes first.
            Fenced, Conflict: As :meth:`.OwnedQueue.acknowledge`.
        """
        moved = self._owned.cursors.ack(sequence)
        self._owned.acknowledge(moved, write=moved.undequeued >= interval)

    def ack_through(self, sequence: int) -> None:
        """Acknowledge everything up to and including a batch, and write the manifest."""
        self._owned.acknowledge(self._owned.cursors.ack_through(sequence), write=True)

    def flush(self) -> None:
        """Take everything acknowledged out of the manifest."""
        cursors = self._owned.cursors
        self._owned.acknowledge(cursors, write=cursors.undequeued > 0)

    def skip(self, entry: BatchDescriptor) -> None:
        """Give up the batch of an entry."""
        self._owned.skip(entry)

    def restart(self, progress: QueueProgress | None) -> None:
        """Begin again after the position of the queue was moved. There is nothing to forget."""


class TransactionalDelivery:
    """Delivers the batches that an isolation level allows.

    Args:
        owned: The queue.
        progress: How far its transactions are processed.
        runtime: The clock.
        resumed: Whether the consumer was started with a position.
    """

    def __init__(
        self, owned: OwnedQueue, progress: QueueProgress, runtime: Runtime, *, resumed: bool
    ) -> None:
        self._owned = owned
        self._progress = progress
        self._runtime = runtime
        self._released: deque[int] = deque()
        """Sequences to deliver next, whose entries were not read yet."""
        self.ready: deque[BatchDescriptor] = deque()
        """Entries that are to be delivered, in order."""
        # Two first starts may overlap, neither with a position. The other one may have saved a
        # position since, and may need markers that this one has passed. So nothing leaves the
        # queue before the first acknowledgement, which shows whether the caller saves positions.
        self._saves: bool | None = True if resumed else None
        """Whether the caller saves positions; None while that is not known."""
        self._pruned_at = runtime.monotonic()

    @property
    def finished(self) -> bool:
        """Whether everything polled is processed, and no transaction is undecided."""
        return not self.ready and not self._released and self._progress.idle

    @property
    def position(self) -> Position | None:
        """The position after everything acknowledged; None before the first entry is processed."""
        self._saves = True
        return self._progress.position(self._owned.queue.queue_id)

    def position_of(self, sequence: int) -> Position:
        """Return the position after a batch and all that were delivered before it.

        Args:
            sequence: The sequence of a delivered batch.

        Returns:
            The position.

        Raises:
            InvalidInput: The batch does not wait for acknowledgement.
        """
        self._saves = True
        owned = self._owned
        return self._progress.position_after(sequence, owned.queue.queue_id, owned.replay)

    def peek(self, limit: int) -> list[BatchDescriptor]:
        """Return the next entries. Poll until there are enough or no more."""
        while len(self.ready) < limit and self._offers_more(POLL_ENTRIES):
            pass
        return list(islice(self.ready, limit))

    def hand_out(self, found: Sequence[BatchDescriptor]) -> None:
        """Remove entries that :meth:`peek` returned from :attr:`ready`."""
        for _ in found:
            self.ready.popleft()
        metrics.descriptors_handed_out.add(len(found))

    def poll(self) -> bool:
        """Read new entries, and put those to deliver into :attr:`ready`.

        Returns:
            Whether there were new entries, delivered or not.

        Raises:
            DataLoss: The queue does not continue at the cursor, and nothing is left in
                :attr:`ready`.
            Fenced: As :meth:`.OwnedQueue.read`.
        """
        # Ask for at least one, so that each poll finds out whether the consumer is fenced.
        return self._offers_more(max(1, POLL_ENTRIES - len(self.ready)))

    def check_next(self, sequences: Sequence[int]) -> None:
        """Raise ``InvalidInput`` unless these are the next to be acknowledged, in this order."""
        self._progress.check_next(sequences)

    def ack(self, sequence: int, interval: int) -> None:
        """Acknowledge the next batch; see :meth:`.PlainDelivery.ack`."""
        self._progress.ack(sequence, self._owned.replay)
        if self._saves is None:
            self._saves = False
        self._dequeue(interval)

    def ack_through(self, sequence: int) -> None:
        """Refuse: entries of undecided transactions may lie before the batch.

        Args:
            sequence: The sequence of the batch.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput("ack_through() passes over transactions: ack() each batch")

    def flush(self) -> None:
        """Take all processed entries out of the manifest, except those that are still needed."""
        self._dequeue(1)

    def flush_all(self) -> None:
        """Take all processed entries out of the manifest, even those that saved positions need."""
        self._dequeue(1, all_of_them=True)
        view, cursors = self._owned.queue.last_seen, self._owned.cursors
        if isinstance(view, LogView) and view.first_sequence < cursors.next_ack:
            # Entries at the end are lost, and that is allowed. No later entry is acknowledged.
            self._owned.acknowledge(cursors, write=True)

    def skip(self, entry: BatchDescriptor) -> None:
        """Give up the batch of an entry."""
        self._progress.skip(entry.sequence, self._owned.replay)
        self.ready = deque(each for each in self.ready if each.sequence != entry.sequence)
        self._released = deque(each for each in self._released if each != entry.sequence)
        self._owned.skip(entry)

    def restart(self, progress: QueueProgress | None) -> None:
        """Begin again at another position, and forget everything that was read ahead."""
        assert progress is not None
        self._progress = progress
        self._released.clear()
        self.ready.clear()

    def _offers_more(self, limit: int) -> bool:
        """Poll once more; delay an error about a loss until all earlier entries are handed out.

        The command in that error would skip them.
        """
        try:
            return self._offer(limit)
        except DataLoss:
            if not self.ready:
                raise
            return False

    def _offer(self, limit: int) -> bool:
        owned, progress = self._owned, self._progress
        self._make_ready()
        entries = owned.read_next(limit)
        for entry in entries:
            repeats = entry.repeats is not None
            self._released += progress.offer(
                entry.sequence, entry.location, owned.replay, repeats=repeats
            )
            # An entry whose offer failed has to be offered again.
            owned.pass_over([entry])
            self._make_ready()
        if self._runtime.monotonic() - self._pruned_at >= PRUNE_S:
            self._pruned_at = self._runtime.monotonic()
            progress.prune(self._runtime.now_ms())
        return bool(entries)

    def _make_ready(self) -> None:
        """Read the entries of released batches.

        If the store does not answer, the next poll continues here: the batches are not offered a
        second time.
        """
        while self._released:
            sequence = self._released[0]
            self.ready += self._owned.queued(sequence, sequence + 1)
            self._released.popleft()

    def _dequeue(self, least: int, *, all_of_them: bool = False) -> None:
        """Dequeue the processed entries if there are at least ``least``.

        Entries that an undecided transaction or a saved position needs stay, and all after them.

        Args:
            least: Fewest entries that are worth a write.
            all_of_them: Also dequeue what saved positions need.
        """
        keeps = self._saves is not False and not all_of_them
        before = self._progress.kept_from if keeps else self._progress.first_needed
        if before - self._owned.cursors.next_ack >= least:
            moved = self._owned.cursors.ack_through(before - 1)
            self._owned.acknowledge(moved, write=True)
