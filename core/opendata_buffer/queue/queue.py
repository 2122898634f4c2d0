"""Change one manifest: append batches, take over as the consumer, acknowledge, seal.

A queue is one object, the manifest: a list of batches in the order of their sequences, the next
sequence, and the epoch of the consumer. Producers append entries at its end. The consumer removes
entries from its front, in one write together with the check that its epoch is still the current
one. :class:`Queue` has one method for each of these changes (OpenData RFC 0001, Queue)::

    queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)
    first = queue.append([NewEntry(location)])           # the sequence of the entry

    manifest = queue.claim_epoch(last_acked_sequence=None)
    queue.dequeue(through_sequence=first, epoch=manifest.epoch)

Each change is a pure function from the manifest as it is to the manifest as it should be.
:mod:`opendata_buffer.queue.cas` does the reading and writing.

Things that can go wrong:

* **The answer to an append is lost.** Appending again would queue the batches twice. Every location
  is used only once, so the batches are searched for in the manifest that is read next (failures F1,
  F2). In a log they may have moved into a segment by then (:meth:`Queue.find_moved`). If even that
  does not resolve the doubt, the append raises ``CommitStateUnknown``.
* **A second consumer starts.** It raises the epoch. The first one is refused at its next
  acknowledgement and gets ``Fenced`` (failure F8).
* **The manifest is gone, or went back.** Every read is compared with what this object and the owner
  marker have seen before (failure F4).
* **The manifest grows without limit** because no consumer runs. Every append rewrites all of it, so
  appends are refused at ``max_manifest_bytes`` (failure F35). In a log, the oldest entries move
  into segments before that.
* **A busy broker wins every race.** It writes from memory, while this process has to read first.
  :class:`WritePause` asks the broker to leave the manifest alone for a moment.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from opendata_buffer import errors, metrics, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import (
    SEALED_EPOCH,
    Manifest,
    NewEntry,
    check_transition,
    entry_bytes,
)
from opendata_buffer.queue.cas import CasStore, OutcomeUnknown
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_moves import move_entries
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import Watermark
from opendata_buffer.queue.ownership import QueueClaim, suspect
from opendata_buffer.queue.stored_manifest import (
    check_reached,
    check_resume,
    manifest_object,
    vanished,
)
from opendata_buffer.queue.v1_feeding import Feeding
from opendata_buffer.runtime import Interval, Runtime

T = TypeVar("T")

log = logging.getLogger(__name__)

HALF_FULL, NEARLY_FULL = 0.5, 0.8
"""Shares of ``max_manifest_bytes`` at which a warning about the manifest is logged."""

WARN_S = 10.0
"""Seconds between two warnings about one manifest."""

NO_LOG_S = 60.0
"""Seconds between two checks whether a queue with a long manifest has become a log."""

MAX_PAUSE_S = 0.1
"""Longest wait in seconds after a lost race, if a write is slower than the backoff's first step."""


@dataclass(eq=False)
class _Append(Generic[T]):
    """The change of one append, all of its entries or none, and its :class:`~.cas.Proof`.

    The entries are recognised by their locations, each of which is used only once (failures F1,
    F2).
    """

    entries: Sequence[NewEntry]
    check: Callable[[Manifest, Sequence[NewEntry]], None]
    guard: Callable[[Manifest], T | None] | None
    joins_others: bool = False
    """Whether another process may already have appended a part of the entries."""
    sequence: int = -1
    """Sequence of the first entry: where it is, or where the last attempt was to put it."""
    stopped: T | None = None
    """The result of the guard in the last attempt. None if the guard allowed it."""
    moved: int = 0
    """Entries before this sequence are in segments of the log, and leave the manifest."""

    def decide(self, before: Manifest) -> Manifest:
        """Return the manifest with the entries appended, or unchanged if the guard stops."""
        self.stopped = None if self.guard is None else self.guard(before)
        if self.stopped is not None:
            return before
        # Check before appending: a producer that waits at a full manifest would otherwise copy the
        # whole manifest in each attempt.
        shorter = left_to_log(before, self.moved)
        self.check(shorter, self.entries)
        self.sequence = before.next_sequence
        return shorter.append(self.entries)

    def mark(self) -> int:
        """Return the sequence of the first entry in this attempt."""
        return self.sequence

    def find(self, now: Manifest | None, marks: Sequence[int]) -> bool:
        """Return whether the entries are in the manifest."""
        if now is None:
            return False
        # Search for the last entry, because the consumer drops entries from the front.
        last = now.find(self.entries[-1].location)
        if last is not None:
            first = last - len(self.entries) + 1
            left = max(first, now.first_sequence)
            # A broker's client that was cut off may have appended its own part elsewhere.
            others = [entry.location for entry in self.entries[left - first : -1]]
            if others == [entry.location for entry in now.entries(left, last - left)]:
                if self.joins_others and first < left:
                    raise OutcomeUnknown("a part of the group may be another process's append")
                self.sequence, self.stopped = first, None
                return True
        if any(mark < now.first_sequence for mark in marks):
            raise OutcomeUnknown("those sequences were dequeued since")
        return False


def left_to_log(manifest: Manifest, moved: int) -> Manifest:
    """Return the manifest without the entries before a sequence, which are in segments."""
    if not manifest.first_sequence < moved <= manifest.next_sequence:
        return manifest
    return manifest.drop_through(moved - 1)


class WritePause(Protocol):
    """A connection that makes a broker leave a manifest to this process for a moment.

    This process reads before it writes, and a broker writes from memory. Without a pause, this
    process would lose every race. A pause only saves time.
    """

    @property
    def is_connected(self) -> bool:
        """Return whether a broker is known, to be asked before the first attempt of a change."""

    def ask(self, writes: int) -> bool:
        """Ask the broker to skip its next reads and writes. Raises nothing.

        Args:
            writes: How many to skip. Ask for more after each race that is lost in spite of a pause.

        Returns:
            Whether a pause begins now.
        """

    def close(self) -> None:
        """End the connection to the broker. The next :meth:`ask` may open another one."""


OpenPause = Callable[[CasStore, QueueConfig, Runtime], WritePause]
"""Called at the first lost race, which shows that another process writes the manifest, too."""


class Queue:
    """One manifest as one owner sees it.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep.
        role: Label of the counters of writes and conflicts, such as ``producer``.
        claim: The claim of a writer, which refuses a manifest that is gone or went back, and
            remembers how far this one gets. None for a reader.
        after_conflict: See :class:`.CasObject`.
        open_pause: Opens a connection to the broker at the first lost race, to ask for a pause. For
            owners that read before they write. None if no broker should be asked.
        feeds: Whether to feed the v1 consumers of a log after each append, in a thread.
    """

    # Producers write all the time, so the manifest that a consumer remembers is out of date. One
    # read is cheaper than a lost race, which makes a producer retry, too.
    _changes_from_memory = False
    _joins_others = False

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        *,
        runtime: Runtime,
        role: str,
        claim: QueueClaim | None = None,
        after_conflict: Callable[[], float | None] | None = None,
        open_pause: OpenPause | None = None,
        feeds: bool = False,
    ) -> None:
        self._store = store
        self._open_pause = open_pause
        self._pause: WritePause | None = None
        self._conflicts_before = 0
        self._config = config
        self._runtime = runtime
        self._claim = claim
        self.queue_id = "" if claim is None else claim.queue_id
        """The id of the queue; empty without a claim."""
        self.is_log = claim is not None and claim.is_log
        """Whether the queue was a log when it was claimed."""
        self.skipped: Sequence[tuple[int, int]] = () if claim is None else claim.skipped
        """Ranges of sequences that never held batches: first, and one past the last."""
        # Sequence and location of the last entry that a change took out.
        self._dropped: tuple[int, str] | None = None
        self._role = {"role": role}
        self.labels = {"queue": metrics.queue_label(store.url, config.manifest_path)}
        """Attributes of the gauges of this queue."""
        self._races_lost: deque[bool] = deque(maxlen=100)
        self.key = config.manifest_path
        """The key of the manifest."""
        self._object = manifest_object(
            store,
            config,
            runtime,
            check_read=lambda known, now: check_reached(
                Watermark.of(known), now, config, store.url
            ),
            after_conflict=after_conflict or self._after_conflict,
        )
        # The claim has just read the manifest, so the first change need not read it again.
        taken = None if claim is None else claim.take_manifest()
        self._just_read = taken is not None
        """Whether the claim has read the manifest and nothing was done with it yet."""
        if taken is not None:
            self._object.adopt(taken)
        self._decided_at = runtime.monotonic()
        self._warnings = Interval(runtime, WARN_S)
        self._log: Log | None = None
        self._log_searches = Interval(runtime, NO_LOG_S)
        self._feeding = (
            Feeding(store, config, runtime, self.queue_id, is_log=self.is_log) if feeds else None
        )
        self._moved = 0
        self._move_at = Log.most_entries
        self._long = 0

    @property
    def attempts(self) -> int:
        """Return how often this object has tried to write the manifest."""
        return self._object.attempts

    @property
    def conflicts(self) -> int:
        """Return how many of these attempts lost a race."""
        return self._object.conflicts

    @property
    def last_seen(self) -> Manifest | None:
        """Return the manifest as it was last read or written; None before that."""
        return self._object.last_seen

    def close(self) -> None:
        """Write into the owner marker how far the queue got. Repeatable; never raises."""
        if self._feeding is not None:
            self._feeding.close()
        manifest = self._object.last_seen
        if self._claim is not None and manifest is not None:
            self._claim.note(manifest, now=True, acked_location=self._acked_location(manifest))
        self.disconnect()

    def disconnect(self) -> None:
        """End the connection to a broker. The next change opens another one if it needs one."""
        if self._pause is not None:
            self._pause.close()

    def read(self) -> Manifest | None:
        """Read the manifest with one conditional GET.

        Returns:
            The manifest, or None if the queue was never created.

        Raises:
            QueueReset: The manifest is gone, or went back since it was last read (failure F4).
            CorruptManifest: The manifest is damaged.
            StorageError: The store did not answer.
        """
        self._just_read = False
        found = self._object.read()
        if isinstance(found, outcomes.Vanished):
            raise vanished(self._config, self._store.url)
        if self._claim is not None:
            self._claim.check(found)
        return found

    def read_once(self) -> Manifest | None:
        """Return the manifest that the claim has just read, or read it as :meth:`read` does.

        Use it for the first look at a queue. It moves nothing: the first change still starts from
        what the claim has read.
        """
        return self._object.last_seen if self._just_read else self.read()

    def append(
        self,
        entries: Sequence[NewEntry],
        *,
        guard: Callable[[Manifest], T | None] | None = None,
        read_first: bool = False,
        makes_room: bool = False,
    ) -> int | T:
        """Append entries with contiguous sequences in one write: all of them or none.

        Appending the same locations again does not repeat them: after a lost answer, the manifest
        is read and searched for them (failures F1, F2).

        Args:
            entries: The entries, at least one.
            guard: Called with each manifest that is about to be replaced. If it returns anything
                but None, nothing is appended, and the append returns that. The state that it
                has checked still holds when the write is applied.
            read_first: Read the manifest before the first attempt, because other processes write
                it, too.
            makes_room: Ignore ``max_manifest_bytes``, for entries such as transaction markers that
                let consumers acknowledge others. If they were refused, the queue would stay full
                forever.

        Returns:
            The sequence of the first entry, or what ``guard`` returned.

        Raises:
            InvalidInput: ``entries`` is empty.
            QueueFull: The manifest has reached ``max_manifest_bytes``. Nothing was appended.
            Conflict: Every attempt lost its race until the deadline. Nothing was appended.
            Drained: The queue was sealed. Nothing was appended.
            QueueReset: The manifest is gone or went back. Nothing was appended.
            CommitStateUnknown: The entries may have been appended.
            StorageError: The store did not answer, or refused the write. Nothing was appended.
        """
        if not entries:
            raise errors.InvalidInput("append of no entries: give at least one")
        check = self._check_append if not makes_room else lambda before, _: self._check_open(before)
        append = _Append(entries, check, guard, self._joins_others)
        while True:
            append.moved = self._moved
            outcome = self._update(append.decide, append, from_memory=not read_first)
            if not isinstance(outcome, outcomes.Unknown):
                break
            if isinstance(outcome.cause, OutcomeUnknown):
                complete, first = self.find_moved(entries, outcome.first_mark)
                if first is not None:
                    return first
                if complete:
                    continue  # The attempt was not applied, and no longer can be.
            seen = self._object.last_seen
            raise errors.CommitStateUnknown(
                self.key,
                outcome.first_mark,
                tuple(entry.location for entry in entries),
                None if seen is None else seen.next_sequence,
                outcome.reason.rstrip("."),
            ) from outcome.cause
        manifest = self._manifest_of(outcome)
        self._note_share(manifest)
        if append.stopped is not None:
            return append.stopped
        if self._feeding is not None:
            self._feeding.appended(manifest)
        self._move(manifest)
        return append.sequence

    def find_moved(self, entries: Sequence[NewEntry], since: int) -> tuple[bool, int | None]:
        """Search the segments of a log for entries that may have been appended.

        Args:
            entries: The entries.
            since: They were appended at this sequence or later.

        Returns:
            Whether the search gives an answer, and the sequence of the first entry if they are
            there. It gives none if the queue is not a log, if the index has a gap or no longer
            knows these sequences, or if only a part of the entries is found.
        """
        manifest = self._object.last_seen
        wanted = [entry.location for entry in entries]
        try:
            moved = Log(self._store, self._config, self._runtime, self.queue_id)
            index = moved.read()
            if index is None or manifest is None:
                return False, None
            last = moved.segments.find(index, wanted[-1], since)
            if last is not None:
                first = last - len(wanted) + 1
                found = [
                    entry.location for entry in moved.segments.entries(index, first, len(wanted))
                ]
                return found == wanted, first if found == wanted else None
            oldest = min([part.first for part in index.parts()], default=index.end)
            gap = any(end > since for _, end in index.lost) or manifest.first_sequence > index.end
            return not gap and oldest <= since, None
        except errors.OpenDataBufferError as error:
            log.warning("%s was not looked for in the log: %s", wanted[-1], error)
            return False, None

    def _found_log(self) -> Log | None:
        """Return the log if the queue is one. If not, check again from time to time."""
        if self._log is None and (self.is_log or self._log_searches.is_due()):
            found = Log(self._store, self._config, self._runtime, self.queue_id)
            self._log = found if found.read() is not None else None
        return self._log

    def _move(self, manifest: Manifest) -> None:
        """Move the oldest entries of a log into a segment. The next append leaves them out."""
        unmoved = manifest.next_sequence - max(manifest.first_sequence, self._moved)
        if not self._long and unmoved >= self._move_at:
            # Each process waits for a slightly different length, so that only one of them moves.
            self._long = self._move_at = int(Log.most_entries * (1 + self._runtime.random() / 2))
        if unmoved < self._move_at:
            return
        # A writer that ends before its next append does not remove the entries that it has moved.
        index = self.shorten(
            self._found_log, manifest, leave=manifest.entry_count >= 2 * self._long
        )
        if index is not None:
            self._moved = index.end
            left = manifest.next_sequence - max(manifest.first_sequence, index.end)
            # If an open transaction keeps entries here, do not try again with each append.
            long = left > Log.most_entries
            self._move_at = left + Log.left_entries if long else self._long

    def shorten(
        self, find_log: Callable[[], Log | None], manifest: Manifest, *, leave: bool = True
    ) -> LogIndex | None:
        """Move the oldest entries into segments, and remove them from the manifest.

        A failure is only logged, because the next process tries again.

        Args:
            find_log: Returns the log; None if the queue is not a log.
            manifest: The manifest as it was just read.
            leave: Whether to remove the moved entries from the manifest now.

        Returns:
            The index, or None if it was not read and written.
        """
        try:
            found = find_log()
            index = None if found is None else move_entries(found, manifest)
            if index is not None and leave:
                end = index.end
                self._change(lambda before: left_to_log(before, end))
        except errors.OpenDataBufferError as error:
            log.warning("the oldest entries of %s were not moved: %s", self.key, error)
            # Do not try with each append: an index that was restored from an old copy stays old
            # until an operator repairs it.
            self._move_at += Log.left_entries
            return None
        return index

    def claim_epoch(
        self,
        last_acked_sequence: int | None,
        *,
        allow_data_loss: bool = False,
        note: bool = True,
    ) -> Manifest:
        """Take over as the consumer: raise the epoch, and drop acknowledged entries.

        After a lost answer the epoch may be raised twice, which does no harm.

        Args:
            last_acked_sequence: Continue after this sequence. None continues at the oldest entry.
            allow_data_loss: Continue even if later entries were removed.
            note: Whether to write the owner marker. With false, the caller calls :meth:`note`.

        Returns:
            The manifest with the new epoch.

        Raises:
            QueueReset: The queue does not exist, or ends before ``last_acked_sequence`` (failure
                F27).
            DataLoss: Later entries were removed, and ``allow_data_loss`` is false.
            Drained: The queue was sealed.
            StorageError: The store did not answer, or refused the write.
        """

        def claim(before: Manifest) -> Manifest:
            self._check_open(before)
            if last_acked_sequence is not None:
                check_resume(
                    self._object.last_seen,
                    last_acked_sequence,
                    self._config,
                    self._store.url,
                    allow_data_loss=allow_data_loss,
                    skipped=self.skipped,
                )
            after = before.with_epoch(before.epoch + 1)
            return after if last_acked_sequence is None else after.drop_through(last_acked_sequence)

        return self._change(claim, note=note)

    def dequeue(self, through_sequence: int, epoch: int) -> Manifest:
        """Drop all entries up to and including a sequence. Repeatable.

        Args:
            through_sequence: The last sequence to drop.
            epoch: The epoch of the caller.

        Returns:
            The manifest without these entries.

        Raises:
            Fenced: The manifest has another epoch. An earlier attempt of this call may have been
                applied.
            InvalidInput: The queue ends before this sequence (failure F27).
            Drained: The queue was sealed.
            StorageError: The store did not answer, or refused the write.
        """

        def drop(before: Manifest) -> Manifest:
            self.check_epoch(before, epoch)
            if through_sequence >= before.next_sequence:
                raise errors.InvalidInput(
                    f"cannot dequeue through {through_sequence}: manifest {self.key!r} ends at "
                    f"{before.next_sequence - 1}. Acknowledge only sequences that were handed out."
                )
            return before.drop_through(through_sequence)

        return self._change(drop)

    def replace(self, sequence: int, location: str, entry: NewEntry) -> Manifest:
        """Replace one entry, and raise the epoch. Repeatable.

        The new epoch fences the consumer: it has read the old entry, and must not acknowledge past
        a batch that it does not know.

        Args:
            sequence: The entry's sequence.
            location: The entry's present location.
            entry: The new entry.

        Returns:
            The manifest with the new entry.

        Raises:
            InvalidInput: The sequence has another location by now.
            Drained: The queue was sealed.
            StorageError: The store did not answer, or refused the write.
        """

        def swap(before: Manifest) -> Manifest:
            self._check_open(before)
            found = next(iter(before.entries(sequence, 1)), None)
            if found is not None and found.location == entry.location:
                return before
            if found is not None and found.sequence == sequence and found.location != location:
                raise errors.InvalidInput(
                    f"sequence {sequence} of manifest {self.key!r} names {found.location!r} by "
                    f"now, and not {location!r}: read the queue again"
                )
            return before.replace(sequence, entry).with_epoch(before.epoch + 1)

        return self._change(swap)

    def seal(self, read_to: int | None = None) -> bool:
        """Close an empty queue for good. Repeatable.

        An append that races with the seal is either applied first, so that the queue is not empty,
        or is refused: it raises ``Drained``.

        Args:
            read_to: For a log, the sequence up to which all its readers have acknowledged.

        Returns:
            Whether the queue is sealed. False if it still has entries; nothing was written then.

        Raises:
            StorageError: It is not known whether the queue was sealed; call it again.
            CorruptManifest: The manifest is damaged.
        """

        def close(before: Manifest) -> Manifest:
            if before.next_sequence == read_to and before.entry_count:
                before = before.drop_through(read_to - 1)
            return before if before.entry_count else before.with_epoch(SEALED_EPOCH)

        return self._change(close).sealed

    def check_epoch(self, manifest: Manifest | LogView, epoch: int) -> None:
        """Check that the manifest has this epoch.

        Args:
            manifest: The manifest, or the view of a log.
            epoch: The epoch of the consumer that asks.

        Raises:
            Fenced: It has another one (failure F8).
            Drained: The queue was sealed.
        """
        self._check_open(manifest)
        if manifest.epoch != epoch:
            queue = queue_name(self._store.url, self._config)
            raise errors.Fenced(self.key, epoch, manifest.epoch).at(queue)

    def _check_open(self, manifest: Manifest | LogView) -> None:
        if manifest.sealed:
            raise errors.Drained(self.key)

    def _change(self, change: Callable[[Manifest], Manifest], *, note: bool = True) -> Manifest:
        """Make a change that may be applied twice, and so needs no proof."""
        outcome = self._update(change, from_memory=self._changes_from_memory)
        if isinstance(outcome, outcomes.Unknown):
            raise errors.TransientStorageError(
                f"manifest {self.key!r} in {self._store.url} could not be written: "
                f"{outcome.reason}. It may have been written; try again."
            )
        return self._manifest_of(outcome, note=note)

    def _update(
        self,
        change: Callable[[Manifest], Manifest],
        append: _Append[T] | None = None,
        *,
        from_memory: bool = False,
    ) -> outcomes.Outcome[Manifest | None]:
        attempts, conflicts = self.attempts, self.conflicts
        self._conflicts_before = conflicts
        from_memory, self._just_read = from_memory or self._just_read, False

        def decide(before: Manifest | None) -> Manifest | None:
            self._decided_at = self._runtime.monotonic()
            if self._claim is not None:
                self._claim.check(before)
            old = before if before is not None else Manifest.empty()
            new = change(old)
            check_transition(old, new)
            if old.first_sequence < new.first_sequence and old.entry_count:
                (last,) = old.entries(new.first_sequence - 1, limit=1)
                self._dropped = last.sequence, last.location
            return before if new is old else new

        try:
            if self._pause is not None and self._pause.is_connected:
                # The broker has written since, so the manifest in memory is out of date.
                from_memory = False
                self._pause.ask(1)
            return self._object.update(decide, proof=append, from_memory=from_memory)
        finally:
            if tried := self.attempts - attempts:
                self._count(tried, self.conflicts - conflicts)

    def _after_conflict(self) -> float | None:
        """Ask a broker to pause. Return the seconds to the next attempt; None for the backoff."""
        if self._open_pause is not None:
            if self._pause is None:
                self._pause = self._open_pause(self._store, self._config, self._runtime)
            if self._pause.ask(self.conflicts - self._conflicts_before):
                return 0.0
        # A writer that waits longer each time hardly ever writes while a busy writer pauses
        # (producer/fairness.py). Waiting as long as a write takes is enough. If the store is
        # fast, use the backoff, which grows.
        took = self._runtime.monotonic() - self._decided_at
        if took <= self._config.backoff_base_ms / 1000:
            return None
        return self._runtime.random() * min(took, MAX_PAUSE_S)

    def _count(self, tried: int, lost: int) -> None:
        metrics.manifest_writes.add(tried, self._role)
        if lost:
            metrics.manifest_conflicts.add(lost, self._role)
        self._races_lost.extend([True] * lost + [False] * (tried - lost))
        rate = sum(self._races_lost) / len(self._races_lost)
        metrics.conflict_rate.set(rate, {**self.labels, **self._role})

    def _manifest_of(
        self,
        outcome: outcomes.Applied[Manifest | None] | outcomes.LostRace | outcomes.Vanished,
        *,
        note: bool = True,
    ) -> Manifest:
        """Return the manifest that holds now, or raise ``Conflict`` or ``QueueReset``."""
        if isinstance(outcome, outcomes.LostRace):
            # A store, or a proxy before it, that never accepts a right version looks like this.
            suspect(self._store, self.key)
            raise errors.Conflict(self.key, outcome.attempts, outcome.waited_s)
        if isinstance(outcome, outcomes.Vanished):
            raise vanished(self._config, self._store.url)
        manifest = outcome.value
        if note:
            self.note()
        return manifest or Manifest.empty()

    def note(self) -> None:
        """Write into the owner marker how far the queue got, if that is due. Never raises."""
        manifest = self._object.last_seen
        if self._claim is not None and manifest is not None:
            self._claim.note(manifest, acked_location=self._acked_location(manifest))

    def _acked_location(self, manifest: Manifest) -> str:
        """Return where the batch was that left the manifest last; empty if that is not known."""
        # The change that was to remove the batch may have been refused, and another consumer may
        # have removed more. Then the remembered location belongs to another batch.
        if self._dropped is None or self._dropped[0] != manifest.first_sequence - 1:
            return ""
        return self._dropped[1]

    def _check_append(self, before: Manifest, entries: Sequence[NewEntry]) -> None:
        self._check_open(before)
        limit = self._config.max_manifest_bytes  # every append rewrites it all (failure F35)
        size = before.size + sum(map(entry_bytes, entries))
        if size <= limit:
            return
        age_s = before.age_s(self._runtime.now_ms())
        oldest_ms = None if age_s is None else round(age_s * 1000)
        raise errors.QueueFull(self.key, size, limit, before.entry_count, oldest_ms)

    def _note_share(self, manifest: Manifest) -> None:
        """Report how full the manifest is, and warn before appends are refused (failure F35)."""
        limit = self._config.max_manifest_bytes
        metrics.manifest_share.set(manifest.size / limit, self.labels)
        text = fullness(manifest.size, limit)
        if text and self._warnings.is_due():
            log.warning("%s in %s: %s", self.key, self._store.url, text)


def fullness(size: int, limit: int) -> str:
    """Compare the size of a manifest with its limit.

    Args:
        size: Bytes of the manifest.
        limit: ``max_manifest_bytes``.

    Returns:
        A warning; empty below half of the limit.
    """
    share = size / limit
    if share < HALF_FULL:
        return ""
    state = "nearly full" if share >= NEARLY_FULL else "half full"
    return (
        f"the manifest is {state}: it has {share:.0%} of the {limit:,} bytes beyond which appends "
        "are refused. Start or speed up the consumer."
    )
