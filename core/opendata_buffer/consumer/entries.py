"""Hand out a queue's entries in order and acknowledge them, without fetching their batches.

An entry is a line of the manifest. It names a batch, the object that holds records. Programs that
decide themselves where a batch is fetched work with entries: the Spark source plans them for its
executors, a dispatcher hands them to workers, and a consumer of a topic fetches those of all its
partitions together. :class:`.Consumer` adds the fetching, for programs that read one queue.

:class:`EntryConsumer` takes the queue over, guards it with a lock, and ends it. Two modules do the
work: :mod:`opendata_buffer.consumer.owned_queue` reads and acknowledges, and
:mod:`opendata_buffer.consumer.delivery` decides which entries are delivered.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.delivery import PlainDelivery, TransactionalDelivery
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.consumer.lag import Lag
from opendata_buffer.consumer.opening import start_deadline, take_over
from opendata_buffer.consumer.owned_queue import OwnedQueue
from opendata_buffer.consumer.place import Place, PlaceLike
from opendata_buffer.consumer.position import Position, QueueProgress
from opendata_buffer.errors import Closed, InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.queue import OpenPause, Queue
from opendata_buffer.queue.reader_queue import ReaderQueue
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from opendata_buffer.consumer.fetch import FetchHandle

log = logging.getLogger(__name__)

COLLECT_AFTER_S = 0.5
"""Seconds after the start at which the collector begins, or earlier with the first batch. Its
requests must not delay that batch."""


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
            None to begin at ``start``.
        start: Where to begin if no position says so; see :class:`.Consumer`.
        isolation: Which batches of transactions are delivered; None to ignore transactions.
        store: The opened store; None to open the one that ``config`` names.
        runtime: Clock and threads.
        allow_data_loss: Skip lost entries with a warning, instead of raising ``DataLoss``.
        queue: The queue, if the caller has opened it.
        program: Name of the reading program.
        open_pause: Makes the queue's broker pause; None if no broker is asked.

    Raises:
        InvalidInput: ``start`` and ``position`` are both positions.
        OpenDataBufferError: As :func:`.take_over`.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        position: Position | int | str | Mapping[str, str] | None = None,
        *,
        start: PlaceLike | None = None,
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
        begin = None if start is None else Place.of(start)
        if begin is not None and begin.position is not None:
            if resume is not None:
                raise InvalidInput("start and after are both positions: give only one of them")
            resume, begin = begin.position, None
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
            start=begin,
        )
        self._note = taken.note
        self._owned = OwnedQueue(taken, self._runtime, allow_data_loss=allow_data_loss)
        self._queue = taken.queue
        self._store = opened
        self._isolation = isolation
        self._delivery: PlainDelivery | TransactionalDelivery = PlainDelivery(self._owned)
        if taken.progress is not None:
            self._delivery = TransactionalDelivery(
                self._owned, taken.progress, self._runtime, resumed=resume is not None
            )
        self.epoch = self._owned.epoch
        """The epoch with which this consumer owns the queue."""
        first = self._owned.cursors.next_hand_out
        log.info("epoch %d owns %s, reads from %d", self.epoch, config.manifest_path, first)
        metrics.consumer_lag_seconds.watch(self._owned, OwnedQueue.lag_s, self._queue.labels)
        metrics.oldest_unacked_seconds.watch(self._owned, OwnedQueue.unacked_s, self._queue.labels)
        self._gc = self._started_collector(opened) if config.collector.enabled else None

    @property
    def position(self) -> Position | None:
        """The position to start the next consumer with; None before any batch is processed."""
        return self._delivery.position

    def position_of(self, sequence: int) -> Position:
        """Return the position after a delivered batch and all that were delivered before it.

        Args:
            sequence: The sequence of the batch.

        Returns:
            The position.

        Raises:
            InvalidInput: With an isolation level, and the batch does not wait for acknowledgement.
        """
        return self._delivery.position_of(sequence)

    @property
    def last_acked_sequence(self) -> int | None:
        """The last acknowledged sequence; None before the queue's first batch."""
        return self._owned.cursors.last_acked

    @property
    def last_handed_out_sequence(self) -> int | None:
        """The last sequence handed out; None before the queue's first batch."""
        return self._owned.cursors.last_handed_out

    @property
    def first_sequence(self) -> int:
        """The first sequence that is not acknowledged."""
        return self._owned.cursors.next_ack

    @property
    def next_sequence(self) -> int:
        """The sequence that the next appended batch gets, by the manifest as it was last read."""
        return self._owned.next_sequence

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
                f"after={position!r}"
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
        return self._delivery.peek(limit)

    def hand_out(self, found: Sequence[BatchDescriptor]) -> None:
        """Move the cursor past entries that :meth:`peek` returned."""
        self._delivery.hand_out(found)
        if self._gc is not None:
            self._gc.begin()

    @property
    def ready(self) -> deque[BatchDescriptor]:
        """With an isolation level: entries that are to be delivered, in order."""
        return self._transactional.ready

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
            return self._transactional.poll()

    @property
    def finished(self) -> bool:
        """With an isolation level: all is processed that was polled, and nothing is undecided."""
        return self._transactional.finished

    def queued(self, begin: int, end: int) -> list[BatchDescriptor]:
        """Return the entries in [begin, end) of the manifest as it was last read.

        Use it for entries that were handed out and are needed again before they are acknowledged.
        It moves no cursor, and makes no request for a queue.
        """
        return self._owned.queued(begin, end)

    def count(self, begin: int, end: int) -> int:
        """Return how many entries lie in [begin, end), by the manifest as it was last read.

        Entries that an old program took off a log, because it does not know logs, do not count.
        """
        return self._owned.count(begin, end)

    def check_next(self, sequences: Sequence[int]) -> None:
        """Check that these are the next to be acknowledged, in this order.

        Args:
            sequences: The sequences of the batches.

        Raises:
            InvalidInput: Others come first.
        """
        with self.lock:
            self.check_open()
            self._delivery.check_next(sequences)

    def ack(self, sequence: int) -> None:
        """Acknowledge the next batch; see :meth:`.Consumer.ack`."""
        with self.lock:
            self.check_open()
            self._delivery.ack(sequence, self._config.ack_interval)

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
            self._delivery.ack_through(sequence)

    def note_read(self) -> None:
        """Note in the position of a log's reader that all entries handed out are read.

        A program that acknowledges later, perhaps much later, does not appear to be behind then.
        Does nothing for a queue.
        """
        with self.lock:
            self.check_open()
            if isinstance(self._queue, ReaderQueue):
                self._queue.note_read(self._owned.cursors.next_hand_out, self.epoch)

    def flush(self) -> None:
        """Take everything acknowledged out of the manifest; see :meth:`.Consumer.flush`."""
        with self.lock:
            self.check_open()
            self._delivery.flush()

    def flush_all(self) -> None:
        """With an isolation level: dequeue all that is processed, for a partition to be sealed.

        That includes entries that saved positions need.
        """
        self._transactional.flush_all()

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
            skipped = self._owned.entry_to_skip(sequence)
            log.warning(
                "skipped batch %d at %r of %s on request, epoch %d: its records are not delivered",
                sequence,
                skipped.location,
                self._queue.key,
                self.epoch,
            )
            self._delivery.skip(skipped)
            return skipped

    def check_fence(self) -> None:
        """Check that this consumer owns the queue; see :meth:`.Consumer.check_fence`."""
        with self.lock:
            self.check_open()
            self._owned.check_fence()

    def is_waiting(self, sequence: int) -> bool:
        """Return whether a batch is handed out and not acknowledged, by the cursors."""
        cursors = self._owned.cursors
        return cursors.next_ack <= sequence < cursors.next_hand_out

    def lag(self) -> Lag:
        """Return how much is not acknowledged; see :meth:`.Consumer.lag`."""
        with self.lock:
            self.check_open()
            return self._owned.lag()

    def seek(self, given: PlaceLike | Place) -> None:
        """Move a reader of a log; see :meth:`.Consumer.seek`.

        Args:
            given: The place to move to.

        Raises:
            InvalidInput: The queue is not a log, or does not have the place. Or the place is a
                position inside of a transaction.
            DataLoss: The collector deletes the place.
        """
        place = Place.of(given, "place")
        with self.lock:
            self.check_open()
            config, queue, store = self._config, self._queue, self._store
            if not isinstance(queue, ReaderQueue):
                raise InvalidInput(
                    f"the queue with manifest {config.manifest_path!r} in {store.url} is not a "
                    "log, so its consumer cannot seek: what it has acknowledged is gone. To get "
                    "the batches again that are not acknowledged, close the consumer and make a "
                    "new one. To pass over a batch, use skip()",
                    Hint(Action.ENABLE_READERS, queue_name(store.url, config)),
                )
            if place.position is not None and (
                place.position.transactions or place.position.delivered
            ):
                raise InvalidInput(
                    f"place is {place.text:.200}, which is inside of a transaction: make a new "
                    "consumer, with after=place"
                )
            view = queue.seek(lambda kept: place.sequence_in(kept, config, store.url), self.epoch)
            repeats = Repeats(store, config, self._runtime, queue.queue_id)
            repeats.described(queue.recent())
            progress = None
            if self._isolation is not None:
                progress = QueueProgress(
                    config.data_path_prefix, self._isolation, view.first_sequence
                )
            self._owned.move(view, repeats, progress)
            self._delivery.restart(progress)
            log.info("reader %r moved to sequence %d", queue.name, view.first_sequence)

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

    def close(self, timeout: float | None = None) -> None:
        """Write acknowledgements out and stop the collector; see :meth:`.Consumer.close`."""
        with nullcontext() if timeout is None else deadline(self._runtime, timeout):
            self._close()

    def _close(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self.lock.notify_all()  # wakes the calls that wait for a batch
        metrics.consumer_lag_seconds.unwatch(self._owned)
        metrics.oldest_unacked_seconds.unwatch(self._owned)
        try:
            # Write the acknowledgements before stopping the collector. It may be in a long request,
            # and this process may be killed before that request returns.
            with self.lock, start_deadline(self._config, self._runtime):
                try:
                    self._delivery.flush()
                finally:
                    self._queue.close()
                self._note(ended_epoch=self.epoch)
        finally:
            if self._gc is not None:
                self._gc.stop()

    def _started_collector(self, store: Store) -> GarbageCollector:
        epoch = self.epoch if isinstance(self._queue, Queue) else None
        collector = GarbageCollector(store, self._config, runtime=self._runtime, epoch=epoch)
        collector.start(COLLECT_AFTER_S)
        # A consumer that is dropped without close() must not leave its collector running
        # (failure F9).
        weakref.finalize(self, collector.abandon)
        return collector

    @property
    def _transactional(self) -> TransactionalDelivery:
        assert isinstance(self._delivery, TransactionalDelivery), "there is no isolation level"
        return self._delivery
