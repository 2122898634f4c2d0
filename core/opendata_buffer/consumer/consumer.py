"""Hands out queued batches in order and acknowledges them (OpenData RFC 0001 and 0003).

A queue has one consumer at a time. Starting one raises the manifest's epoch, which fences the
previous one: its next read of the manifest raises :class:`~.errors.Fenced`. Between two reads a
fenced consumer may still deliver batches that it fetched (failure F8). So write
``str(consumer.position_of(batch.sequence))`` with each batch's records, in one transaction of the
target system, and pass the last one written as ``last_acked_sequence`` at the next start; or guard
the target's commit by :attr:`Consumer.epoch` and :meth:`Consumer.check_fence`.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from opendata_buffer import metrics
from opendata_buffer.concurrency import Closeable
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import Closed, DataLoss, InvalidInput, OpenDataBufferError, QueueReset
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.cas import LAST_READ_S
from opendata_buffer.queue.consumer_info import write_consumer_info
from opendata_buffer.queue.ownership import claim_for_writing, owner_key
from opendata_buffer.queue.queue import OpenPause, Queue, broker_pause
from opendata_buffer.queue.repeats import Repeats
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from opendata_buffer.consumer.fetch import ConsumedBatch, FetchHandle

log = logging.getLogger(__name__)

_POSITION = re.compile(r"(?:([^\s:]+):)?([0-9]{1,20})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """The last batch of one queue that is surely processed.

    A sequence alone says nothing about a queue that was deleted and made again at the same
    place: its first batches would pass for read (failure F4). So save this, in the transaction
    that writes the records, and start the next consumer with it. It pickles, and
    ``Position.parse(str(position)) == position``::

        01JD5T4R3KXBMZ7QV9N2WG8Y00:41

    Attributes:
        queue_id: Of the queue; empty for one whose owner marker has none.
        sequence: Of the batch.
    """

    queue_id: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.queue_id}:{self.sequence}" if self.queue_id else str(self.sequence)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read what ``str`` printed. A bare sequence is a position in whatever queue is there.

        Raises:
            InvalidInput: It is no position.
        """
        found = _POSITION.fullmatch(text)
        if found is None:
            raise InvalidInput(
                f"position is {text!r}: use '<queue id>:<sequence>', as Consumer.position prints it"
            )
        return cls(found[1] or "", int(found[2]))

    @classmethod
    def of(cls, given: Position | int | str) -> Position:
        """A position from any of its forms; an int is a sequence in whatever queue is there.

        Raises:
            InvalidInput: It is none.
        """
        if isinstance(given, Position):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise InvalidInput(
                f"last_acked_sequence is {given!r}: use a sequence, a Position, or None to start "
                "at the oldest queued batch"
            )
        return cls("", given)


@dataclass(frozen=True, slots=True)
class Cursors:
    """The cursors of one consumer, and the unacknowledged sequences that were ``skipped``.

    Three cursors, each the sequence that comes next, move over the queue in this order::

        dequeued ............ acknowledged ............ handed out ............ end of queue
                  next_dequeue              next_ack                 next_hand_out

    Every move returns a new value or raises, so a consumer that fails halfway through a manifest
    write still has the value from before it (OpenData RFC 0003, ack_through).
    """

    next_dequeue: int
    next_ack: int
    next_hand_out: int
    skipped: frozenset[int] = frozenset()

    @classmethod
    def at(cls, next_sequence: int) -> Cursors:
        """A consumer that starts reading at ``next_sequence``."""
        return cls(next_sequence, next_sequence, next_sequence)

    @property
    def last_acked(self) -> int | None:
        """The last acknowledged sequence; None when there is none before the cursor."""
        return self.next_ack - 1 if self.next_ack else None

    @property
    def last_handed_out(self) -> int | None:
        """The last sequence handed out; None when there is none before the cursor."""
        return self.next_hand_out - 1 if self.next_hand_out else None

    @property
    def undequeued(self) -> int:
        """Acknowledged entries that the manifest still lists."""
        return self.next_ack - self.next_dequeue

    @property
    def next_open(self) -> int:
        """The first sequence that is neither acknowledged nor skipped."""
        found = self.next_ack
        while found in self.skipped:
            found += 1
        return found

    def hand_out(self, through: int, repeats: Iterable[int] = ()) -> Cursors:
        """Sequences up to and including ``through`` were handed out, earlier ones may be again; the
        ``repeats`` among them are skipped."""
        return replace(
            self,
            next_hand_out=max(self.next_hand_out, through + 1),
            skipped=self.skipped.union(repeats),
        )

    def skip(self, sequence: int) -> Cursors:
        """Give up one sequence: the next to be handed out, or one that was and is not acked."""
        if not self.next_ack <= sequence <= self.next_hand_out:
            raise InvalidInput(
                f"cannot skip sequence {sequence}: only {self._range(self.next_hand_out)} can be "
                "skipped, those handed out and not acknowledged and the next one"
            )
        return replace(
            self,
            next_hand_out=max(self.next_hand_out, sequence + 1),
            skipped=self.skipped | {sequence},
        )

    def ack(self, sequence: int) -> Cursors:
        """Acknowledge the next sequence and no other (failure F26); skipped ones are passed."""
        self._check(sequence)
        missing = next(
            (each for each in range(self.next_ack, sequence) if each not in self.skipped), None
        )
        if missing is not None:
            raise InvalidInput(
                f"cannot ack sequence {sequence}: {missing} comes first. Acknowledge in order, or "
                "everything up to a sequence with ack_through."
            )
        return self._acked(sequence)

    def ack_through(self, sequence: int) -> Cursors:
        """Acknowledge all up to and including a sequence that was handed out (failure F27)."""
        self._check(sequence)
        return self._acked(sequence)

    def dequeued(self) -> Cursors:
        """All that is acknowledged has left the manifest."""
        return replace(self, next_dequeue=self.next_ack)

    def jump(self, next_sequence: int) -> Cursors:
        """Go on at a later sequence because those before it are lost."""
        return Cursors(
            max(self.next_dequeue, next_sequence),
            max(self.next_ack, next_sequence),
            max(self.next_hand_out, next_sequence),
            frozenset(each for each in self.skipped if each >= next_sequence),
        )

    def _acked(self, sequence: int) -> Cursors:
        skipped = self.skipped and frozenset(each for each in self.skipped if each > sequence)
        return replace(self, next_ack=sequence + 1, skipped=skipped)

    def _check(self, sequence: int) -> None:
        if sequence < self.next_ack:
            raise InvalidInput(
                f"cannot ack sequence {sequence}: everything through {self.next_ack - 1} is "
                "acknowledged already"
            )
        if sequence >= self.next_hand_out:
            raise InvalidInput(
                f"cannot ack sequence {sequence}: it was not handed out. "
                f"{self._range(self.next_hand_out - 1).capitalize()} can be acknowledged."
            )

    def _range(self, last: int) -> str:
        if last < self.next_ack:
            return "nothing"
        if last == self.next_ack:
            return f"sequence {last}"
        return f"sequences {self.next_ack} to {last}"


def check_data_loss(
    cursors: Cursors, manifest: Manifest, key: str, *, allowed: bool, cause: str
) -> Cursors:
    """The cursors, moved to where the queue begins if entries are gone that were not handed out.

    Unless that is ``allowed``, ``DataLoss`` with the ``cause`` in a sentence (failure F28).
    """
    needed, oldest = cursors.next_hand_out, manifest.first_sequence
    if oldest <= needed:
        return cursors
    if not allowed:
        raise DataLoss(key, needed, oldest, cause)
    warn_data_loss(key, needed, oldest)
    return cursors.jump(oldest)


def warn_data_loss(key: str, needed: int, oldest: int) -> None:
    """Warn that entries from ``needed`` up to ``oldest`` are passed by."""
    log.warning(
        "data loss allowed: %s starts at %d, sequences %d to %d are gone unread",
        key,
        oldest,
        needed,
        oldest - 1,
    )


class Consumer(Closeable):
    """The one reader of a queue. Thread-safe; a context manager.

    Two ways to read, over the same cursors::

        while (batch := consumer.next_batch()) is not None:      # one by one
            write(batch)
            consumer.ack(batch.sequence)

        descriptors = consumer.next_descriptors(1_000)           # read-ahead
        for batch in fetch_many(consumer.fetch_handle().fetch, descriptors):
            write(batch)
        consumer.ack_through(batch.sequence)

    Creating one takes the queue over and, given a position, drops what is acknowledged. A new
    queue is created when there is none and no position was given.

    It ignores transactions: of a partition of a topic it delivers the batches of undecided and of
    rolled back ones as any others, and their acknowledgements as empty batches. A
    :class:`.TopicConsumer` delivers what is committed.

    After any error of a method nothing is changed, and the call can be repeated. All methods raise
    ``Closed`` after :meth:`close`; those that read or write the manifest raise ``Fenced`` when
    another consumer owns the queue, ``CorruptManifest``, ``QueueReset`` or ``StorageError``.

    Args:
        config: Where the queue is, and how to read it.
        last_acked_sequence: The last batch that is surely processed; reading starts behind it.
            A :class:`Position` or its string, or a bare sequence, which does not show whether the
            queue was deleted and made again. None: at the oldest queued batch.
        store: Instead of the one ``config.store`` names.
        runtime: Clock and threads.
        allow_data_loss: Go on behind lost entries, with a warning, instead of raising ``DataLoss``.
        queue: Use this one, which the same process also appends to, instead of one of its own.
        program: Name of the reading program, shown by ``opendata-buffer status``.
        open_pause: Has a broker pause while this consumer changes the manifest; without effect
            with ``queue``.

    Raises:
        UnsafeStore: The store has no compare-and-swap.
        PrefixConflict: The data prefix belongs to the queue of another manifest (failure F7).
        QueueReset: A position was given and is another queue's, or the manifest is missing or
            ends before it (failures F4, F27); or the manifest was lost or restored from an old
            copy, and ``config.recreate`` is off.
        DataLoss: A position was given, and later batches were dequeued by another program.
        CorruptManifest, StorageError, Conflict: The queue could not be taken over.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        last_acked_sequence: Position | int | str | None = None,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
        allow_data_loss: bool = False,
        queue: Queue | None = None,
        program: str = "Python",
        open_pause: OpenPause = broker_pause,
    ) -> None:
        self._config = config
        self._runtime = runtime if runtime is not None else SystemRuntime()
        opened = store if store is not None else open_store(config.store, config.store_options)
        # The store's own URL: a relative path means another place once the process has changed
        # its directory.
        self._fetched_from = config if store is not None else replace(config, store=opened.url)
        self._given_store = store
        self._allow_data_loss = allow_data_loss
        self._lock = self._runtime.condition()
        self._closed = False
        start = None if last_acked_sequence is None else Position.of(last_acked_sequence)

        with self._deadline():
            # First, so that a consumer with the wrong configuration does not fence the right one.
            if queue is None:
                claim = claim_for_writing(opened, config, runtime=self._runtime)
                queue = Queue(
                    opened,
                    config,
                    runtime=self._runtime,
                    role="consumer",
                    claim=claim,
                    open_pause=open_pause,
                )
            self._queue = queue
            last_acked = None if start is None else self._sequence_of(start, opened.url)
            self._repeats = Repeats(opened, config, self._runtime, queue.queue_id)
            if last_acked is not None:
                found = queue.read() or Manifest.empty()
                if found.first_sequence <= last_acked < found.next_sequence:
                    # The claim takes these out of the manifest.
                    acked = found.entries(limit=last_acked + 1 - found.first_sequence)
                    self._repeats.described(acked)
                    self._repeats.note(last_acked + 1)
            manifest = self._queue.claim_epoch(last_acked, allow_data_loss=allow_data_loss)
            # Behind the claim: what the consumer before it takes out, it has noted by now.
            self._repeats.load()
            write_consumer_info(opened, config, self._runtime, manifest.epoch, program=program)
        self._epoch = manifest.epoch
        self._next_sequence = manifest.next_sequence
        # An empty queue, too, knows its next sequence: whatever is missing between here and the
        # first batch handed out was lost (failure F28).
        self._cursors = Cursors.at(manifest.first_sequence)
        first = manifest.first_sequence
        if last_acked is not None and first > last_acked + 1:
            warn_data_loss(config.manifest_path, last_acked + 1, first)
        log.info("epoch %d owns %s, reads from %d", self._epoch, config.manifest_path, first)

        metrics.consumer_lag_seconds.watch(self, Consumer._lag_s, queue.labels)
        metrics.oldest_unacked_seconds.watch(self, Consumer._unacked_s, queue.labels)

        self._gc: GarbageCollector | None = None
        if config.gc.enabled:
            self._gc = GarbageCollector(opened, config, runtime=self._runtime, epoch=self._epoch)
            self._gc.start()
            # A consumer that is dropped without close() must not leave its collector running
            # (failure F9).
            weakref.finalize(self, self._gc.abandon)

    @property
    def epoch(self) -> int:
        """The epoch this consumer owns the queue with; higher than that of any before it."""
        return self._epoch

    @property
    def position(self) -> Position | None:
        """What to start the next consumer with; None before the queue's first batch."""
        last_acked = self._cursors.last_acked
        return None if last_acked is None else self.position_of(last_acked)

    def position_of(self, sequence: int) -> Position:
        """The position of a batch of this queue, to be saved beside its records."""
        return Position(self._queue.queue_id, sequence)

    @property
    def last_acked_sequence(self) -> int | None:
        """The sequence of :attr:`position`."""
        return self._cursors.last_acked

    @property
    def last_handed_out_sequence(self) -> int | None:
        """The read cursor: the last sequence handed out; None before the queue's first batch."""
        return self._cursors.last_handed_out

    @property
    def first_sequence(self) -> int:
        """The first that is not acknowledged: where reading starts, until something is."""
        return self._cursors.next_ack

    @property
    def next_sequence(self) -> int:
        """What the next appended batch will get, as of the last read of the manifest."""
        return self._next_sequence

    def next_batch(self) -> ConsumedBatch | None:
        """The next batch in order, or None when nothing is queued.

        The read cursor advances only after the batch was fetched and decoded: after any error
        the next call tries the same batch again.

        Raises:
            PoisonBatch: The batch is missing, unreadable or foreign. :meth:`skip` passes it by.
            DataLoss: The queue does not continue at the cursor.
        """
        with self._lock:
            self._check_open()
            while found := self._peek(1):
                batch = None if found[0].repeats is not None else self._fetch_handle.fetch(found[0])
                self._hand_out(found)
                if batch is not None:
                    return batch
            return None

    def ack(self, sequence: int) -> None:
        """Acknowledge the next batch: it is processed and need never be delivered again.

        Every ``config.ack_interval`` acknowledgements the manifest is written.

        Raises:
            InvalidInput: Not the next in order, or not handed out (failure F26).
            Conflict: The manifest was due to be written, and other writers won each time.
        """
        with self._lock:
            self._check_open()
            moved = self._cursors.ack(sequence)
            self._acknowledge(moved, moved.undequeued >= self._config.ack_interval)

    def ack_through(self, sequence: int) -> None:
        """Acknowledge everything up to and including ``sequence``, in one manifest write.

        It is not checked that every batch before was processed: pass the highest sequence with
        nothing pending before it (OpenData RFC 0003, Descriptor handout contract).

        Raises:
            InvalidInput: Not handed out (failure F27), or acknowledged already.
            Conflict: The manifest was not written: other writers won each time.
        """
        with self._lock:
            self._check_open()
            self._acknowledge(self._cursors.ack_through(sequence), write=True)

    def flush(self) -> None:
        """Take everything acknowledged out of the manifest; no write when there is nothing.

        Raises:
            Conflict: The manifest was not written: other writers won each time.
        """
        with self._lock:
            self._check_open()
            self._acknowledge(self._cursors, self._cursors.undequeued > 0)

    def next_descriptors(self, max: int) -> list[BatchDescriptor]:  # noqa: A002
        """Up to so many next entries, from one read of the manifest; nothing is fetched.

        The read cursor advances past them at once. A descriptor that is lost is delivered again
        only by a new consumer. Entries whose location was queued before are left out, and pass
        with the acknowledgement of what follows them.

        Args:
            max: Most descriptors returned; 0 reads nothing.

        Raises:
            InvalidInput: ``max`` is negative.
            DataLoss: The queue does not continue at the cursor.
        """
        while entries := self.next_entries(max):
            if found := [each for each in entries if each.repeats is None]:
                return found
        return []

    def next_entries(self, max: int) -> list[BatchDescriptor]:  # noqa: A002
        """As :meth:`next_descriptors`, with the repeats: every entry, in order of sequence."""
        if max < 0:
            raise InvalidInput(f"max is {max!r}: a number of descriptors is not negative")
        with self._lock:
            self._check_open()
            found = self._peek(max) if max else []
            if found:
                self._hand_out(found)
            return found

    def queued(self, begin: int, end: int) -> list[BatchDescriptor]:
        """Entries from one sequence up to, not including, another, that are still queued.

        As of the last read of the manifest; moves no cursor, reads nothing. For what was handed
        out and is needed again before it is acknowledged.
        """
        manifest = self._queue.last_seen
        if manifest is None or begin >= end:
            return []
        return [BatchDescriptor.of(entry) for entry in manifest.entries(begin, end - begin)]

    def fetch_descriptor(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """Fetch and decode one batch; moves no cursor.

        Raises:
            PoisonBatch: The batch is missing, unreadable or foreign.
        """
        self._check_open()
        return self._fetch_handle.fetch(descriptor)

    def fetch_handle(self) -> FetchHandle:
        """For fetching in other threads and processes. It outlives the consumer, and a fence."""
        return self._fetch_handle.clone()

    @cached_property
    def _fetch_handle(self) -> FetchHandle:
        """Made by the first fetch: it opens the store once more, which a planner does not need."""
        # pyarrow takes 0.2 s to import: commands that only read a manifest do without it.
        from opendata_buffer.consumer.fetch import FetchHandle

        return FetchHandle.of(self._fetched_from, store=self._given_store, runtime=self._runtime)

    def skip(self, sequence: int) -> BatchDescriptor:
        """Give up one batch for ever: the next one, or one handed out and not acknowledged.

        For batches that cannot be delivered (failure F25). The skip is logged as a warning with
        the batch's location, for the audit. The entry leaves the queue with the next
        acknowledgement behind it, or with its own, so a position stored by the target system
        never falls behind the queue. Returns what was skipped, for
        :meth:`.TransactionFilter.skip`.

        Raises:
            InvalidInput: Another sequence, or one that is not queued.
            DataLoss: The queue does not continue at the cursor.
        """
        with self._lock:
            self._check_open()
            entries = self._read().entries(start=sequence, limit=1)
            moved = self._cursors.skip(sequence)
            if not entries or entries[0].sequence != sequence:
                raise InvalidInput(f"cannot skip sequence {sequence}: it is not queued")
            log.warning(
                "skipped batch %d at %r of %s on request, epoch %d: its records are not delivered",
                sequence,
                entries[0].location,
                self._queue.key,
                self._epoch,
            )
            self._cursors = moved
            self._repeats.forget(entries[0].location)
            return BatchDescriptor.of(entries[0])

    def check_fence(self) -> None:
        """Make sure that this consumer still owns the queue, by one read of the manifest.

        Call it before committing to a system that cannot compare epochs itself; it narrows the
        window of failure F8 and cannot close it.

        Raises:
            Fenced: Another consumer owns the queue.
        """
        with self._lock:
            self._check_open()
            self._read()

    def __len__(self) -> int:
        """Batches queued and not acknowledged, by one read of the manifest; raises as a read."""
        with self._lock:
            self._check_open()
            return self._queued(self._read())

    def __bool__(self) -> bool:
        # Without this, `if consumer:` would call __len__, which asks the store, and be false for an
        # empty queue.
        return True

    def close(self) -> None:
        """Write out acknowledgements and stop the collector. Free to repeat.

        The consumer is closed also when this raises. What was acknowledged and could not be
        written is then delivered again to the next consumer, unless that is given a position.

        Raises:
            Fenced: There was something to write and another consumer owns the queue.
            Conflict: The manifest was not written: other writers won each time.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        metrics.consumer_lag_seconds.unwatch(self)
        metrics.oldest_unacked_seconds.unwatch(self)
        try:
            # Acknowledgements before the collector: it may be in a long request, and this process
            # may be killed before that returns.
            with self._lock, self._deadline():
                self._acknowledge(self._cursors, self._cursors.undequeued > 0)
                self._queue.close()
        finally:
            if self._gc is not None:
                self._gc.stop()

    def _note_failed_close(self, error: OpenDataBufferError) -> None:
        # The caller's own error matters more, and often is the cause of this one.
        log.warning("closing after an error failed too: %s", error)

    def _sequence_of(self, position: Position, url: str) -> int:
        """The sequence of a position, if it is one of this queue."""
        own = self._queue.queue_id
        if position.queue_id and own and position.queue_id != own:
            raise QueueReset(
                f"cannot resume after {position}: manifest {self._queue.key!r} in {url} belongs to "
                f"queue {own}. The store or the prefix was changed, or the queue was "
                "deleted and made again. Start without a position to read what is queued now. If "
                f"only {owner_key(self._config.data_path_prefix)!r} was lost, write the old id "
                "back into it."
            )
        return position.sequence

    def _acknowledge(self, moved: Cursors, write: bool) -> None:
        manifest = None
        if write:
            # The manifest first: until it is written nothing here has changed, and the call can
            # be repeated (OpenData RFC 0003, ack_through).
            self._repeats.note(moved.next_ack)
            manifest = self._queue.dequeue(moved.next_ack - 1, self._epoch)
            moved = moved.dequeued()
        metrics.acks.add(moved.next_ack - self._cursors.next_ack)
        self._cursors = moved
        if manifest is not None:
            # A consumer that ends with an empty queue reads no more: without this the metric would
            # keep the length from before its last acknowledgement.
            metrics.queue_length.set(self._queued(manifest), self._queue.labels)

    def _peek(self, limit: int) -> list[BatchDescriptor]:
        """The next entries; moves the cursor only over a loss that was allowed."""
        manifest = self._read()
        start = self._cursors.next_hand_out
        return self._repeats.described(manifest.entries(start, limit))

    def _hand_out(self, found: list[BatchDescriptor]) -> None:
        repeats = [each.sequence for each in found if each.repeats is not None]
        self._cursors = self._cursors.hand_out(found[-1].sequence, repeats)
        if repeats:
            metrics.repeats_dropped.add(len(repeats))
        metrics.descriptors_handed_out.add(len(found) - len(repeats))

    def _read(self) -> Manifest:
        """The manifest, if it is still ours and continues where this consumer is."""
        # The queue sees by itself when its manifest vanishes or goes backwards (failure F4).
        manifest = self._queue.read()
        assert manifest is not None
        self._queue.check_epoch(manifest, self._epoch)
        self._cursors = check_data_loss(
            self._cursors,
            manifest,
            self._queue.key,
            allowed=self._allow_data_loss,
            cause="A consumer reads this queue without claiming it, or the manifest was edited.",
        )
        self._next_sequence = manifest.next_sequence
        metrics.queue_length.set(self._queued(manifest), self._queue.labels)
        return manifest

    def _queued(self, manifest: Manifest) -> int:
        return manifest.next_sequence - max(manifest.first_sequence, self._cursors.next_open)

    # The metrics reader's thread calls these without the lock, which a fetch may hold for long:
    # cursors and manifest are immutable values.

    def _lag_s(self) -> float:
        """Age of the oldest batch that is not acknowledged."""
        manifest, sequence = self._queue.last_seen, self._cursors.next_open
        age_s = None if manifest is None else manifest.age_s(self._runtime.now_ms(), sequence)
        return age_s or 0.0

    def _unacked_s(self) -> float:
        """Age of the oldest batch that was handed out and is not acknowledged."""
        cursors = self._cursors
        return self._lag_s() if cursors.next_open < cursors.next_hand_out else 0.0

    def _deadline(self) -> AbstractContextManager[None]:
        """For several requests of one call: together they take no longer than one change may."""
        return deadline(self._runtime, self._config.cas_deadline_ms / 1000 + LAST_READ_S)

    def _check_open(self) -> None:
        if self._closed:
            position = None if self.position is None else str(self.position)
            raise Closed(
                f"the consumer of {self._queue.key!r} is closed: make a new one, with "
                f"last_acked_sequence={position!r}"
            )
