"""A queue that one run of a query has opened, and the entries that it read of it.

The problem: Spark names a position in the queue, and the query has to go on exactly there. But the
queue may have been replaced, restored from an old copy, or read by another program in the meantime,
and its numbers then mean other batches.

The idea: opening compares the queue with the position, before it claims or drops anything. If they
do not fit, that is an error. With ``failOnDataLoss`` set to false the query accepts the loss
instead: :meth:`QueueSession.resume` then answers Spark's position with the one where reading really
goes on.

For example, a query has read up to sequence 42, and the queue was deleted and made again with three
batches. ``resume(42)`` answers with sequence 0 of the new queue. The source makes a micro-batch
without rows of that, from 42 to 0, so that the new position gets into the checkpoint.

What can go wrong: position 42 comes back. Spark commits it later if it tracks its progress
asynchronously, and the new queue may have grown past 42 by then. An acknowledgement would remove
batches that are not read. So :meth:`QueueSession.acknowledge` does nothing for the lost position.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from operator import attrgetter

from buffer_source.delivery import stable_end_of
from buffer_source.options import PROGRAM, SourceOptions
from buffer_source.partitions import (
    PartitionOffset,
    check_exists,
    claimed,
    create_log,
    read_only,
    wanted_start,
)
from opendata_buffer import errors
from opendata_buffer.assembly import open_pause
from opendata_buffer.consumer.entries import EntryConsumer
from opendata_buffer.consumer.opening import open_queue
from opendata_buffer.consumer.position import Position
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_queue import ReaderQueue
from opendata_buffer.queue.stored_manifest import ends_before
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

EVERYTHING = 1 << 64
"""A sequence past the end of any queue."""

_MOST_LOOKS = 5
"""How often a new query looks for its start while the collector deletes it."""


class QueueSession:
    """An opened queue, and its entries that were read and not acknowledged. Not thread-safe.

    Use :func:`open_session` to make one.

    Args:
        options: The source's options, of one partition.
        store: The opened store of the queue.
        runtime: Clock and threads.
        claim: The queue's owner marker; None if it does not exist.

    Attributes:
        queue_id: The id of the queue; empty if it has none.
        skipped: Ranges of sequences that never held batches: first, and one past the last.
    """

    def __init__(
        self,
        options: SourceOptions,
        store: Store,
        runtime: Runtime,
        claim: QueueClaim | None,
    ) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        self._claim = claim
        self._manifest_path = options.consumer.manifest_path
        self.queue_id = "" if claim is None else claim.queue_id
        self.skipped = () if claim is None else claim.skipped
        self._reader: EntryConsumer | ReadOnlyReader
        self._is_open = True  # False while the reader moves.
        self._queue: Queue | ReaderQueue | None = None  # None if the query does not acknowledge.
        self._pending: list[BatchDescriptor] = []
        self._lost_start: PartitionOffset | None = None  # A position that this queue never had.
        self._continues_at: int | None = None  # Where to read instead, until Spark is past it.

    def open_at(self, start: PartitionOffset | None, queue_id: str, retrying: Retries) -> None:
        """Claim the queue, or only open it, and read on at ``start``; see :func:`open_session`."""
        stable_end = 0 if start is None else stable_end_of(start, self._options)
        try:
            # Check this before claiming or dropping anything (failure F4).
            self._check_identity(queue_id)
            # A log's reader may go back to sequence 0; a queue's consumer cannot.
            is_given = stable_end > 0 or (start is not None and self._options.reader)
            retrying(self._read_from, stable_end if is_given else None)
            if start is not None:
                self._check_holds(start, stable_end)
        except errors.QueueReset as error:
            self._options.report_data_loss(error)
            retrying(self._read_from, None)
            if start is not None:
                self._give_up(start)

    @property
    def newly_registered(self) -> bool:
        """Whether this run registered the query's reader on the log."""
        return isinstance(self._queue, ReaderQueue) and self._queue.newly_registered

    @property
    def read_end(self) -> int:
        """The first sequence whose entry has not been read yet."""
        last = self._reader.last_handed_out_sequence
        return 0 if last is None else last + 1

    @property
    def acknowledged(self) -> int:
        """The first sequence that is not acknowledged."""
        last = self._reader.last_acked_sequence
        return 0 if last is None else last + 1

    @property
    def end(self) -> int:
        """The queue's next sequence, by the manifest that was read last."""
        return self._reader.next_sequence

    @property
    def is_log(self) -> bool:
        """Whether the queue keeps acknowledged batches for other readers."""
        return self._claim is not None and self._claim.is_log

    def count(self, begin: int, end: int) -> int:
        """Return how many entries lie in [begin, end), by the manifest that was read last.

        Entries that a program took off a log without knowing that it is one do not count.
        """
        return self._reader.count(begin, end)

    def owns(self, position: PartitionOffset) -> bool:
        """Return whether a position belongs to this queue, as far as ids show."""
        return position.queue in ("", self.queue_id) or not self.queue_id

    def resume(self, start: PartitionOffset) -> PartitionOffset:
        """Return the position where reading goes on for Spark's position.

        That is ``start`` itself, unless a loss was allowed and this queue never had ``start``. Then
        it is where this queue is read from, with a ``base`` that shows the break.
        """
        if start.next > self.end:
            # A loss was allowed: this queue ends before `start`, and all of it was read.
            self._give_up(start)
        if self._continues_at is None or start != self._lost_start:
            # Spark is past the lost position. A later position may equal it, but belongs to this
            # queue.
            self._continues_at = None
            next_sequence, base = start.next, start.base
        else:
            next_sequence = base = self._continues_at
        # Writers count per queue, so their state is useless in another queue.
        transactions = start.transactions if self.owns(start) else {}
        return PartitionOffset(next_sequence, base, transactions, self.queue_id)

    def begin(self, run_end: int) -> int:
        """Move to where a new query begins.

        A query without a given start continues where the reader of a log was, and consumes a queue
        from its oldest batch. A given start wins over the position of the reader. The collector may
        delete batches between the look and the move. Then a sequence is lost, but a word or a time
        means a later batch, so it is looked up again.

        Args:
            run_end: The first sequence that this run does not read.

        Returns:
            The first sequence that the query reads.

        Raises:
            InvalidInput: The start is past the end, or unread batches of a queue lie before it.
            DataLoss: The start is not kept any more, or the collector was faster each time.
        """
        options = self._options
        if options.starts_at_oldest and not (options.start_is_given and self.is_log):
            return self.read_end
        looks = 1 if options.starts_at_sequence else _MOST_LOOKS
        while True:
            begin = self._starting_offset(run_end)
            looks -= 1
            try:
                self.seek(begin)
                return begin
            except errors.DataLoss:
                if not looks:
                    raise

    def _starting_offset(self, run_end: int) -> int:
        """Return the sequence of the given start."""
        options, first = self._options, self.read_end
        view = read_only(options, self._store, self._runtime).view()
        if isinstance(view, LogView):
            first = view.first_sequence  # A reader may also go back.
        begin = wanted_start(options, view, first, self._store.url)
        if not options.starts_at_sequence:
            begin = min(begin, run_end)
        return max(first, begin)

    def seek(self, begin: int) -> None:
        """Read from ``begin`` on. The position of a log's reader moves there, back or forward."""
        first = self.next_available(0)
        if self.is_log and not (self._is_open and first <= begin <= self.read_end):
            self._is_open = False  # If the next steps fail, another call repeats them.
            self._reader.close()
            self._pending = []
            self._read_from(begin)
            self._is_open = True

    def read_until(self, stop: int) -> None:
        """Read the entries below ``stop`` that have not been read yet, as far as they exist."""
        if self.read_end < stop:
            wanted = min(stop - self.read_end, EVERYTHING)
            try:
                entries = self._reader.next_entries(wanted)
            except errors.Drained:
                self._read_closed_queue()
                entries = self._reader.next_entries(wanted)
            self._pending.extend(entries)

    def pending(self, begin: int, stop: int = EVERYTHING) -> list[BatchDescriptor]:
        """Return the entries in [begin, stop) that have been read but not acknowledged."""
        first = bisect_left(self._pending, begin, key=attrgetter("sequence"))
        return self._pending[first : bisect_left(self._pending, stop, key=attrgetter("sequence"))]

    def next_available(self, begin: int) -> int:
        """Return the first sequence from ``begin`` on that may be queued."""
        pending = self.pending(begin)
        return pending[0].sequence if pending else max(begin, self.read_end)

    def entries(self, begin: int, stop: int) -> list[BatchDescriptor]:
        """Read exactly the entries [begin, stop).

        Args:
            begin: Sequence of the first entry.
            stop: The sequence after the last entry.

        Returns:
            The entries, by sequence; fewer only if a loss is allowed.

        Raises:
            DataLoss: Entries left the queue.
            QueueReset: The queue ends before ``stop``.
        """
        if begin >= stop:
            return []
        self.read_until(stop)
        found = self.pending(begin, stop)
        if len(found) < stop - begin:
            end = self.end
            message = (
                f"the checkpoint needs sequences {begin} to {stop - 1} of manifest "
                f"{self._manifest_path!r}, of which {len(found)} are left; it holds "
                f"{self._pending[0].sequence if self._pending else end} to {end - 1}"
            )
            if end < stop:
                self._options.report_data_loss(
                    errors.QueueReset(f"{message}. The queue was replaced or went backwards.")
                )
            else:
                oldest = found[0].sequence if found else stop
                self._report_loss(begin, oldest, f"So {message}.")
        return found

    def acknowledge(self, end: PartitionOffset, stable_end: int) -> bool:
        """Let everything below ``stable_end`` leave the queue.

        A position of a queue that was replaced does nothing. If the store does not answer, that is
        not an error: the next acknowledgement makes up for it.

        Args:
            end: A position in Spark's commit log.
            stable_end: The first sequence that a query which continues at ``end`` may still ask
                for.

        Returns:
            Whether anything left the queue.
        """
        if not self.owns(end) or not self.acknowledged < stable_end <= self.read_end:
            return False
        if end == self._lost_start:
            # With asynchronous progress tracking, Spark commits this position after reading has
            # gone on. By then the new queue may have grown past it, with batches that are not in
            # the commit log yet.
            return False
        try:
            self._reader.ack_through(stable_end - 1)
        except (errors.TransientStorageError, errors.Conflict) as error:
            log.warning("acknowledging through %d is put off: %s", stable_end - 1, error)
            return False
        except errors.Drained:
            self._read_closed_queue()  # Only an empty queue is closed: the entries have left it.
        self._pending = self.pending(stable_end)
        return True

    def note_read(self) -> None:
        """Note in the position of a log's reader that the entries read so far were processed.

        If the store does not answer, that is not an error: it is only for people and alerts.
        """
        if isinstance(self._reader, EntryConsumer):
            try:
                self._reader.note_read()
            except (errors.TransientStorageError, errors.Conflict) as error:
                log.info("it is not noted how far the query has read: %s", error)

    def close(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        self._reader.close()

    def _read_from(self, begin: int | None) -> None:
        """Read from a sequence on, or from the oldest entry, as the consumer if it acknowledges."""
        if not self._options.acknowledge:
            self._read_only_from(begin)
            return
        # Pass the claim that was just read: another check would ask the store again.
        self._queue = queue = open_queue(
            self._store,
            self._options.consumer,
            self._runtime,
            self._claim,
            program=PROGRAM,
            open_pause=open_pause,
            resettable=False,  # A query takes its position from the checkpoint.
        )
        try:
            self._reader = EntryConsumer(
                self._options.consumer,
                # May be -1: a reader that was further on then goes back to sequence 0.
                None if begin is None else Position("", begin - 1),
                store=self._store,
                runtime=self._runtime,
                allow_data_loss=not self._options.fail_on_data_loss,
                queue=queue,
                program=PROGRAM,
            )
        except errors.Drained:
            # A queue is closed when it leaves its topic. It was empty then, so there is nothing to
            # consume. Reading it without a claim shows whether everything was read.
            self._read_only_from(begin)

    def _read_only_from(self, begin: int | None) -> None:
        reader = read_only(self._options, self._store, self._runtime)
        reader.seek(begin)
        self._reader = reader

    def _read_closed_queue(self) -> None:
        """Read on without being the consumer: the queue was closed for good."""
        begin = None if self._reader.last_handed_out_sequence is None else self.read_end
        self._reader.close()
        self._read_only_from(begin)

    def _check_identity(self, queue_id: str) -> None:
        """Refuse a queue other than the one in the checkpoint."""
        if queue_id and self.queue_id and self.queue_id != queue_id:
            raise errors.QueueReset(
                f"the checkpoint is about queue {queue_id}, and manifest "
                f"{self._manifest_path!r} in {self._store.url} belongs to queue {self.queue_id}: "
                "the path or the prefix was changed, or the queue was deleted and made again. If "
                f"only {owner_key(self._options.queue.data_path_prefix)!r} was lost, write the old "
                "id back into it."
            )

    def _check_holds(self, start: PartitionOffset, stable_end: int) -> None:
        """Refuse a position before the queue's first entry, or past its end."""
        try:
            # A consumer that was opened without a sequence has not checked this.
            if stable_end == 0 and self.read_end > 0:
                self._report_loss(stable_end, self.read_end, "Another consumer read this queue.")
            # If a transaction is open, the queue was claimed at an earlier sequence than this.
            if start.next > self.end:
                last, url = start.next - 1, self._store.url
                raise errors.QueueReset(ends_before(last, self.end, self._manifest_path, url))
        except errors.OpenDataBufferError:
            self.close()
            raise

    def _report_loss(self, needed: int, oldest: int, cause: str) -> None:
        error = errors.DataLoss(self._manifest_path, needed, oldest, cause, skipped=self.skipped)
        self._options.report_data_loss(error)

    def _give_up(self, start: PartitionOffset) -> None:
        """Give up a position that this queue never had, and continue where the queue is read."""
        log.warning(
            "data loss allowed: what the queue had from sequence %d on is lost; reading goes on in "
            "the new queue at sequence %d, of %d batches",
            start.next,
            self.read_end,
            self.end - self.read_end,
        )
        self._lost_start = start
        self._continues_at = self.read_end


def open_session(
    options: SourceOptions,
    store: Store,
    runtime: Runtime,
    retrying: Retries,
    start: PartitionOffset | None,
    queue_id: str,
) -> QueueSession:
    """Open a queue at a position: become its consumer, or only read it without ``acknowledge``.

    Args:
        options: The source's options, of one partition.
        store: The opened store of the queue.
        runtime: Clock and threads.
        retrying: Calls a function, and calls it again after transient errors.
        start: A position in Spark's commit log: batches before it may leave the queue. None to
            begin with the oldest entry.
        queue_id: The id of the queue in the checkpoint; empty if it is not known.

    Returns:
        The session, which continues at the position.

    Raises:
        InvalidInput: The queue does not exist, and the query does not create one.
        QueueReset: The manifest is gone or went backwards. Or it belongs to another queue than the
            checkpoint, and a loss is not allowed.
        DataLoss: The queue begins after ``start``, and a loss is not allowed.
    """
    if queue_id or not options.create_if_missing:
        check_exists(options, store, runtime)
    else:
        retrying(create_log, options, store, runtime)
    claim = retrying(claimed, options, store, runtime)
    session = QueueSession(options, store, runtime, claim)
    session.open_at(start, queue_id, retrying)
    return session
