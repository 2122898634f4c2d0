"""The queue: one manifest, and the changes that producers and consumers make to it.

Each is a pure function from the manifest as it is to the manifest as it shall be, and
:mod:`opendata_buffer.queue.cas` reads and writes (OpenData RFC 0001, Queue).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from opendata_buffer import errors, metrics, outcomes
from opendata_buffer.config import PARTITION_NAME, QueueConfig
from opendata_buffer.formats.manifest import (
    SEALED_EPOCH,
    Manifest,
    NewEntry,
    check_transition,
    entry_bytes,
)
from opendata_buffer.queue import unaccounted
from opendata_buffer.queue.cas import CasStore, OutcomeUnknown
from opendata_buffer.queue.hints import queue_hint, topic_hint
from opendata_buffer.queue.log import Log, LogIndex, LogView
from opendata_buffer.queue.marker import Watermark
from opendata_buffer.queue.neighbours import TOPIC_KEY, missing_topic_hint
from opendata_buffer.queue.ownership import QueueClaim, check_owner
from opendata_buffer.queue.stored_manifest import (
    check_reached,
    check_resume,
    manifest_object,
    read_manifest,
    vanished,
)
from opendata_buffer.runtime import Interval, Runtime
from opendata_buffer.stores.base import Store, exists

T = TypeVar("T")

log = logging.getLogger(__name__)

HALF_FULL, NEARLY_FULL = 0.5, 0.8
"""Shares of ``max_manifest_bytes`` from which on a manifest is warned about."""

WARN_S = 10.0
"""Seconds between two warnings about one manifest."""

NO_LOG_S = 60.0
"""Seconds between two looks whether a queue with a long manifest has become a log."""

MAX_PAUSE_S = 0.1
"""Longest wait after a lost race, where a write takes longer than the first step of the backoff."""


@dataclass(eq=False)
class _Append(Generic[T]):
    """The change of one append, all of its group or nothing, and its :class:`~.cas.Proof`. Pure.

    The group is recognised by its locations, each of which is used once (failures F1, F2).
    """

    entries: Sequence[NewEntry]
    check: Callable[[Manifest, Sequence[NewEntry]], None]
    guard: Callable[[Manifest], T | None] | None
    joins_others: bool = False
    """Whether a part of the group may have been appended by another process meanwhile."""
    sequence: int = -1
    """Of the first entry: where it is, or where the last attempt was to put it."""
    stopped: T | None = None
    """What the guard returned in the last attempt; None to go on."""
    moved: int = 0
    """Entries before this sequence are in segments of the log, and leave the manifest."""

    def decide(self, before: Manifest) -> Manifest:
        """The manifest with the group behind its entries; the same one where the guard stops."""
        self.stopped = None if self.guard is None else self.guard(before)
        if self.stopped is not None:
            return before
        # First: a producer that waits at a full manifest would copy it in each attempt.
        shorter = left_to_log(before, self.moved)
        self.check(shorter, self.entries)
        self.sequence = before.next_sequence
        return shorter.append(self.entries)

    def mark(self) -> int:
        """The first sequence of the attempt."""
        return self.sequence

    def find(self, now: Manifest | None, marks: Sequence[int]) -> bool:
        """Whether the group is in the manifest."""
        if now is None:
            return False
        # The last entry, because the consumer drops the group from its front.
        last = now.find(self.entries[-1].location)
        if last is not None:
            first = last - len(self.entries) + 1
            left = max(first, now.first_sequence)
            # A broker's client that was cut off may have appended its own part elsewhere.
            others = [each.location for each in self.entries[left - first : -1]]
            if others == [each.location for each in now.entries(left, last - left)]:
                if self.joins_others and first < left:
                    raise OutcomeUnknown("a part of the group may be another process's append")
                self.sequence, self.stopped = first, None
                return True
        if any(mark < now.first_sequence for mark in marks):
            raise OutcomeUnknown("those sequences were dequeued since")
        return False


def left_to_log(manifest: Manifest, moved: int) -> Manifest:
    """The manifest without the entries before a sequence, which the index of the log has."""
    if not manifest.first_sequence < moved <= manifest.next_sequence:
        return manifest
    return manifest.drop_through(moved - 1)


class WritePause(Protocol):
    """Has a broker leave a manifest to this process, which reads before it writes, and so loses
    every race against a broker that writes from memory. It only saves time."""

    @property
    def is_connected(self) -> bool:
        """Whether a broker is known, and is to be asked before the first attempt of a change."""

    def ask(self, writes: int) -> bool:
        """Ask for a pause of so many of the broker's reads and writes: more after each race that
        was lost all the same. Whether one begins now; raises nothing."""

    def close(self) -> None:
        """End the connection to the broker; the next :meth:`ask` may open another."""


OpenPause = Callable[[CasStore, QueueConfig, Runtime], WritePause]
"""Called at the first lost race, the sign that another process writes the manifest, too."""


class Queue:
    """One manifest, as seen by one owner. Not thread-safe: its owner serialises the calls.

    Args:
        role: Label of the write and conflict counters: ``producer``, ``consumer``, ...
        claim: A writer's claim, whose marker refuses a manifest that was lost or restored, and
            remembers how far this one gets. None for a reader.
        after_conflict: See :class:`.CasObject`.
        open_pause: Has a broker pause for each change, from the first lost race on; for owners that
            read before they write. None: no broker is asked.
    """

    # Producers write all the time, so a consumer's remembered manifest is out of date: one read is
    # cheaper than a lost race, which also makes a producer retry.
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
    ) -> None:
        self._store = store
        self._open_pause = open_pause
        self._pause: WritePause | None = None
        self._conflicts_before = 0
        self._config = config
        self._runtime = runtime
        self._claim = claim
        self.queue_id = "" if claim is None else claim.queue_id
        """The queue's id; empty without a claim."""
        self.is_log = claim is not None and claim.is_log
        """Whether the queue was a log when it was claimed."""
        # Sequence and location of the last entry that a change took out.
        self._dropped: tuple[int, str] | None = None
        self._role = {"role": role}
        self.labels = {"queue": metrics.queue_label(store.url, config.manifest_path)}
        """Attributes of gauges about this queue."""
        self._races_lost: deque[bool] = deque(maxlen=100)
        self.key = config.manifest_path
        """The manifest's key."""
        self._object = manifest_object(
            store,
            config,
            runtime,
            check_read=lambda known, now: check_reached(
                Watermark.of(known), now, config, store.url
            ),
            after_conflict=after_conflict or self._after_conflict,
        )
        self._decided_at = runtime.monotonic()
        self._warnings = Interval(runtime, WARN_S)
        self._log: Log | None = None
        self._log_searches = Interval(runtime, NO_LOG_S)
        self._moved = 0
        self._move_at = Log.most_entries
        self._long = 0

    @property
    def attempts(self) -> int:
        """Attempts to write the manifest so far."""
        return self._object.attempts

    @property
    def conflicts(self) -> int:
        """Attempts that lost a race."""
        return self._object.conflicts

    @property
    def last_seen(self) -> Manifest | None:
        """The manifest as last read or written; None when none was seen yet."""
        return self._object.last_seen

    def close(self) -> None:
        """Write into the marker how far the queue got. Free to repeat; raises nothing."""
        manifest = self._object.last_seen
        if self._claim is not None and manifest is not None:
            self._claim.note(manifest, now=True, acked_location=self._acked_location(manifest))
        self.disconnect()

    def disconnect(self) -> None:
        """End the connection to a broker; the next change opens one if it has to."""
        if self._pause is not None:
            self._pause.close()

    def read(self) -> Manifest | None:
        """The manifest as it is now, or None when the queue was never created; one conditional GET.

        ``QueueReset`` where it vanished or went backwards since it was last read (failure F4).
        """
        found = self._object.read()
        if isinstance(found, outcomes.Vanished):
            raise vanished(self._config, self._store.url)
        if self._claim is not None:
            self._claim.check(found)
        return found

    def append(
        self,
        entries: Sequence[NewEntry],
        *,
        guard: Callable[[Manifest], T | None] | None = None,
        read_first: bool = False,
        makes_room: bool = False,
    ) -> int | T:
        """Append a group in one write: contiguous, all or none. Returns the first sequence.

        Idempotent by location: after a lost answer the manifest is read again and searched for
        the group, so no batch is ever appended twice (failures F1, F2).

        Args:
            entries: At least one.
            guard: Called with each manifest that is about to be replaced. Any value but None stops
                the append, which returns it. What it checks holds when the write is applied.
            read_first: Others write, too: the first attempt is not made from memory.
            makes_room: The entries let consumers acknowledge others, as transaction markers do:
                refused at ``max_manifest_bytes``, they would keep the queue full for ever.

        Raises ``QueueFull``, ``Conflict`` where every attempt lost its race until the deadline,
        ``Drained`` where the queue was sealed, ``CommitStateUnknown`` where the group may have been
        appended. After any other error nothing was.
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
                    continue  # in neither: the attempt was bound to a version that is gone
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
        self._move(manifest)
        return append.sequence

    def find_moved(self, entries: Sequence[NewEntry], since: int) -> tuple[bool, int | None]:
        """Look for a group that was appended at ``since`` or later in the segments of a log.

        Whether that answers it, and the first sequence of the group, if it is there. No answer is
        a queue that is no log, a gap or a forgotten part in the index, or a part of the group.
        """
        manifest = self._object.last_seen
        wanted = [each.location for each in entries]
        try:
            moved = Log(self._store, self._config, self._runtime, self.queue_id)
            index = moved.read()
            if index is None or manifest is None:
                return False, None
            last = moved.find(index, wanted[-1], since)
            if last is not None:
                first = last - len(wanted) + 1
                found = [each.location for each in moved.entries(index, first, len(wanted))]
                return found == wanted, first if found == wanted else None
            oldest = min([part.first for part in index.parts()], default=index.end)
            gap = any(end > since for _, end in index.lost) or manifest.first_sequence > index.end
            return not gap and oldest <= since, None
        except errors.OpenDataBufferError as error:
            log.warning("%s was not looked for in the log: %s", wanted[-1], error)
            return False, None

    def _found_log(self) -> Log | None:
        """The log, if the queue is one; asked once in a while until it is."""
        if self._log is None and (self.is_log or self._log_searches.is_due()):
            found = Log(self._store, self._config, self._runtime, self.queue_id)
            self._log = found if found.read() is not None else None
        return self._log

    def _move(self, manifest: Manifest) -> None:
        """Move the oldest entries of a log into a segment; the next append leaves them out."""
        unmoved = manifest.next_sequence - max(manifest.first_sequence, self._moved)
        if not self._long and unmoved >= self._move_at:
            # Each process a little later than the others, so that one of them moves.
            self._long = self._move_at = int(Log.most_entries * (1 + self._runtime.random() / 2))
        if unmoved < self._move_at:
            return
        # Writers that end before their next append leave nothing out.
        index = self.shorten(
            self._found_log, manifest, leave=manifest.entry_count >= 2 * self._long
        )
        if index is not None:
            self._moved = index.end
            left = manifest.next_sequence - max(manifest.first_sequence, index.end)
            # What an open transaction keeps here is not looked at with each append.
            long = left > Log.most_entries
            self._move_at = left + Log.left_entries if long else self._long

    def shorten(
        self, find_log: Callable[[], Log | None], manifest: Manifest, *, leave: bool = True
    ) -> LogIndex | None:
        """Move the oldest entries into segments, and have them ``leave`` the manifest; the index,
        where it was read and written. What fails is only logged: the next process tries again.
        """
        try:
            found = find_log()
            index = None if found is None else found.move(manifest)
            if index is not None and leave:
                end = index.end
                self._change(lambda before: left_to_log(before, end))
        except errors.OpenDataBufferError as error:
            log.warning("the oldest entries of %s were not moved: %s", self.key, error)
            # Not with each append: an index that was restored stays so until somebody repairs it.
            self._move_at += Log.left_entries
            return None
        return index

    def claim_epoch(
        self, last_acked_sequence: int | None, *, allow_data_loss: bool = False
    ) -> Manifest:
        """Take over as the queue's consumer: raise the epoch, drop what is already acknowledged.

        Raising it once more is as good (OpenData RFC 0001, Queue), so a lost answer needs no proof.
        Raises as :func:`.check_resume`, or ``Drained`` where the queue was sealed.
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
                )
            after = before.with_epoch(before.epoch + 1)
            return after if last_acked_sequence is None else after.drop_through(last_acked_sequence)

        return self._change(claim)

    def dequeue(self, through_sequence: int, epoch: int) -> Manifest:
        """Drop all entries up to and including ``through_sequence``; repeatable.

        ``Fenced`` where the manifest has another epoch (an earlier attempt may be applied),
        ``InvalidInput`` where the queue ends before (failure F27).
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
        """Replace the entry that has this sequence and location, and raise the epoch: a consumer
        that has the old entry cannot acknowledge past a batch that it knows nothing of. Repeatable.
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
        """Close an empty queue for good; repeatable. While it has entries: False, no write.

        ``read_to`` is, of a log, up to where all its readers have acknowledged. An append that
        races with the seal is applied first, and the queue is not empty, or refused (``Drained``).
        """

        def close(before: Manifest) -> Manifest:
            if before.next_sequence == read_to and before.entry_count:
                before = before.drop_through(read_to - 1)
            return before if before.entry_count else before.with_epoch(SEALED_EPOCH)

        return self._change(close).sealed

    def check_epoch(self, manifest: Manifest | LogView, epoch: int) -> None:
        """Raise ``Fenced`` unless ``epoch`` is the manifest's (failure F8), ``Drained`` if it is
        sealed."""
        self._check_open(manifest)
        if manifest.epoch != epoch:
            raise errors.Fenced(self.key, epoch, manifest.epoch)

    def _check_open(self, manifest: Manifest | LogView) -> None:
        if manifest.sealed:
            raise errors.Drained(self.key)

    def _change(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Make a change that may be applied twice, and so needs no proof."""
        outcome = self._update(change, from_memory=self._changes_from_memory)
        if isinstance(outcome, outcomes.Unknown):
            raise errors.TransientStorageError(
                f"manifest {self.key!r} in {self._store.url} could not be written: "
                f"{outcome.reason}. It may have been written; try again."
            )
        return self._manifest_of(outcome)

    def _update(
        self,
        change: Callable[[Manifest], Manifest],
        append: _Append[T] | None = None,
        *,
        from_memory: bool = False,
    ) -> outcomes.Outcome[Manifest | None]:
        attempts, conflicts = self.attempts, self.conflicts
        self._conflicts_before = conflicts

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
                # The broker has written since: what is remembered is out of date.
                from_memory = False
                self._pause.ask(1)
            return self._object.update(decide, proof=append, from_memory=from_memory)
        finally:
            if tried := self.attempts - attempts:
                self._count(tried, self.conflicts - conflicts)

    def _after_conflict(self) -> float | None:
        """Have a broker pause, where one is; seconds to the next attempt, None for the backoff."""
        if self._open_pause is not None:
            if self._pause is None:
                self._pause = self._open_pause(self._store, self._config, self._runtime)
            if self._pause.ask(self.conflicts - self._conflicts_before):
                return 0.0
        # A writer that waits longer each time hardly ever writes while a busy writer pauses
        # (producer/fairness.py). The time that a write takes is wait enough, unless the store
        # is quick: then the backoff, which grows.
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
        self, outcome: outcomes.Applied[Manifest | None] | outcomes.Conflict | outcomes.Vanished
    ) -> Manifest:
        """The manifest that holds now; raises ``Conflict`` or ``QueueReset`` without one."""
        if isinstance(outcome, outcomes.Conflict):
            raise errors.Conflict(self.key, outcome.attempts, outcome.waited_s)
        if isinstance(outcome, outcomes.Vanished):
            raise vanished(self._config, self._store.url)
        manifest = outcome.value
        if self._claim is not None and manifest is not None:
            self._claim.note(manifest, acked_location=self._acked_location(manifest))
        return manifest or Manifest.empty()

    def _acked_location(self, manifest: Manifest) -> str:
        """Where the batch was that left this manifest last; empty where that is not known."""
        # The change that was to take the batch out may have been refused, and another consumer may
        # have taken more: then the remembered location is of another batch.
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
        """Report how full the manifest is, before appends are refused (failure F35)."""
        limit = self._config.max_manifest_bytes
        metrics.manifest_share.set(manifest.size / limit, self.labels)
        text = fullness(manifest.size, limit)
        if text and self._warnings.is_due():
            log.warning("%s in %s: %s", self.key, self._store.url, text)


def fullness(size: int, limit: int) -> str:
    """A warning about a manifest of this size, in bytes; empty below half of its limit."""
    share = size / limit
    if share < HALF_FULL:
        return ""
    state = "nearly full" if share >= NEARLY_FULL else "half full"
    return (
        f"the manifest is {state}: it has {share:.0%} of the {limit:,} bytes beyond which appends "
        "are refused. Start or speed up the consumer."
    )


def removed_before(count: int, url: str, config: QueueConfig, who: str) -> str:
    """Return a warning for a program that starts at the earliest batch of a queue, which is not
    the first one that was produced: those who know Kafka expect to read everything again.

    Args:
        count: Batches that left the queue before, in all partitions of a topic.
        url: The store's URL.
        config: The queue, or one partition.
        who: What begins to read, such as ``this query``.
    """
    what = "1 batch was" if count == 1 else f"{count} batches were"
    return (
        f"{what} read and removed before {who} and will not be read: reading a queue removes its "
        "records. To keep them for other readers and for replays, make a log: 'opendata-buffer "
        f"readers enable {topic_hint(url, config)} --retention 7d'"
    )


def require_queue(store: Store, config: QueueConfig, runtime: Runtime) -> None:
    """Raise ``InvalidInput`` where a worker would create a queue at a mistyped path, ``QueueReset``
    where one has lost its manifest."""
    if read_manifest(store, config, runtime) is None:
        claim = check_owner(store, config, runtime=runtime)
        if claim is None:
            raise no_such_queue(store, config, creates=True)
        claim.check(None)


def no_such_queue(
    store: Store, config: QueueConfig, *, creates: bool = False
) -> errors.InvalidInput:
    """The error of a command or reader that found no manifest: what is there instead. With
    ``creates`` the caller has an option that creates a queue."""
    prefix = config.data_path_prefix
    if exists(store, TOPIC_KEY):
        root = QueueConfig(store=store.url, store_options=config.store_options)
        lists = f"'opendata-buffer status {queue_hint(store.url, root)}' lists them"
        if PARTITION_NAME.fullmatch(prefix) is None:
            return errors.InvalidInput(
                f"there is a topic at {store.url}, and one queue is needed: use TopicConsumer, "
                f"or name a partition by data_path_prefix; {lists}"
            )
        return errors.InvalidInput(
            f"partition {prefix!r} of the topic at {store.url} was never written; {lists}"
        )
    if lost := missing_topic_hint(store):
        return errors.InvalidInput(lost)
    hint = queue_hint(store.url, config)
    if error := unaccounted.refusal(store, config, None, hint):
        return error
    create = ", or create it with create_if_missing=True" if creates else ""
    return errors.InvalidInput(
        f"there is no queue: no manifest {config.manifest_path!r} in {store.url}. Produce into it "
        f"first{create}, or name the right queue with data_path_prefix or manifest_path."
    )
