"""Read a log as one of its named readers.

:class:`ReaderQueue` has the methods that :class:`opendata_buffer.queue.queue.Queue` has for the
consumer of a plain queue: claim an epoch, read, acknowledge, close. The consumer above does not
know which of the two it uses. The difference is where the state is:

* A plain queue has one consumer. Its epoch and its position are in the manifest, and acknowledging
  drops entries from the manifest.
* A log has many readers. Each one has its epoch and position in a small object of its own
  (:mod:`opendata_buffer.queue.reader_positions`), and acknowledging rewrites only that object. The
  collector deletes what all readers have acknowledged.

A reader sees the manifest, the index and its position, which are three objects and cannot be read
at one instant. Two rules keep its view consistent:

* It reads the manifest before the index. Entries move from the manifest into segments that the
  index names, so an entry that has just left the manifest is in the index. Read the other way
  round, it could be in neither.
* It reads the index before its position. When a reader is deleted, its position goes first. So if
  the index still has the name but the position is gone, the reader was deleted.

An idle reader costs one conditional GET of the manifest for each poll. Once a minute
(:data:`CHECK_S`) it also reads the index and its position, and so learns that it was fenced,
deleted, or has expired.

Things that can go wrong:

* A second consumer starts under the same name. It raises the epoch, and the first one is fenced at
  its next acknowledgement.
* A reader does not move for longer than the log's expiry. It is removed from the index, and batches
  that it needs may be deleted. If they are still there, it registers again and continues; if not,
  it gets ``DataLoss``.
* The collector overtakes a reader that has written its position but not yet its name. The reader
  then looks at the floor again: a new reader begins at the new floor, and any other one gets
  ``DataLoss``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from opendata_buffer import errors, metrics, outcomes
from opendata_buffer.config import QueueConfig, check_reader_name
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import MOST_READERS, REMEMBERED, LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_positions import (
    ReaderPosition,
    not_for_v1,
    position_object,
)
from opendata_buffer.queue.stored_manifest import ends_before
from opendata_buffer.runtime import Interval, Runtime

log = logging.getLogger(__name__)


CHECK_S = 60.0
"""Seconds after which a reader that finds nothing new also reads its position and the index."""

_MOST_SEEKS = 5
"""How often a seek looks again for a place that the collector has deleted meanwhile."""

MOST_SILENT_MS = 60 * 60 * 1000
"""A reader with nothing to acknowledge rewrites its position this often, so as not to expire.
"""


def too_many_readers(log_: Log) -> errors.InvalidInput:
    """Return the error for a log that cannot take another reader."""
    return errors.InvalidInput(
        f"the log has {MOST_READERS} readers",
        Hint(Action.DELETE_READERS, queue_name(log_.store.url, log_.config)),
    )


class ReaderQueue:
    """A log as one named reader sees it.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        store: Where the log is.
        config: The log's queue.
        name: The reader.
        runtime: Clock and sleep.
        claim: The claim of the queue, or None for an operator's command.
        program: The program, as operators know it.
        resettable: Whether errors may advise to reset the reader. See :func:`.open_queue`.
    """

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        name: str,
        *,
        runtime: Runtime,
        claim: QueueClaim | None,
        program: str,
        resettable: bool = True,
    ) -> None:
        check_reader_name(name)
        self.name = name
        self._store = store
        self._config = config
        self._runtime = runtime
        self._program = program
        self._queue = Queue(store, config, runtime=runtime, role="reader", claim=claim)
        self.queue_id = self._queue.queue_id
        """The id of the queue."""
        self.labels = {**self._queue.labels, "reader": name}
        """Attributes of this reader's gauges."""
        advised = name if resettable else ""
        self._log = Log(store, config, runtime, self.queue_id, advised)
        if claim is not None:
            self._log.adopt(claim)
        self._position = position_object(self._log, name)
        self.key = self._position.key
        """The key of the position."""
        self._manifest: Manifest | None = None
        self.last_seen: LogView | None = None
        """The log as it was last read. None before the first read."""
        self._checked_at = runtime.monotonic()
        self._moves = Interval(runtime, CHECK_S)
        self._claimed: ReaderPosition | None = None
        self.newly_registered = False
        """Whether this object added the reader to the index."""
        self.began_at: int | None = None
        """The sequence that the caller chose for a new reader; None if the reader was known."""

    @property
    def skipped(self) -> Sequence[tuple[int, int]]:
        """Ranges of sequences that never held batches: first, and one past the last."""
        return self._queue.skipped

    @property
    def begins_after(self) -> int:
        """Return where a new reader began: earlier batches were not kept for it.

        Returns:
            A sequence if the log had neither the name nor a position of this reader, and the caller
            chose none; otherwise 0.
        """
        own = self._claimed
        if own is None or own.epoch > 1 or not self.newly_registered or self.began_at is not None:
            return 0
        return own.next

    def read(self, *, check: bool = False) -> LogView:
        """Read the log from the reader's position on.

        Costs one conditional GET if nothing is new, and three requests once a minute.

        Args:
            check: Read the position and the index in any case.

        Returns:
            The log from the reader's position on.

        Raises:
            QueueReset: The manifest or the position is gone, or went backwards.
            DataLoss: The reader has expired, and batches that it needs were deleted.
            CorruptData: One of the objects cannot be read.
            StorageError: The store did not answer.
        """
        manifest = self._queue.read() or Manifest.empty()
        now = self._runtime.monotonic()
        due = check or now - self._checked_at >= CHECK_S
        if self.last_seen is not None and manifest is self._manifest and not due:
            return self.last_seen
        index = self._log.last_seen
        if due or index is None or manifest.first_sequence > index.end:
            # Read after the manifest: what left the manifest in between is in the index.
            index = self._log.need()
            self._checked_at = now
        unmoved = manifest.next_sequence - max(manifest.first_sequence, index.end)
        if unmoved > 2 * Log.most_entries and self._moves.is_due():
            # Not often: if writers win every race, this takes until the deadline of a change.
            index = self._queue.shorten(lambda: self._log, manifest) or index
        # Read after the index: if the reader was deleted, its position went first. And an index
        # that is newer than the position may begin after it, at what another consumer of this name
        # has acknowledged.
        position = self._read_position()
        if self.name not in index.readers:
            index = self._register(position.next, again=True)
            # Another consumer of this name may have registered it, and acknowledged more.
            position = self._read_position()
            if index.floor > position.next:
                raise self._lost(position.next, index, self._expired(index))
        return self._seen(manifest, index, position)

    def claim_epoch(
        self,
        last_acked_sequence: int | None,
        *,
        allow_data_loss: bool = False,
        begin: Callable[[LogView], int] | None = None,
    ) -> LogView:
        """Become the consumer of this reader, and fence the previous one.

        Args:
            last_acked_sequence: Continue after this sequence. None continues at the stored
                position, and a new reader at the oldest batch.
            allow_data_loss: Continue at the oldest batch if the wanted one was deleted.
            begin: Returns where a new reader begins, and may refuse. It is called only if the log
                has neither the name nor a position of this reader. Default: the oldest batch.

        Returns:
            The log from the position on.

        Raises:
            QueueReset: The log ends before ``last_acked_sequence``.
            DataLoss: The wanted batch was deleted, and ``allow_data_loss`` is false.
            InvalidInput: The log has too many readers.
            StorageError: The store did not answer, or refused a write.
        """
        manifest = self._queue.read_once() or Manifest.empty()
        index = self._log.need(marked=self._queue.is_log)
        if self.name not in index.readers and len(index.readers) >= MOST_READERS:
            raise too_many_readers(self._log)
        if last_acked_sequence is not None and last_acked_sequence >= manifest.next_sequence:
            raise errors.QueueReset(
                ends_before(
                    last_acked_sequence,
                    manifest.next_sequence,
                    self._config.manifest_path,
                    self._store.url,
                )
            )
        given = None if last_acked_sequence is None else last_acked_sequence + 1
        if begin is not None and given is None and self._is_new(index):
            self.began_at = begin(LogView.of(self._log, index, manifest))
        self._claimed = position = self._take(index, given, allow_data_loss)
        is_new = position.epoch == 1 and given is None
        while (index := self._register(position.next)).floor > position.next:
            # The collector did not know this reader yet and has raised the floor past it.
            position = self._take(index, given, allow_data_loss or is_new, overtaken=True)
            self._claimed = position
        self._checked_at = self._runtime.monotonic()
        # The manifest is not read again: a manifest that is newer than the index may lack entries
        # that were moved since.
        return self._seen(manifest, index, position)

    def seek(self, place: Callable[[LogView], int], epoch: int) -> LogView:
        """Move the position of the running consumer, forwards or backwards.

        The order of the writes is that of a reset: the position comes first, and then the index. A
        collector that has read an earlier, higher position loses its race for the index. If it wins
        instead, the place is no longer kept, and the position moves back to where it was.

        Args:
            place: Returns the sequence to move to, given all that the log keeps. It may refuse. It
                is called again if the collector was faster.
            epoch: The epoch of the caller.

        Returns:
            The log from the new position on.

        Raises:
            Fenced: Another consumer has claimed the reader.
            DataLoss: The collector was faster each time.
            QueueReset: The reader was deleted, or the queue was started over.
            StorageError: The store did not answer, or refused a write.
        """
        view = self.read(check=True)
        before = view.first_sequence
        for _ in range(_MOST_SEEKS):
            sequence = place(LogView.of(self._log, view.index, view.manifest))
            position = self._moved_to(sequence, epoch)
            index = self._register(sequence)
            if index.floor <= sequence:
                return self._seen(view.manifest, index, position)
            # The collector raised the floor past the place, and at most to where the reader was.
            self._acknowledged(before, epoch)
            view = self.read(check=True)
        raise self._lost(sequence, index, self._overtaken(index))

    def _moved_to(self, sequence: int, epoch: int) -> ReaderPosition:
        def decide(before: ReaderPosition | None) -> ReaderPosition:
            found = self._own(before)
            self.check_epoch(found, epoch)
            # The position keeps its epoch, so after a seek back it could have the bytes of an
            # earlier one. On a store whose version is a hash of the bytes, a delayed
            # acknowledgement from before the seek would then be applied.
            moved_ms = max(self._runtime.now_ms(), found.moved_ms + 1)
            return replace(found, next=sequence, read=0, moved_ms=moved_ms)

        return self._write(decide)

    def reset(self, sequence: int) -> ReaderPosition:
        """Set the position, then change the index. Starts no consumer.

        Args:
            sequence: Sequence of the next batch that the reader reads.

        Returns:
            The position as it was written.

        Raises:
            DataLoss: The floor has risen above ``sequence``.
            InvalidInput: The log has too many readers.
            StorageError: The store did not answer, or refused a write.
        """
        index = self._log.need()
        self.queue_id = index.queue_id
        position = self._take(index, sequence, allow_data_loss=False, process=0, overtaken=True)
        if (index := self._register(sequence)).floor > sequence:
            raise self._lost(sequence, index, self._overtaken(index))
        return position

    def _take(
        self,
        index: LogIndex,
        given: int | None,
        allow_data_loss: bool,
        process: int | None = None,
        *,
        overtaken: bool = False,
    ) -> ReaderPosition:
        """Write the position with the next epoch.

        Args:
            index: The index as it was just read.
            given: The wanted sequence; None for the stored one.
            allow_data_loss: Continue at the floor if ``given`` lies below it.
            process: The number of the process to write; 0 for none. Default: this process.
            overtaken: If the floor is above ``given``, it has risen after the caller looked.
        """

        def decide(before: ReaderPosition | None) -> ReaderPosition:
            if before is not None and before.queue_id != index.queue_id:
                before = None  # It belongs to the queue before it was started over.
            if before is not None and before.v1 is not None:
                raise not_for_v1(self.name)
            start = given
            if start is None and before is not None:
                start = before.next
                if self.name in index.readers:
                    # A reset below the floor was written and then refused: everything before the
                    # floor had been acknowledged.
                    start = max(start, index.floor)
            elif start is None and self.began_at is not None:
                # The floor may have risen since: a new reader begins at what is kept.
                start = max(self.began_at, index.floor)
            if start is not None and start < index.floor and not allow_data_loss:
                why = self._overtaken(index) if overtaken else self._passed(index, before, given)
                raise self._lost(start, index, why)
            now_ms = self._runtime.now_ms()
            return ReaderPosition(
                index.queue_id,
                max(index.floor, start or 0),
                1 if before is None else before.epoch + 1,
                os.uname().nodename,
                os.getpid() if process is None else process,
                self._program,
                now_ms,
                now_ms,
                others={} if before is None else before.others,
            )

        return self._write(decide)

    def _is_new(self, index: LogIndex) -> bool:
        """Return whether the log has neither the name nor a position of this reader.

        A name without a position is not new: it has lost its position, and may have read nothing.
        """
        if self.name in index.readers:
            return False
        found = self._position.read()
        return not isinstance(found, ReaderPosition) or found.queue_id != index.queue_id

    def _register(self, position: int, *, again: bool = False) -> LogIndex:
        """Write the name of this reader into the index. Its position must be written already.

        The index changes even if it has the name already. A collector that has read an earlier
        position of this reader then loses its race. With ``again``, a name that is there is left as
        it is.
        """

        def decide(before: LogIndex | None) -> LogIndex | None:
            if before is None or before.floor > position or (again and self.name in before.readers):
                return before
            self.newly_registered = self.newly_registered or self.name not in before.readers
            return before.with_reader(self.name)

        return self._log.change(decide, from_memory=True)

    def dequeue(self, through_sequence: int, epoch: int) -> LogView:
        """Acknowledge all batches up to and including a sequence. One small write; repeatable.

        Args:
            through_sequence: The last sequence to acknowledge.
            epoch: The epoch of the caller.

        Returns:
            The log from the new position on.

        Raises:
            Fenced: Another consumer has claimed the reader.
            InvalidInput: The log ends before this sequence (failure F27).
            QueueReset: The reader was deleted, or the queue was started over.
            StorageError: The store did not answer, or refused the write.
        """
        view = self.last_seen
        assert view is not None, "claimed first"
        if through_sequence >= view.next_sequence:
            raise errors.InvalidInput(
                f"cannot acknowledge {through_sequence}: the log ends at {view.next_sequence - 1}. "
                "Acknowledge only sequences that were handed out."
            )
        position = self._acknowledged(through_sequence + 1, epoch)
        return self._seen(view.manifest, view.index, position)

    def _acknowledged(
        self, next_sequence: int, epoch: int, *, ends: bool = False
    ) -> ReaderPosition:
        def decide(before: ReaderPosition | None) -> ReaderPosition:
            found = self._own(before)
            self.check_epoch(found, epoch)
            moved = replace(
                found, next=max(found.next, next_sequence), moved_ms=self._runtime.now_ms()
            )
            return replace(moved, process=0) if ends else moved

        return self._write(decide)

    def note_read(self, next_sequence: int, epoch: int) -> None:
        """Note how far the consumer has read, so that it does not appear to be behind.

        This acknowledges nothing. One small write.

        Args:
            next_sequence: The first sequence that it has not read.
            epoch: The epoch of the caller.

        Raises:
            Fenced: Another consumer has claimed the reader.
            QueueReset: The reader was deleted, or the queue was started over.
            StorageError: The store did not answer, or refused the write.
        """

        def decide(before: ReaderPosition | None) -> ReaderPosition:
            found = self._own(before)
            self.check_epoch(found, epoch)
            return replace(found, read=next_sequence, moved_ms=self._runtime.now_ms())

        self._write(decide)

    def check_epoch(self, now: LogView | Manifest | ReaderPosition, epoch: int) -> None:
        """Check that the position has an epoch.

        Args:
            now: The position, or a view that has its epoch.
            epoch: The epoch of the consumer that asks.

        Raises:
            Fenced: The position has another epoch.
        """
        if now.epoch != epoch:
            queue = queue_name(self._store.url, self._config)
            raise errors.Fenced(self.key, epoch, now.epoch).at(queue)

    def recent(self) -> list[BatchDescriptor]:
        """Return the last entries before the position, as far as they are kept.

        A reader that starts compares new entries with these to recognise those that a
        writer has queued twice.
        """
        view = self.last_seen
        assert view is not None, "claimed first"
        before = view.first_sequence
        start = max(0, before - REMEMBERED)
        parts = view.index.parts()
        if view.manifest.first_sequence > start:
            oldest = parts[0].first if parts else view.manifest.first_sequence
            start = max(start, oldest)
        known = replace(view, first_sequence=start)
        try:
            return [*known.entries(start, max(before - start, 0))]
        except errors.CorruptData as error:
            known.check_current()
            log.warning("entries that were queued twice are not recognised: %s", error)
            return []

    def close(self) -> None:
        """Note that the consumer has ended, and release the queue. Failures are only logged."""
        try:
            if self._claimed is not None:
                self._acknowledged(0, self._claimed.epoch, ends=True)
        except errors.OpenDataBufferError as error:
            log.info("the end of reader %r was not noted: %s", self.name, error)
        self._queue.close()

    def _read_position(self) -> ReaderPosition:
        found = self._position.read()
        position = self._own(found if isinstance(found, ReaderPosition) else None)
        own = position.host == os.uname().nodename and position.process == os.getpid()
        silent_ms = self._runtime.now_ms() - position.moved_ms
        index = self._log.last_seen
        expiry_ms = MOST_SILENT_MS if index is None else index.reader_expiry_ms // 8
        if own and silent_ms >= min(MOST_SILENT_MS, expiry_ms):
            return self._acknowledged(0, position.epoch)
        return position

    def _own(self, found: ReaderPosition | None) -> ReaderPosition:
        own = self._claimed
        if (
            found is None
            or found.queue_id != self.queue_id
            # A reader that was deleted and created again starts at epoch 1 again.
            or (own and found.epoch == own.epoch and found.since_ms != own.since_ms)
        ):
            raise errors.QueueReset(
                f"the position {self.key!r} of reader {self.name!r} in {self._store.url} is gone "
                "or is another's: the reader was deleted, or the queue was started over. "
                "Start the reader again."
            )
        return found

    def _write(self, decide: Callable[[ReaderPosition | None], ReaderPosition]) -> ReaderPosition:
        outcome = self._position.update(decide, from_memory=True)
        if isinstance(outcome, outcomes.Applied) and outcome.value is not None:
            return outcome.value
        if isinstance(outcome, outcomes.Vanished):
            self._own(None)
        raise errors.TransientStorageError(
            f"the position {self.key!r} in {self._store.url} could not be written: {outcome}. It "
            "may have been written; try again."
        )

    def _seen(self, manifest: Manifest, index: LogIndex, position: ReaderPosition) -> LogView:
        self._log.check_gap(index, manifest)  # failure F46
        self._manifest = manifest
        first = max(position.next, index.floor)
        self.last_seen = LogView(
            self._log, index, manifest, first, position.epoch, self.key, self._check_current
        )
        metrics.queue_length.set(self.last_seen.entry_count, self.labels)
        return self.last_seen

    def _check_current(self) -> None:
        """Raise if this reader was fenced, deleted, or has expired."""
        view = self.read(check=True)
        if self._claimed is not None:
            self.check_epoch(view, self._claimed.epoch)

    def _lost(self, needed: int, index: LogIndex, why: str) -> errors.DataLoss:
        # Without a name here, the program keeps its own position. Resetting the reader would not
        # help, and the caller adds other advice.
        hints = []
        if self._log.reader:
            queue = queue_name(self._store.url, self._config)
            hints.append(Hint(Action.RESET_READER_TO_EARLIEST, queue, readers=(self.name,)))
        return errors.DataLoss(self.key, needed, index.floor, why, *hints, skipped=self.skipped)

    def _passed(self, index: LogIndex, before: ReaderPosition | None, given: int | None) -> str:
        """Return why the floor is above the sequence at which the reader wants to begin."""
        if before is None:
            return (
                f"The log has no reader {self.name!r}, so they were not kept for it: it was never "
                "started here, or it was deleted."
            )
        if self.name not in index.readers:
            if self._runtime.now_ms() - before.moved_ms < index.reader_expiry_ms:
                return (
                    f"A start of reader {self.name!r} was interrupted before the log knew the "
                    "reader, so they were not kept for it."
                )
            return self._expired(index)
        if given is None or before.next < index.floor:
            return self._overtaken(index)
        process = f", process {before.process}" if before.process else ""
        return (
            f"Another instance of reader {self.name!r} has acknowledged them: {before.program} on "
            f"{before.host}{process} is up to sequence {before.next - 1}. The position that was "
            "given was saved before that. To continue, load the position again that the other "
            "instance saved with its results, or start without a position if it has none."
        )

    def _expired(self, index: LogIndex) -> str:
        return (
            f"Reader {self.name!r} did not move for longer than "
            f"{index.reader_expiry_ms / 1000:.0f} s, so it has expired, and what lies before was "
            "collected."
        )

    def _overtaken(self, index: LogIndex) -> str:
        return (
            f"The floor of the log rose to {index.floor} after the position was chosen: every "
            "reader that the log had then was past it. Try again."
        )
