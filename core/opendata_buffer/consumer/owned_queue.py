"""Read a queue that this process owns, and acknowledge what it has read.

A consumer that took a queue over (:mod:`opendata_buffer.consumer.opening`) has its epoch in the
manifest. :class:`OwnedQueue` holds three things together: the queue, the epoch, and the cursors
that say which entries are read, handed out, and acknowledged::

    manifest        12 13 14 15 16 17 18 19
    acknowledged    12 13                       next_ack is 14
    handed out            14 15 16              next_hand_out is 17

Each read checks the epoch, and that the manifest continues at the cursor. An acknowledgement
writes the manifest first and moves the cursors afterwards, so that a failed one can be repeated.

Which entries are delivered is not decided here; see :mod:`opendata_buffer.consumer.delivery`.
"""

from __future__ import annotations

from collections.abc import Sequence

from opendata_buffer import metrics
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.consumer.lag import Lag, lag_of
from opendata_buffer.consumer.opening import TakenQueue, check_data_loss, count_between
from opendata_buffer.consumer.position import Cursors, QueueProgress
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_queue import ReaderQueue
from opendata_buffer.runtime import Runtime

_LOST = (
    "A consumer reads this queue without claiming it, or without knowing that it is a log; or the "
    "manifest was edited."
)


class OwnedQueue:
    """A queue that this process consumes, or a log that it reads by a name.

    Not thread-safe, except for :meth:`lag_s` and :meth:`unacked_s`.

    Args:
        taken: The queue, as it was taken over.
        runtime: The clock.
        allow_data_loss: Skip lost entries with a warning, instead of raising ``DataLoss``.
    """

    def __init__(self, taken: TakenQueue, runtime: Runtime, *, allow_data_loss: bool) -> None:
        self.queue = taken.queue
        self.repeats = taken.repeats
        self.epoch = taken.manifest.epoch
        """The epoch with which this process owns the queue."""
        self.next_sequence = taken.manifest.next_sequence
        """The sequence that the next appended batch gets, by the manifest as it was last read."""
        # Even an empty queue knows its next sequence. So if entries are missing between here and
        # the first one that is handed out, they were lost (failure F28).
        self.cursors = Cursors.at(taken.manifest.first_sequence)
        self._progress = taken.progress
        self._runtime = runtime
        self._allow_data_loss = allow_data_loss

    def move(self, view: LogView, repeats: Repeats, progress: QueueProgress | None) -> None:
        """Continue at the position of a view. Nothing is handed out or acknowledged there yet.

        Args:
            view: The log from the new position on.
            repeats: The names of batches that were queued before that.
            progress: The transactions from there on; None without an isolation level.
        """
        self.repeats, self._progress = repeats, progress
        self.cursors = Cursors.at(view.first_sequence)
        self.next_sequence = view.next_sequence
        self._measure(view)

    def read(self, *, continues: bool = True) -> Manifest | LogView:
        """Read the manifest, and check that this process still owns it.

        Args:
            continues: Check that it continues at the cursor.

        Returns:
            The manifest, or the view of the log.

        Raises:
            DataLoss: It does not continue at the cursor.
            Fenced: Another consumer owns it.
        """
        # The queue itself notices when its manifest vanishes or goes backwards (failure F4).
        manifest = self.queue.read()
        assert manifest is not None
        self.queue.check_epoch(manifest, self.epoch)
        if continues:
            self.cursors = check_data_loss(
                self.cursors,
                manifest,
                self.queue.key,
                allowed=self._allow_data_loss,
                cause=_LOST,
                skipped=lambda: self.queue.skipped,
                open_from=None if self._progress is None else self._progress.open_from,
            )
        self.next_sequence = manifest.next_sequence
        self._measure(manifest)
        return manifest

    def read_next(self, limit: int) -> list[BatchDescriptor]:
        """Read the next entries. The cursor moves only past a loss that is allowed.

        Args:
            limit: Maximum number of entries.

        Returns:
            The entries at the cursor. Repeats have :attr:`.BatchDescriptor.repeats`.

        Raises:
            DataLoss, Fenced: As :meth:`read`.
        """
        manifest = self.read()
        return self.repeats.described(manifest.entries(self.cursors.next_hand_out, limit))

    def pass_over(self, entries: Sequence[BatchDescriptor]) -> None:
        """Move the read cursor past some entries. Repeats among them need no acknowledgement."""
        repeats = [entry.sequence for entry in entries if entry.repeats is not None]
        self.cursors = self.cursors.hand_out(entries[-1].sequence, repeats)
        if repeats:
            metrics.repeats_dropped.add(len(repeats))

    def check_fence(self) -> None:
        """Check that this process still owns the queue, with one read."""
        if isinstance(self.queue, ReaderQueue):
            self.queue.check_epoch(self.queue.read(check=True), self.epoch)
        else:
            self.read()

    def acknowledge(self, moved: Cursors, *, write: bool) -> None:
        """Acknowledge entries.

        Args:
            moved: The cursors after that.
            write: Whether to take everything acknowledged out of the manifest now.

        Raises:
            Fenced: Another consumer owns the queue.
            Conflict: The manifest was not written: other writers won each time.
        """
        manifest: Manifest | LogView | None = None
        if write:
            # Write the manifest first. If that fails nothing here has changed, and the call can be
            # repeated (OpenData RFC 0003, ack_through).
            if isinstance(self.queue, Queue):
                self.repeats.note(moved.next_ack)
            manifest = self.queue.dequeue(moved.next_ack - 1, self.epoch)
            if not isinstance(self.queue, Queue):
                self.repeats.forget_before(moved.next_ack)
            moved = moved.dequeued()
        metrics.acks.add(moved.next_ack - self.cursors.next_ack)
        self.cursors = moved
        if manifest is not None:
            # A consumer that ends with an empty queue does not read again. Without this the metric
            # would keep the length from before its last acknowledgement.
            self._measure(manifest)

    def entry_to_skip(self, sequence: int) -> BatchDescriptor:
        """Read the entry of a batch that is to be given up. Nothing changes.

        Args:
            sequence: The next batch, or one that was handed out and is not acknowledged.

        Returns:
            The entry.

        Raises:
            InvalidInput: The sequence is neither of these, or is not queued.
            DataLoss, Fenced: As :meth:`read`.
        """
        # Batches that were handed out before a gap must still be delivered. The command in an error
        # about the gap would skip them.
        continues = sequence >= self.cursors.next_hand_out
        entries = self.read(continues=continues).entries(start=sequence, limit=1)
        self.cursors.skip(sequence)  # for its errors
        if not entries or entries[0].sequence != sequence:
            raise InvalidInput(f"cannot skip sequence {sequence}: it is not queued")
        return entries[0]

    def skip(self, entry: BatchDescriptor) -> None:
        """Give up the batch of an entry that :meth:`entry_to_skip` returned."""
        self.cursors = self.cursors.skip(entry.sequence)
        self.repeats.forget(entry.location)

    def queued(self, begin: int, end: int) -> list[BatchDescriptor]:
        """Return the entries in [begin, end) of the manifest as it was last read.

        Makes no request for a queue.
        """
        manifest = self.queue.last_seen
        if manifest is None or begin >= end:
            return []
        return list(manifest.entries(begin, end - begin))

    def replay(self, begin: int, end: int) -> list[tuple[int, str]]:
        """Return the sequences and locations of entries that were read before."""
        return [(entry.sequence, entry.location) for entry in self.queued(begin, end)]

    def count(self, begin: int, end: int) -> int:
        """Return how many entries lie in [begin, end), by the manifest as it was last read."""
        return count_between(begin, end, self.queue.last_seen)

    def lag(self) -> Lag:
        """Return how much is not acknowledged, by one read of the manifest."""
        manifest = self.read()
        begin = self.cursors.next_open
        age_s = manifest.age_s(self._runtime.now_ms(), begin)
        return lag_of(_count_from(begin, manifest), age_s)

    def _measure(self, manifest: Manifest | LogView) -> None:
        waiting = _count_from(self.cursors.next_open, manifest)
        metrics.queue_length.set(waiting, self.queue.labels)

    # Gauges call these methods without a lock, because a fetch may hold it for a long time. This is
    # safe: cursors and manifests are immutable, and are replaced as a whole.

    def lag_s(self) -> float:
        """Return the age of the oldest batch that is not acknowledged, in seconds."""
        manifest, sequence = self.queue.last_seen, self.cursors.next_open
        age_s = None if manifest is None else manifest.age_s(self._runtime.now_ms(), sequence)
        return age_s or 0.0

    def unacked_s(self) -> float:
        """Return the age in seconds of the oldest batch that is handed out and not acknowledged."""
        cursors = self.cursors
        return self.lag_s() if cursors.next_open < cursors.next_hand_out else 0.0


def _count_from(begin: int, manifest: Manifest | LogView) -> int:
    """Return how many entries a queue has from ``begin`` on.

    Entries that an old program took off a log, because it does not know logs, are not counted.
    """
    if isinstance(manifest, LogView):
        return manifest.count(begin, manifest.next_sequence)
    return max(0, manifest.next_sequence - max(manifest.first_sequence, begin))
