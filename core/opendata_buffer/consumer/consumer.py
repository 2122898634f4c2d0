"""Deliver queued batches in order and acknowledge them (OpenData RFC 0001 and 0003).

When a consumer starts, it raises the queue's epoch. This fences the previous consumer: its next
read of the manifest raises :class:`~.errors.Fenced`. Until that read it may still deliver batches
(failure F8). To process each batch once in spite of that, do one of these:

* Write ``str(consumer.position_of(batch.sequence))`` with each batch's records, in one transaction
  of the target system. Pass the last one written as ``after`` at the next start.
* Guard the target's commit by :attr:`Consumer.epoch` and :meth:`Consumer.check_fence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from opendata_buffer.arguments import checked
from opendata_buffer.config import ConsumerConfig, ConsumerSettings
from opendata_buffer.consumer.entries import EntryConsumer
from opendata_buffer.consumer.lag import Lag
from opendata_buffer.consumer.loop import BatchLoop
from opendata_buffer.consumer.pace import PollPace
from opendata_buffer.consumer.place import PlaceLike
from opendata_buffer.consumer.position import Position
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.internal_parts import take_parts
from opendata_buffer.queue.queue import OpenPause
from opendata_buffer.runtime import SystemRuntime

if TYPE_CHECKING:
    from opendata_buffer.consumer.batches import ConsumedBatch, DeliveredBatch
    from opendata_buffer.consumer.fetch import FetchHandle


def _sequence(batch: DeliveredBatch | int) -> int:
    return batch if isinstance(batch, int) else batch.sequence


class Consumer(BatchLoop):
    """The one reader of a queue. Thread-safe; a context manager, also in asyncio.

    There are two ways to read, and both move the same cursors::

        for batch in consumer:                                   # waits for the next one
            for record in batch:
                write(record.value, record.metadata)
            batch.ack()

        descriptors = consumer.next_descriptors(1_000)           # read-ahead
        for batch in fetch_many(consumer.fetch_handle().fetch, descriptors):
            write(batch)
        consumer.ack_through(batch.sequence)

    The constructor takes the queue over. It begins after ``after`` if that is given, and dequeues
    the entries up to there. Otherwise a reader of a log continues at its stored position. If there
    is no position, it begins at ``start``. The consumer of a queue cannot begin past unread
    batches, because they would be lost: it raises ``InvalidInput``, and says how to discard them.

    If the queue does not exist, the constructor raises ``InvalidInput``, unless
    ``config.create_if_missing`` lets it create the queue.

    Without ``isolation`` the consumer ignores transactions. It delivers the batches of undecided
    and aborted transactions like any others, and their markers as empty batches.

    When a method raises, it has changed nothing, and the call can be repeated. All methods raise
    ``Closed`` after :meth:`close`. Methods that read or write the manifest raise ``Fenced`` when
    another consumer owns the queue, and ``CorruptManifest``, ``QueueReset`` or ``StorageError``.

    Args:
        config: The queue's URL, or a :class:`.ConsumerConfig`.
        last_acked_sequence: The same as ``after``, by the name in OpenData's RFC.
        after: The last processed batch; reading starts after it. Pass a :class:`Position` or its
            string, :attr:`.Publisher.positions`, or a bare sequence. A bare sequence does not show
            whether the queue was deleted and created again. Default: no position.
        start: Where to begin if there is no position: ``"earliest"``, ``"latest"``, a sequence, or
            a time (a ``datetime`` with a time zone), which begins at the first batch with a record
            of that time or later. A :class:`Position` is the same as ``after``. Default:
            ``"earliest"``, the oldest batch.
        isolation: ``read_committed`` delivers transactions when they are committed, each batch
            once; ``read_uncommitted`` delivers everything but markers. None (default) ignores
            transactions.
        allow_data_loss: Skip lost entries with a warning, instead of raising ``DataLoss``. Default
            false.
        program: Name of the reading program, shown by ``opendata-buffer status``. Default
            ``Python``.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: The queue does not exist, or ``start`` is not in it, or unread batches lie
            before ``start``.
        UnsafeStore: The store does not support compare-and-swap.
        PrefixConflict: The data prefix belongs to the queue of another manifest (failure F7).
        QueueReset: A position was given, but it belongs to another queue, or the manifest is
            missing or ends before it (failures F4, F27). Also raised if the manifest was lost or
            restored from an old copy.
        DataLoss: A position was given, and another program dequeued batches after it.
        CorruptManifest, StorageError, Conflict: The queue could not be taken over.
    """

    @checked
    def __init__(
        self,
        config: ConsumerConfig | str | PathLike[str],
        last_acked_sequence: Position | int | str | Mapping[str, str] | None = None,
        *,
        after: Position | int | str | Mapping[str, str] | None = None,
        start: PlaceLike | None = None,
        isolation: str | None = None,
        allow_data_loss: bool = False,
        program: str = "Python",
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        super().__init__()
        given, parts = take_parts(settings, "store", "runtime", "queue", "open_pause")
        if after is not None:
            if last_acked_sequence is not None:
                raise InvalidInput(
                    "after and last_acked_sequence are two names of one argument: give only one of "
                    "them"
                )
            last_acked_sequence = after
        self._config = ConsumerConfig.of(config, given)
        self._runtime = parts.runtime if parts.runtime is not None else SystemRuntime()
        self._closed = False
        self._poll_pace = PollPace(self._config.idle_poll_ms)
        self._entries = EntryConsumer(
            self._config,
            last_acked_sequence,
            start=start,
            isolation=isolation,
            store=parts.store,
            runtime=self._runtime,
            allow_data_loss=allow_data_loss,
            queue=parts.queue,
            program=program,
            open_pause=parts.open_pause or self._default_pause(),
        )
        self._lock = self._entries.lock

    def _default_pause(self) -> OpenPause | None:
        """Return the function that makes a broker pause if the caller passes none.

        This class returns None, so no broker is asked. The public class overrides it; see
        :mod:`opendata_buffer.assembly`.
        """
        return None

    @property
    def epoch(self) -> int:
        """The epoch with which this consumer owns the queue; higher than all earlier ones."""
        return self._entries.epoch

    @property
    def position(self) -> Position | None:
        """The position to start the next consumer with; None before the queue's first batch."""
        return self._entries.position

    @checked
    def position_of(self, batch: DeliveredBatch | int) -> Position:
        """Return the position to save with the records of a batch.

        With ``isolation`` it is the position after the batch and after everything delivered before
        it.

        Args:
            batch: A delivered batch, or its sequence.

        Returns:
            The position. Its ``str`` can be saved and passed to a new consumer.

        Raises:
            InvalidInput: ``isolation`` is set, and the batch is not waiting for acknowledgement.
        """
        return self._entries.position_of(_sequence(batch))

    @property
    def last_acked_sequence(self) -> int | None:
        """The sequence of :attr:`position`."""
        return self._entries.last_acked_sequence

    @property
    def last_handed_out_sequence(self) -> int | None:
        """The read cursor: the last sequence handed out; None before the queue's first batch."""
        return self._entries.last_handed_out_sequence

    @property
    def first_sequence(self) -> int:
        """The first sequence that is not acknowledged. Reading starts here until the first ack."""
        return self._entries.first_sequence

    @property
    def next_sequence(self) -> int:
        """The sequence that the next appended batch gets, by the manifest as it was last read."""
        return self._entries.next_sequence

    @checked
    def ack(self, batch: DeliveredBatch | int) -> None:
        """Acknowledge the next batch: it is processed and is not delivered again.

        The manifest is written once for every ``config.ack_interval`` acknowledgements.

        Args:
            batch: The delivered batch, or its sequence.

        Raises:
            InvalidInput: The batch is not the next in order, or was not handed out (failure F26).
            Conflict: The manifest was due to be written, and other writers won each time.
        """
        self._entries.ack(_sequence(batch))

    @checked
    def ack_through(self, sequence: int) -> None:
        """Acknowledge everything up to and including ``sequence``, in one manifest write.

        The consumer does not check that every earlier batch was processed. Pass the highest
        sequence that has no pending batch before it (OpenData RFC 0003, Descriptor handout
        contract).

        Args:
            sequence: The last sequence to acknowledge.

        Raises:
            InvalidInput: ``sequence`` was not handed out (failure F27), or is already acknowledged.
            Conflict: The manifest was not written: other writers won each time.
        """
        self._entries.ack_through(sequence)

    def flush(self) -> None:
        """Dequeue everything that is acknowledged; write nothing if there is nothing to dequeue.

        Raises:
            Conflict: The manifest was not written: other writers won each time.
        """
        self._entries.flush()

    @checked
    def next_descriptors(self, max: int) -> list[BatchDescriptor]:  # noqa: A002
        """Hand out up to ``max`` entries with one read of the manifest; fetch no batch.

        The read cursor moves past them at once. If the caller loses a descriptor, only a new
        consumer delivers it again. Entries whose location was queued before are left out. They are
        acknowledged together with the entries after them.

        Args:
            max: Maximum number of descriptors to return, at least 0. 0 reads nothing.

        Returns:
            The descriptors, by sequence; empty if no entry is waiting.

        Raises:
            InvalidInput: ``max`` is negative.
            DataLoss: The queue does not continue at the cursor.
        """
        while entries := self._entries.next_entries(max):
            if found := [entry for entry in entries if entry.repeats is None]:
                return found
        return []

    @checked
    def fetch_descriptor(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """Fetch and decode one batch, without moving a cursor.

        Args:
            descriptor: The batch to fetch.

        Returns:
            The decoded batch.

        Raises:
            PoisonBatch: The batch is missing, unreadable or foreign.
        """
        self._entries.check_open()
        return self._entries.own_fetch_handle.fetch(descriptor)

    def fetch_handle(self) -> FetchHandle:
        """Return a handle for fetching in other threads and processes.

        The handle still works after the consumer is closed or fenced.
        """
        return self._entries.fetch_handle()

    @checked
    def skip(self, sequence: int) -> BatchDescriptor:
        """Give up one batch for good: the next one, or one handed out and not yet acknowledged.

        Use it for batches that cannot be delivered (failure F25). A warning in the log records the
        skip and the batch's location, for the audit. The entry leaves the queue with the next
        acknowledgement after it, or with its own. So a position that the target system has stored
        never falls behind the queue.

        Args:
            sequence: The batch's sequence.

        Returns:
            The entry that was skipped, for :meth:`.TransactionFilter.skip`.

        Raises:
            InvalidInput: ``sequence`` is neither of these, or is not queued.
            DataLoss: The queue does not continue at the cursor.
        """
        return self._entries.skip(sequence)

    @checked
    def seek(self, place: PlaceLike) -> None:
        """Move a reader of a log to a place, forwards or backwards, and read from there on.

        The position is written at once. Batches that were delivered before and are not acknowledged
        need no acknowledgement any more: do not acknowledge them, because those that lie after the
        place are delivered again. Batches that are skipped can be deleted once all other readers
        have acknowledged them and the retention is over::

            consumer.seek(datetime.now(UTC) - timedelta(hours=3))    # replay three hours

        Args:
            place: ``"earliest"``, ``"latest"``, a sequence, a time (a ``datetime`` with a time
                zone), or a :class:`Position`, which means the place after it.

        Raises:
            InvalidInput: The queue is not a log. Or the log does not keep the place.
            Fenced: Another consumer has the reader.
            DataLoss: The collector deleted the batches there at this moment.
            StorageError: The store did not answer. The reader may have moved: seek again.
        """
        self._entries.seek(place)

    def lag(self) -> Lag:
        """Return how much is not acknowledged, with one read of the manifest.

        Returns:
            The number of batches, and the age of the oldest one.
        """
        return self._entries.lag()

    def check_fence(self) -> None:
        """Check that this consumer still owns the queue, with one read of the manifest.

        Call it before you commit to a system that cannot compare epochs itself. It narrows the
        window of failure F8 but cannot close it.

        Raises:
            Fenced: Another consumer owns the queue.
        """
        self._entries.check_fence()

    def __len__(self) -> int:
        """Return how many batches are not acknowledged, with one read of the manifest."""
        return self._entries.lag().batches

    def __bool__(self) -> bool:
        # Without this, `if consumer:` would call __len__, which asks the store, and be false for an
        # empty queue.
        return True

    @checked
    def close(self, timeout: float | None = None) -> None:
        """Write out acknowledgements and stop the collector. May be called again.

        The consumer is closed even if this raises. Acknowledgements that could not be written are
        lost: the next consumer gets their batches again, unless it is given a position.

        Args:
            timeout: Seconds for writing acknowledgements out. None (default) takes up to the
                ``timeout_ms`` of the store options.

        Raises:
            Fenced: There was something to write, and another consumer owns the queue.
            Conflict: The manifest was not written: other writers won each time.
        """
        # Set it before the waiting calls are notified, because they check it when they wake.
        self._closed = True
        self._entries.close(timeout)

    def _next_now(self, *, arrow: bool) -> Any:
        entries = self._entries
        with entries.lock:
            entries.check_open()
            while found := entries.peek(1):
                handle, batch = entries.own_fetch_handle, None
                if found[0].repeats is None:
                    batch = (handle.fetch_arrow if arrow else handle.fetch)(found[0])
                # Move the read cursor only after the batch was fetched and decoded, so that a
                # failed call can be repeated.
                entries.hand_out(found)
                if batch is not None:
                    return replace(batch, _owner=self)
            return None

    def _is_waiting(self, batch: DeliveredBatch) -> bool:
        return self._entries.is_waiting(batch.sequence)

    # A publisher calls these on the consumer whose batches its transaction acknowledges.

    def _source_of(self, batch: DeliveredBatch) -> str:
        """Return the place of the queue. A transaction stores the position under this name."""
        return self._entries.source

    def _check_next(self, batches: Sequence[DeliveredBatch]) -> None:
        """Raise ``InvalidInput`` unless these are the next to be acknowledged, in this order."""
        self._entries.check_next([batch.sequence for batch in batches])
