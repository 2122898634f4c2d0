"""Hand out a queue's entries in order and acknowledge them, without fetching their batches.

An entry is a line of the manifest. It names a batch, the object that holds records. Programs that
decide themselves where a batch is fetched work with entries: the Spark source plans them for its
executors, a dispatcher hands them to workers, and a consumer of a topic fetches those of all its
partitions together. :class:`.Consumer` adds the fetching, for programs that read one queue.

Without an isolation level each entry is delivered as it is. With one, :class:`.QueueProgress`
decides which entries are delivered and when, and :attr:`EntryConsumer.ready` holds those that wait.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.opening import (
    check_data_loss,
    count_between,
    start_deadline,
    take_over,
)
from opendata_buffer.consumer.position import Cursors, Position
from opendata_buffer.errors import Closed, DataLoss, InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.queue import OpenPause, Queue
from opendata_buffer.queue.reader_queue import ReaderQueue
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from opendata_buffer.consumer.fetch import FetchHandle

log = logging.getLogger(__name__)

POLL_ENTRIES = 256
"""The most entries that are offered to the rule of transactions at once."""

PRUNE_S = 3_600.0
"""Seconds between two searches for writers that ended long ago."""

_LOST = (
    "A consumer reads this queue without claiming it, or without knowing that it is a log; or the "
    "manifest was edited."
)


class EntryConsumer:
    """The one consumer of a queue, or a named reader of a log, by its entries.

    Making one takes the queue over: see :func:`.take_over` for the steps and the errors. Methods
    are thread-safe, but for :meth:`peek` and :meth:`hand_out`, whose caller holds :attr:`lock`.
    After an error nothing has changed, and the call can be repeated. Methods raise ``Closed`` after
    :meth:`close`; those that read or write the manifest raise ``Fenced`` when another consumer owns
    the queue, ``CorruptManifest``, ``QueueReset`` or ``StorageError``.

    Args:
        config: The queue and the consumer's settings.
        position: The last position that is processed, in any form that :class:`.Consumer` takes;
            None to start with the oldest queued batch.
        isolation: Which batches of transactions are delivered; None to ignore transactions.
        store: The opened store; None to open the one that ``config`` names.
        runtime: Clock and threads.
        allow_data_loss: Skip lost entries with a warning, instead of raising ``DataLoss``.
        queue: The queue, if the caller has opened it.
        program: Name of the reading program.
        open_pause: Makes the queue's broker pause; None if no broker is asked.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        position: Position | int | str | Mapping[str, str] | None = None,
        *,
        isolation: str | None = None,
        store: Store | None = None,
        runtime: Runtime | None = None,
        allow_data_loss: bool = False,
        queue: Queue | ReaderQueue | None = None,
        program: str = "Python",
        open_pause: OpenPause | None = None,
    ) -> None:
        self._config = config
        self._given_store = store
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._allow_data_loss = allow_data_loss
        self.lock = self._runtime.condition()
        """Held by each method while it works; notified by :meth:`close`."""
        self._closed = False
        opened = store if store is not None else open_store(config.store, config.store_options)
        # Use the store's own URL: a relative path leads elsewhere once the process has changed its
        # directory.
        self._fetched_from = config if store is not None else replace(config, store=opened.url)
        self.source = f"{opened.url}/{config.data_path_prefix}"
        """The queue's place, under which a publisher's transaction keeps its position."""
        if isinstance(position, Mapping):
            position = position.get(self.source)
        resume = None if position is None else Position.of(position)
        taken = take_over(
            opened,
            config,
            self._runtime,
            resume,
            isolation=isolation,
            allow_data_loss=allow_data_loss,
            queue=queue,
            program=program,
            open_pause=open_pause,
        )
        self._queue = taken.queue
        self._progress = taken.progress
        self._repeats = taken.repeats
        self._note = taken.note
        self.epoch = taken.manifest.epoch
        """The epoch with which this consumer owns the queue."""
        self.next_sequence = taken.manifest.next_sequence
        """The sequence that the next appended batch gets, by the manifest as it was last read."""
        # Even an empty queue knows its next sequence. So if entries are missing between here and
        # the first one that is handed out, they were lost (failure F28).
        first = taken.manifest.first_sequence
        self._cursors = Cursors.at(first)
        self.ready: deque[BatchDescriptor] = deque()
        """With an isolation level: entries that are to be delivered, in order."""
        # Two first starts may overlap, neither with a position. The other one may have saved a
        # position since, and may need markers that this one has passed. So nothing leaves the
        # queue before the first acknowledgement, which shows whether the caller saves positions.
        self._saves: bool | None = None if resume is None else True
        """Whether the caller saves positions; None while that is not known."""
        self._pruned_at = self._runtime.monotonic()
        log.info("epoch %d owns %s, reads from %d", self.epoch, config.manifest_path, first)
        metrics.consumer_lag_seconds.watch(self, EntryConsumer._lag_s, self._queue.labels)
        metrics.oldest_unacked_seconds.watch(self, EntryConsumer._unacked_s, self._queue.labels)
        self._gc = self._started_collector(opened) if config.gc.enabled else None

    @property
    def position(self) -> Position | None:
        """The position to start the next consumer with; None before any batch is processed."""
        if self._progress is not None:
            self._saves = True
            return self._progress.position(self._queue.queue_id)
        last_acked = self._cursors.last_acked
        return None if last_acked is None else self.position_of(last_acked)

    def position_of(self, sequence: int) -> Position:
        """Return the position after a delivered batch and all that were delivered before it.

        Args:
            sequence: The sequence of the batch.

        Returns:
            The position.

        Raises:
            InvalidInput: With an isolation level, and the batch does not wait for acknowledgement.
        """
        if self._progress is not None:
            self._saves = True
            return self._progress.position_after(sequence, self._queue.queue_id, self._replay)
        return Position(self._queue.queue_id, sequence)

    @property
    def last_acked_sequence(self) -> int | None:
        """The last acknowledged sequence; None before the queue's first batch."""
        return self._cursors.last_acked

    @property
    def last_handed_out_sequence(self) -> int | None:
        """The last sequence handed out; None before the queue's first batch."""
        return self._cursors.last_handed_out

    @property
    def first_sequence(self) -> int:
        """The first sequence that is not acknowledged."""
        return self._cursors.next_ack

    @property
    def newly_registered(self) -> bool:
        """Whether this start registered the reader: the log did not know it before."""
        return isinstance(self._queue, ReaderQueue) and self._queue.newly_registered

    @property
    def begins_after(self) -> int:
        """See :attr:`.ReaderQueue.begins_after`; 0 for a queue."""
        return self._queue.begins_after if isinstance(self._queue, ReaderQueue) else 0

    def check_open(self) -> None:
        """Check that the consumer is open.

        Raises:
            Closed: :meth:`close` was called.
        """
        if self._closed:
            position = None if self.position is None else str(self.position)
            raise Closed(
                f"the consumer of {self._queue.key!r} is closed: make a new one, with "
                f"last_acked_sequence={position!r}"
            )

    def next_entries(self, limit: int) -> list[BatchDescriptor]:
        """Hand out entries, by one read of the manifest.

        Repeats of earlier entries are among them, and have :attr:`.BatchDescriptor.repeats`.

        Args:
            limit: Largest number of entries. 0 reads nothing.

        Returns:
            The entries, by sequence.

        Raises:
            InvalidInput: ``limit`` is negative.
            DataLoss: The queue does not continue at the cursor.
        """
        if limit < 0:
            raise InvalidInput(f"max is {limit!r}: a number of descriptors is not negative")
        with self.lock:
            self.check_open()
            found = self.peek(limit) if limit else []
            if found:
                self.hand_out(found)
            return found

    def peek(self, limit: int) -> list[BatchDescriptor]:
        """Return the next entries. The cursor moves only past a loss that is allowed."""
        if self._progress is not None:
            while len(self.ready) < limit and self._offers_more(POLL_ENTRIES):
                pass
            return list(islice(self.ready, limit))
        manifest = self._read()
        return self._repeats.described(manifest.entries(self._cursors.next_hand_out, limit))

    def hand_out(self, found: Sequence[BatchDescriptor]) -> None:
        """Move the cursor past entries that :meth:`peek` returned."""
        if self._progress is not None:
            for _ in found:
                self.ready.popleft()
            metrics.descriptors_handed_out.add(len(found))
            return
        self._pass(found)
        metrics.descriptors_handed_out.add(sum(entry.repeats is None for entry in found))

    def poll(self) -> bool:
        """With an isolation level: read new entries, and put those to deliver into :attr:`ready`.

        Returns:
            Whether there were new entries, delivered or not.

        Raises:
            DataLoss: The queue does not continue at the cursor, and nothing is left in
                :attr:`ready`.
        """
        with self.lock:
            self.check_open()
            # Ask for at least one, so that each poll finds out whether the consumer is fenced.
            return self._offers_more(max(1, POLL_ENTRIES - len(self.ready)))

    @property
    def finished(self) -> bool:
        """Return whether all polled entries are processed, and no transaction is undecided."""
        return not self.ready and (self._progress is None or self._progress.idle)

    def queued(self, begin: int, end: int) -> list[BatchDescriptor]:
        """Return the entries in [begin, end) of the manifest as it was last read.

        Use it for entries that were handed out and are needed again before they are acknowledged.
        It moves no cursor, and makes no request for a queue.
        """
        manifest = self._queue.last_seen
        if manifest is None or begin >= end:
            return []
        return list(manifest.entries(begin, end - begin))

    def count(self, begin: int, end: int) -> int:
        """Return how many entries lie in [begin, end), by the manifest as it was last read.

        Entries that an old program took off a log, because it does not know logs, do not count.
        """
        return count_between(begin, end, self._queue.last_seen)

    def check_next(self, sequences: Sequence[int]) -> None:
        """Check that these are the next to be acknowledged, in this order.

        Args:
            sequences: The sequences of the batches.

        Raises:
            InvalidInput: Others come first.
        """
        with self.lock:
            self.check_open()
            (self._progress or self._cursors).check_next(sequences)

    def ack(self, sequence: int) -> None:
        """Acknowledge the next batch; see :meth:`.Consumer.ack`."""
        with self.lock:
            self.check_open()
            if self._progress is not None:
                self._progress.ack(sequence, self._replay)
                if self._saves is None:
                    self._saves = False
                self._ack_processed(self._config.ack_interval)
                return
            moved = self._cursors.ack(sequence)
            self._acknowledge(moved, moved.undequeued >= self._config.ack_interval)

    def ack_through(self, sequence: int) -> None:
        """Acknowledge all up to and including ``sequence``; see :meth:`.Consumer.ack_through`.

        Args:
            sequence: The last sequence to acknowledge.

        Raises:
            InvalidInput: As :meth:`.Consumer.ack_through`. Or the consumer has an isolation level,
                and would pass over transactions.
            Conflict: The manifest was not written: other writers won each time.
        """
        with self.lock:
            self.check_open()
            if self._progress is not None:
                raise InvalidInput("ack_through() passes over transactions: ack() each batch")
            self._acknowledge(self._cursors.ack_through(sequence), write=True)

    def flush(self) -> None:
        """Take everything acknowledged out of the manifest; see :meth:`.Consumer.flush`."""
        with self.lock:
            self.check_open()
            self._flush()

    def flush_all(self) -> None:
        """Dequeue all processed entries, even those that saved positions need.

        For a partition that is about to be sealed.
        """
        self._ack_processed(1, all_of_them=True)

    def skip(self, sequence: int) -> BatchDescriptor:
        """Give up one batch for good; see :meth:`.Consumer.skip`.

        Args:
            sequence: The batch's sequence.

        Returns:
            The entry that was skipped.

        Raises:
            InvalidInput: The batch is neither the next one nor handed out and not acknowledged.
            DataLoss: The queue does not continue at the cursor.
        """
        with self.lock:
            self.check_open()
            # Batches that were handed out before a gap must still be delivered. The command in an
            # error about the gap would skip them.
            continues = sequence >= self._cursors.next_hand_out
            entries = self._read(continues=continues).entries(start=sequence, limit=1)
            moved = self._cursors.skip(sequence)
            if not entries or entries[0].sequence != sequence:
                raise InvalidInput(f"cannot skip sequence {sequence}: it is not queued")
            skipped = entries[0]
            log.warning(
                "skipped batch %d at %r of %s on request, epoch %d: its records are not delivered",
                sequence,
                skipped.location,
                self._queue.key,
                self.epoch,
            )
            if self._progress is not None:
                self._progress.skip(sequence, self._replay)
                self.ready = deque(entry for entry in self.ready if entry.sequence != sequence)
            self._cursors = moved
            self._repeats.forget(skipped.location)
            return skipped

    def check_fence(self) -> None:
        """Check that this consumer owns the queue; see :meth:`.Consumer.check_fence`."""
        with self.lock:
            self.check_open()
            if isinstance(self._queue, ReaderQueue):
                self._queue.check_epoch(self._queue.read(check=True), self.epoch)
            else:
                self._read()

    def count_waiting(self) -> int:
        """Return how many batches are not acknowledged, by one read of the manifest."""
        with self.lock:
            self.check_open()
            return entries_from(self._cursors.next_open, self._read())

    def fetch_handle(self) -> FetchHandle:
        """Return a handle for fetching in other threads and processes; it outlives this."""
        return self.own_fetch_handle.clone()

    @cached_property
    def own_fetch_handle(self) -> FetchHandle:
        """The handle that :meth:`fetch_handle` clones.

        The first fetch creates it. It opens the store again and imports pyarrow, which takes 0.2 s.
        Programs that only plan do not need it.
        """
        from opendata_buffer.consumer.fetch import FetchHandle

        return FetchHandle.of(self._fetched_from, store=self._given_store, runtime=self._runtime)

    def close(self) -> None:
        """Write acknowledgements out and stop the collector; see :meth:`.Consumer.close`."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.lock.notify_all()  # wakes the calls that wait for a batch
        metrics.consumer_lag_seconds.unwatch(self)
        metrics.oldest_unacked_seconds.unwatch(self)
        try:
            # Write the acknowledgements before stopping the collector. It may be in a long request,
            # and this process may be killed before that request returns.
            with self.lock, start_deadline(self._config, self._runtime):
                try:
                    self._flush()
                finally:
                    self._queue.close()
                self._note(ended_epoch=self.epoch)
        finally:
            if self._gc is not None:
                self._gc.stop()

    def _started_collector(self, store: Store) -> GarbageCollector:
        epoch = self.epoch if isinstance(self._queue, Queue) else None
        collector = GarbageCollector(store, self._config, runtime=self._runtime, epoch=epoch)
        collector.start()
        # A consumer that is dropped without close() must not leave its collector running
        # (failure F9).
        weakref.finalize(self, collector.abandon)
        return collector

    def _offer(self, limit: int) -> bool:
        progress, manifest = self._progress, self._read()
        assert progress is not None
        entries = self._repeats.described(manifest.entries(self._cursors.next_hand_out, limit))
        for entry in entries:
            repeats = entry.repeats is not None
            for sequence in progress.offer(
                entry.sequence, entry.location, self._replay, repeats=repeats
            ):
                self.ready += self.queued(sequence, sequence + 1)
            # Do this last, because an entry whose offer failed has to be offered again.
            self._pass([entry])
        if self._runtime.monotonic() - self._pruned_at >= PRUNE_S:
            self._pruned_at = self._runtime.monotonic()
            progress.prune(self._runtime.now_ms())
        return bool(entries)

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

    def _replay(self, begin: int, end: int) -> list[tuple[int, str]]:
        return [(entry.sequence, entry.location) for entry in self.queued(begin, end)]

    def _flush(self) -> None:
        if self._progress is None:
            self._acknowledge(self._cursors, self._cursors.undequeued > 0)
        else:
            self._ack_processed(1)

    def _ack_processed(self, least: int, *, all_of_them: bool = False) -> None:
        """Dequeue the processed entries if there are at least ``least``.

        Entries that an undecided transaction or a saved position needs stay, and all after them.

        Args:
            least: Fewest entries that are worth a write.
            all_of_them: Also dequeue what saved positions need.
        """
        assert self._progress is not None
        keeps = self._saves is not False and not all_of_them
        before = self._progress.kept_from if keeps else self._progress.first_needed
        if before - self._cursors.next_ack >= least:
            self._acknowledge(self._cursors.ack_through(before - 1), write=True)

    def _acknowledge(self, moved: Cursors, write: bool) -> None:
        manifest: Manifest | LogView | None = None
        if write:
            # Write the manifest first. If that fails nothing here has changed, and the call can be
            # repeated (OpenData RFC 0003, ack_through).
            if isinstance(self._queue, Queue):
                self._repeats.note(moved.next_ack)
            manifest = self._queue.dequeue(moved.next_ack - 1, self.epoch)
            if not isinstance(self._queue, Queue):
                self._repeats.forget_before(moved.next_ack)
            moved = moved.dequeued()
        metrics.acks.add(moved.next_ack - self._cursors.next_ack)
        self._cursors = moved
        if manifest is not None:
            # A consumer that ends with an empty queue does not read again. Without this the metric
            # would keep the length from before its last acknowledgement.
            self._measure(manifest)

    def _pass(self, entries: Sequence[BatchDescriptor]) -> None:
        """Move the read cursor past some entries. Repeats among them need no acknowledgement."""
        repeats = [entry.sequence for entry in entries if entry.repeats is not None]
        self._cursors = self._cursors.hand_out(entries[-1].sequence, repeats)
        if repeats:
            metrics.repeats_dropped.add(len(repeats))

    def _read(self, *, continues: bool = True) -> Manifest | LogView:
        """Return the manifest, if this consumer owns it.

        Args:
            continues: Check that it continues at the cursor.

        Raises:
            DataLoss: It does not continue at the cursor.
            Fenced: Another consumer owns it.
        """
        # The queue itself notices when its manifest vanishes or goes backwards (failure F4).
        manifest = self._queue.read()
        assert manifest is not None
        self._queue.check_epoch(manifest, self.epoch)
        if continues:
            self._cursors = check_data_loss(
                self._cursors,
                manifest,
                self._queue.key,
                allowed=self._allow_data_loss,
                cause=_LOST,
                open_from=None if self._progress is None else self._progress.open_from,
            )
        self.next_sequence = manifest.next_sequence
        self._measure(manifest)
        return manifest

    def _measure(self, manifest: Manifest | LogView) -> None:
        waiting = entries_from(self._cursors.next_open, manifest)
        metrics.queue_length.set(waiting, self._queue.labels)

    # The gauges call these methods without the lock, because a fetch may hold it for a long time.
    # This is safe: cursors and manifests are immutable, and are replaced as a whole.

    def _lag_s(self) -> float:
        """Return the age of the oldest batch that is not acknowledged, in seconds."""
        manifest, sequence = self._queue.last_seen, self._cursors.next_open
        age_s = None if manifest is None else manifest.age_s(self._runtime.now_ms(), sequence)
        return age_s or 0.0

    def _unacked_s(self) -> float:
        """Return the age in seconds of the oldest batch that is handed out and not acknowledged."""
        cursors = self._cursors
        return self._lag_s() if cursors.next_open < cursors.next_hand_out else 0.0


def entries_from(begin: int, manifest: Manifest | LogView) -> int:
    """Return how many entries a queue has from ``begin`` on.

    Entries that an old program took off a log, because it does not know logs, are not counted.
    """
    if isinstance(manifest, LogView):
        return manifest.count(begin, manifest.next_sequence)
    return max(0, manifest.next_sequence - max(manifest.first_sequence, begin))
