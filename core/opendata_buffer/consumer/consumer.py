"""Hands out queued batches in order and acknowledges them (OpenData RFC 0001 and 0003).

Starting a consumer raises the epoch, which fences the one before: its next read of the manifest
raises :class:`~.errors.Fenced`. Until then it may still deliver batches (failure F8). So write
``str(consumer.position_of(batch.sequence))`` with each batch's records, in one transaction of the
target system, and pass the last one written as ``last_acked_sequence`` at the next start; or guard
the target's commit by :attr:`Consumer.epoch` and :meth:`Consumer.check_fence`.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any

from opendata_buffer import metrics
from opendata_buffer.arguments import checked
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.consumer.loop import BatchLoop
from opendata_buffer.consumer.position import Cursors, Position, QueueProgress
from opendata_buffer.errors import Closed, DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.cas import LAST_READ_S
from opendata_buffer.queue.consumer_note import amend_consumer_info, write_consumer_info
from opendata_buffer.queue.hints import queue_hint, reset_command
from opendata_buffer.queue.log import Log, LogView
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.ownership import QueueClaim, check_owner, claim_for_writing
from opendata_buffer.queue.queue import OpenPause, Queue, no_such_queue
from opendata_buffer.queue.reader_queue import ReaderQueue
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from opendata_buffer.consumer.batches import ConsumedBatch, DeliveredBatch
    from opendata_buffer.consumer.fetch import FetchHandle

log = logging.getLogger(__name__)

POLL_ENTRIES = 256
"""Most entries that are offered to the rule of transactions at once."""

PRUNE_S = 3_600.0
"""Seconds between two searches for writers that have long ended."""

_LOST = (
    "A consumer reads this queue without claiming it, or without knowing that it is a log; or the "
    "manifest was edited."
)


def check_data_loss(
    cursors: Cursors, manifest: Manifest | LogView, key: str, *, allowed: bool, cause: str
) -> Cursors:
    """The cursors, moved to where the queue begins if entries are gone that were not handed out and
    that is ``allowed``; else ``DataLoss`` with the ``cause`` in a sentence (failure F28)."""
    needed = cursors.next_hand_out
    oldest = manifest.available_from(needed)
    if oldest <= needed:
        return cursors
    if not allowed:
        if isinstance(manifest, LogView) and manifest.log.reader:
            log_, name = manifest.log, manifest.log.reader
            command = reset_command(log_.store.url, log_.config, name, oldest)
            cause = f"{cause} Stop this reader and accept the loss with {command}."
        raise DataLoss(key, needed, oldest, cause)
    warn_data_loss(key, needed, oldest)
    return cursors.jump(oldest)


def open_queue(
    store: Store,
    config: ConsumerConfig,
    runtime: Runtime,
    claim: QueueClaim | None,
    *,
    program: str,
    open_pause: OpenPause | None = None,
    resettable: bool = True,
) -> Queue | ReaderQueue:
    """The queue, as its one consumer has it; or, with ``config.reader``, as that reader has it.
    ``InvalidInput`` where the queue is a log, and no reader is named. ``resettable``: errors advise
    to reset the reader, which helps a program that takes its position from the log."""
    if config.reader:
        return ReaderQueue(
            store,
            config,
            config.reader,
            runtime=runtime,
            claim=claim,
            program=program,
            resettable=resettable,
        )
    if claim is not None and claim.is_log:
        raise needs_reader(store, config)
    return Queue(
        store, config, runtime=runtime, role="consumer", claim=claim, open_pause=open_pause
    )


def needs_reader(store: Store, config: QueueConfig) -> InvalidInput:
    """The error of who would take batches away from all readers of a log."""
    return InvalidInput(
        f"the queue with manifest {config.manifest_path!r} in {store.url} is a log with named "
        "readers: add reader=NAME, for example with the name of this program. 'opendata-buffer "
        f"readers list {queue_hint(store.url, config)}' shows the readers that it has."
    )


def check_reader(store: Store, config: ConsumerConfig, runtime: Runtime) -> None:
    """Refuse a program that names no reader of a log, or one of a queue that is none."""
    claim = check_owner(store, config, runtime=runtime)
    if config.reader:
        Log(store, config, runtime).need()
    elif claim is not None and claim.is_log:
        raise needs_reader(store, config)


def warn_data_loss(key: str, needed: int, oldest: int) -> None:
    """Warn that entries from ``needed`` up to ``oldest`` are passed by."""
    log.warning(
        "data loss allowed: %s starts at %d, sequences %d to %d are gone unread",
        key,
        oldest,
        needed,
        oldest - 1,
    )


def _sequence(batch: DeliveredBatch | int) -> int:
    return batch if isinstance(batch, int) else batch.sequence


class Consumer(BatchLoop):
    """The one reader of a queue. Thread-safe; a context manager, also in asyncio.

    Two ways to read, over the same cursors::

        for batch in consumer:                                   # waits for the next one
            for record in batch.records():
                write(record.value, record.metadata)
            batch.ack()

        descriptors = consumer.next_descriptors(1_000)           # read-ahead
        for batch in fetch_many(consumer.fetch_handle().fetch, descriptors):
            write(batch)
        consumer.ack_through(batch.sequence)

    Creating one takes the queue over and, given a position, drops what is acknowledged. Where
    there is no queue it is refused; ``config.create_if_missing`` creates one.

    Without ``isolation`` it ignores transactions: it delivers the batches of undecided and of
    aborted ones as any others, and their markers as empty batches.

    After any error of a method nothing is changed, and the call can be repeated. All methods raise
    ``Closed`` after :meth:`close`; those that read or write the manifest raise ``Fenced`` when
    another consumer owns the queue, ``CorruptManifest``, ``QueueReset`` or ``StorageError``.
    ``store``, ``runtime``, ``queue`` and ``open_pause`` are for tests and this library.

    Args:
        config: The queue's URL, or a :class:`.ConsumerConfig`.
        last_acked_sequence: The last batch that is surely processed; reading starts behind it.
            A :class:`Position` or its string, or a bare sequence, which does not show whether the
            queue was deleted and made again; or :attr:`.Publisher.positions`. None: at the oldest
            queued batch.
        isolation: ``read_committed`` delivers transactions when they are committed, each batch
            once; ``read_uncommitted`` everything but markers.
        allow_data_loss: Go on behind lost entries, with a warning, instead of raising ``DataLoss``.
        program: Name of the reading program, shown by ``opendata-buffer status``.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: There is no queue.
        UnsafeStore: The store has no compare-and-swap.
        PrefixConflict: The data prefix belongs to the queue of another manifest (failure F7).
        QueueReset: A position was given and is another queue's, or the manifest is missing or
            ends before it (failures F4, F27); or the manifest was lost or restored from an old
            copy.
        DataLoss: A position was given, and later batches were dequeued by another program.
        CorruptManifest, StorageError, Conflict: The queue could not be taken over.
    """

    @checked
    def __init__(
        self,
        config: ConsumerConfig | str | PathLike[str],
        last_acked_sequence: Position | int | str | Mapping[str, str] | None = None,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
        isolation: str | None = None,
        allow_data_loss: bool = False,
        queue: Queue | ReaderQueue | None = None,
        program: str = "Python",
        open_pause: OpenPause | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        config = ConsumerConfig.of(config, settings)
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
        self._source = f"{opened.url}/{config.data_path_prefix}"
        if isinstance(last_acked_sequence, Mapping):
            last_acked_sequence = last_acked_sequence.get(self._source)
        position = None if last_acked_sequence is None else Position.of(last_acked_sequence)
        start, progress = position, None
        if isolation is not None:
            progress = QueueProgress(config.data_path_prefix, isolation, position=position)
            if position is not None:
                needed = progress.first_needed
                start = Position(position.queue_id, needed - 1) if needed else None

        with self._deadline():
            # First, so that a consumer with the wrong configuration does not fence the right one.
            if queue is None:
                # A position of a queue that was deleted is refused as such.
                create = config.create_if_missing or start is not None
                claim = claim_for_writing(
                    opened,
                    config,
                    runtime=self._runtime,
                    missing=None if create else lambda: no_such_queue(opened, config, creates=True),
                    grace_ms=config.gc.grace_period_ms,
                )
                queue = open_queue(
                    opened,
                    config,
                    self._runtime,
                    claim,
                    program=program,
                    open_pause=open_pause or self._default_pause(),
                )
            elif isinstance(queue, Queue) and queue.is_log:
                raise needs_reader(opened, config)
            self._queue = queue
            last_acked = None if start is None else self._sequence_of(start, opened.url)
            self._repeats = Repeats(opened, config, self._runtime, queue.queue_id)
            if last_acked is not None and isinstance(queue, Queue):
                found = queue.read() or Manifest.empty()
                if found.first_sequence <= last_acked < found.next_sequence:
                    # The claim takes these out of the manifest.
                    acked = found.entries(limit=last_acked + 1 - found.first_sequence)
                    self._repeats.described(acked)
                    self._repeats.note(last_acked + 1)
            manifest = self._queue.claim_epoch(last_acked, allow_data_loss=allow_data_loss)
            self._note: Callable[..., None] = lambda **_: None
            if isinstance(queue, ReaderQueue):
                # What was acknowledged is still in the log, and is compared with there.
                self._repeats.described(queue.recent())
            else:
                # Behind the claim: what the consumer before it takes out, it has noted by now.
                self._repeats.load()
                write_consumer_info(opened, config, self._runtime, manifest.epoch, program=program)
                self._note = partial(
                    amend_consumer_info, opened, config, self._runtime, manifest.epoch
                )
        self._epoch = manifest.epoch
        self._next_sequence = manifest.next_sequence
        # An empty queue, too, knows its next sequence: whatever is missing between here and the
        # first batch handed out was lost (failure F28).
        self._cursors = Cursors.at(manifest.first_sequence)
        first = manifest.first_sequence
        if isolation is not None and position is None:
            progress = QueueProgress(config.data_path_prefix, isolation, first)
        elif progress is not None and position is not None:
            self._check_position(position)
            if start is None and first:
                # The position needs sequence 0, which the claim did not check.
                if not allow_data_loss:
                    hint = "Another consumer read this queue. Accept the loss explicitly."
                    raise DataLoss(config.manifest_path, 0, first, hint)
                warn_data_loss(config.manifest_path, 0, first)
        if last_acked is not None and first > last_acked + 1:
            warn_data_loss(config.manifest_path, last_acked + 1, first)
        self._progress = progress
        self.ready: deque[BatchDescriptor] = deque()
        """With ``isolation``: batches to be delivered, in order."""
        # Without a position this may be one of two first starts that overlap, and the other one has
        # saved a position since. It may need markers that this one has passed: nothing leaves the
        # queue before the first acknowledgement, which shows whether the caller saves.
        self._saves: bool | None = None if position is None else True
        """Whether the caller saves positions; None while that is not known."""
        self._pruned_at = self._runtime.monotonic()
        log.info("epoch %d owns %s, reads from %d", self._epoch, config.manifest_path, first)

        metrics.consumer_lag_seconds.watch(self, Consumer._lag_s, queue.labels)
        metrics.oldest_unacked_seconds.watch(self, Consumer._unacked_s, queue.labels)

        self._gc: GarbageCollector | None = None
        if config.gc.enabled:
            epoch = self._epoch if isinstance(queue, Queue) else None
            self._gc = GarbageCollector(opened, config, runtime=self._runtime, epoch=epoch)
            self._gc.start()
            # A consumer that is dropped without close() must not leave its collector running
            # (failure F9).
            weakref.finalize(self, self._gc.abandon)

    def _default_pause(self) -> OpenPause | None:
        """Return what makes a broker pause if the caller names nothing.

        Here: nothing, no broker is asked. The public class overrides it; see
        :mod:`opendata_buffer.assembly`.
        """
        return None

    @property
    def epoch(self) -> int:
        """The epoch this consumer owns the queue with; higher than that of any before it."""
        return self._epoch

    @property
    def position(self) -> Position | None:
        """What to start the next consumer with; None before the queue's first batch."""
        if self._progress is not None:
            self._saves = True
            return self._progress.position(self._queue.queue_id)
        last_acked = self._cursors.last_acked
        return None if last_acked is None else self.position_of(last_acked)

    @checked
    def position_of(self, batch: DeliveredBatch | int) -> Position:
        """The position of a batch of this queue, or of a sequence, to be saved with its records.

        With ``isolation`` it is behind the batch and all that was delivered before it.

        Raises:
            InvalidInput: With ``isolation``, and it waits for no acknowledgement.
        """
        if self._progress is not None:
            self._saves = True
            sequence, queue_id = _sequence(batch), self._queue.queue_id
            return self._progress.position_after(sequence, queue_id, self._replay)
        return Position(self._queue.queue_id, _sequence(batch))

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

    def _next_now(self, *, arrow: bool) -> Any:
        with self._lock:
            self._check_open()
            while found := self._peek(1):
                handle, batch = self._fetch_handle, None
                if found[0].repeats is None:
                    batch = (handle.fetch_arrow if arrow else handle.fetch)(found[0])
                # The read cursor moves only after the batch was fetched and decoded.
                self._hand_out(found)
                if batch is not None:
                    return replace(batch, _owner=self)
            return None

    @checked
    def ack(self, batch: DeliveredBatch | int) -> None:
        """Acknowledge the next batch: it is processed and need never be delivered again.

        ``batch`` is what was delivered, or its sequence. Every ``config.ack_interval``
        acknowledgements the manifest is written.

        Raises:
            InvalidInput: Not the next in order, or not handed out (failure F26).
            Conflict: The manifest was due to be written, and other writers won each time.
        """
        with self._lock:
            self._check_open()
            if self._progress is not None:
                self._progress.ack(_sequence(batch), self._replay)
                if self._saves is None:
                    self._saves = False
                self._ack_processed(self._config.ack_interval)
                return
            moved = self._cursors.ack(_sequence(batch))
            self._acknowledge(moved, moved.undequeued >= self._config.ack_interval)

    @checked
    def source_of(self, batch: DeliveredBatch | None = None) -> str:
        """The queue's place, under which a publisher's transaction keeps its position."""
        return self._source

    @checked
    def check_next(self, batches: Sequence[DeliveredBatch]) -> None:
        """Raise ``InvalidInput`` unless these are the next to be acknowledged, in this order."""
        with self._lock:
            self._check_open()
            (self._progress or self._cursors).check_next([each.sequence for each in batches])

    @checked
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
            if self._progress is not None:
                raise InvalidInput("ack_through() passes over transactions: ack() each batch")
            self._acknowledge(self._cursors.ack_through(sequence), write=True)

    def flush(self) -> None:
        """Take everything acknowledged out of the manifest; no write when there is nothing.

        Raises:
            Conflict: The manifest was not written: other writers won each time.
        """
        with self._lock:
            self._check_open()
            self._flush()

    @checked
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

    @checked
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

    @checked
    def queued(self, begin: int, end: int) -> list[BatchDescriptor]:
        """Entries from one sequence up to, not including, another, that are still queued.

        As of the last read of the manifest; moves no cursor, reads nothing. For what was handed
        out and is needed again before it is acknowledged.
        """
        manifest = self._queue.last_seen
        if manifest is None or begin >= end:
            return []
        return list(manifest.entries(begin, end - begin))

    @checked
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

    @checked
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
            # Batches that were handed out before a gap are still to be delivered: the command in an
            # error about the gap would pass them by.
            continues = sequence >= self._cursors.next_hand_out
            entries = self._read(continues=continues).entries(start=sequence, limit=1)
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
            if self._progress is not None:
                self._progress.skip(sequence, self._replay)
                self.ready = deque(each for each in self.ready if each.sequence != sequence)
            self._cursors = moved
            self._repeats.forget(entries[0].location)
            return entries[0]

    def check_fence(self) -> None:
        """Make sure that this consumer still owns the queue, by one read of the manifest.

        Call it before committing to a system that cannot compare epochs itself; it narrows the
        window of failure F8 and cannot close it.

        Raises:
            Fenced: Another consumer owns the queue.
        """
        with self._lock:
            self._check_open()
            if isinstance(self._queue, ReaderQueue):
                self._queue.check_epoch(self._queue.read(check=True), self._epoch)
            else:
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
            self._lock.notify_all()  # calls that wait for a batch
        metrics.consumer_lag_seconds.unwatch(self)
        metrics.oldest_unacked_seconds.unwatch(self)
        try:
            # Acknowledgements before the collector: it may be in a long request, and this process
            # may be killed before that returns.
            with self._lock, self._deadline():
                try:
                    self._flush()
                finally:
                    self._queue.close()
                self._note(ended_epoch=self._epoch)
        finally:
            if self._gc is not None:
                self._gc.stop()

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

    def _check_position(self, position: Position) -> None:
        """What the claim did not check of a position that follows transactions."""
        self._sequence_of(position, self._config.store)
        if position.sequence >= self._next_sequence:
            raise QueueReset(
                f"cannot resume {self._queue.key!r} after {position}: the queue ends at "
                f"{self._next_sequence - 1}. Start without the position to read what is queued now."
            )

    def poll(self) -> bool:
        """With ``isolation``: put new batches into ``ready``. Whether there were entries at all."""
        with self._lock:
            self._check_open()
            # At least one, so that each poll finds out whether the consumer is fenced.
            return self._offer(max(1, POLL_ENTRIES - len(self.ready)))

    @property
    def finished(self) -> bool:
        """With ``isolation``: whether all that was polled is processed, and nothing undecided."""
        return not self.ready and (self._progress is None or self._progress.idle)

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
            # Last: an entry that was not offered has to be offered again.
            self._pass([entry])
        if self._runtime.monotonic() - self._pruned_at >= PRUNE_S:
            self._pruned_at = self._runtime.monotonic()
            progress.prune(self._runtime.now_ms())
        return bool(entries)

    def _replay(self, begin: int, end: int) -> list[tuple[int, str]]:
        return [(each.sequence, each.location) for each in self.queued(begin, end)]

    def _flush(self) -> None:
        if self._progress is None:
            self._acknowledge(self._cursors, self._cursors.undequeued > 0)
        else:
            self._ack_processed(1)

    def _ack_processed(self, least: int, *, all_of_them: bool = False) -> None:
        """Dequeue what is processed, if it is so many entries or more.

        Entries that an undecided transaction or a saved position needs stay, and all behind them.
        ``all_of_them``: also what positions need, of a partition that is about to be sealed.
        """
        assert self._progress is not None
        keeps = self._saves is not False and not all_of_them
        before = self._progress.kept_from if keeps else self._progress.first_needed
        if before - self._cursors.next_ack >= least:
            self._acknowledge(self._cursors.ack_through(before - 1), write=True)

    def _acknowledge(self, moved: Cursors, write: bool) -> None:
        manifest: Manifest | LogView | None = None
        if write:
            # The manifest first: until it is written nothing here has changed, and the call can
            # be repeated (OpenData RFC 0003, ack_through).
            if isinstance(self._queue, Queue):
                self._repeats.note(moved.next_ack)
            manifest = self._queue.dequeue(moved.next_ack - 1, self._epoch)
            if not isinstance(self._queue, Queue):
                self._repeats.forget_before(moved.next_ack)
            moved = moved.dequeued()
        metrics.acks.add(moved.next_ack - self._cursors.next_ack)
        self._cursors = moved
        if manifest is not None:
            # A consumer that ends with an empty queue reads no more: without this the metric would
            # keep the length from before its last acknowledgement.
            metrics.queue_length.set(self._queued(manifest), self._queue.labels)

    def _peek(self, limit: int) -> list[BatchDescriptor]:
        """The next entries; moves the cursor only over a loss that was allowed."""
        if self._progress is not None:
            while len(self.ready) < limit and self._offers_more():
                pass
            return list(islice(self.ready, limit))
        manifest = self._read()
        start = self._cursors.next_hand_out
        return self._repeats.described(manifest.entries(start, limit))

    def _offers_more(self) -> bool:
        """Poll once more; an error about what was lost waits until all before it is handed out."""
        try:
            return self._offer(POLL_ENTRIES)
        except DataLoss:
            if not self.ready:
                raise
            return False

    def _hand_out(self, found: list[BatchDescriptor]) -> None:
        if self._progress is not None:
            for _ in found:
                self.ready.popleft()
            metrics.descriptors_handed_out.add(len(found))
            return
        self._pass(found)
        metrics.descriptors_handed_out.add(sum(each.repeats is None for each in found))

    def _pass(self, entries: list[BatchDescriptor]) -> None:
        """Move the read cursor behind some entries; those that were queued before are skipped."""
        repeats = [each.sequence for each in entries if each.repeats is not None]
        self._cursors = self._cursors.hand_out(entries[-1].sequence, repeats)
        if repeats:
            metrics.repeats_dropped.add(len(repeats))

    def _read(self, *, continues: bool = True) -> Manifest | LogView:
        """Return the manifest, if it is still ours.

        Raises ``DataLoss`` where it does not continue where this consumer is, unless ``continues``
        is false.
        """
        # The queue sees by itself when its manifest vanishes or goes backwards (failure F4).
        manifest = self._queue.read()
        assert manifest is not None
        self._queue.check_epoch(manifest, self._epoch)
        if continues:
            self._cursors = check_data_loss(
                self._cursors, manifest, self._queue.key, allowed=self._allow_data_loss, cause=_LOST
            )
        self._next_sequence = manifest.next_sequence
        metrics.queue_length.set(self._queued(manifest), self._queue.labels)
        return manifest

    def _queued(self, manifest: Manifest | LogView) -> int:
        if isinstance(manifest, LogView):
            return manifest.count(self._cursors.next_open, manifest.next_sequence)
        return manifest.next_sequence - max(manifest.first_sequence, self._cursors.next_open)

    # Called without the lock, which a fetch may hold for long: cursors and manifest do not change.

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
        return deadline(self._runtime, self._config.timeout_ms / 1000 + LAST_READ_S)

    def _check_open(self) -> None:
        if self._closed:
            position = None if self.position is None else str(self.position)
            raise Closed(
                f"the consumer of {self._queue.key!r} is closed: make a new one, with "
                f"last_acked_sequence={position!r}"
            )
