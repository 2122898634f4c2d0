"""One queue's reader, as a stream uses it: claimed, read and acknowledged. No Spark in it.

:meth:`QueueCursor.open` checks the queue's identity, becomes its consumer (or, with
``acknowledge=false``, reads beside its consumer), and raises if the checkpoint does not fit. The
cursor then reads entries, acknowledges positions, and knows where reading continues after a loss
that was allowed.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from buffer_source.offsets import Position
from buffer_source.options import EARLIEST, LATEST, PROGRAM, SourceOptions
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import (
    Conflict,
    DataLoss,
    Drained,
    InvalidInput,
    OpenDataBufferError,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.keys import location_timestamp_ms
from opendata_buffer.queue.ownership import (
    QueueClaim,
    check_owner,
    claim_for_writing,
    missing_topic_hint,
    owner_key,
)
from opendata_buffer.queue.queue import Queue, broker_pause
from opendata_buffer.queue.rollback_checks import ends_before
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

EVERYTHING = 1 << 64
"""A sequence that no queue reaches."""

Retrying = Callable[..., Any]
"""Calls a function again while the store is unavailable for a time."""


class _EntryReader(Protocol):
    """A :class:`~opendata_buffer.consumer.consumer.Consumer`, or a reader beside one."""

    @property
    def last_acked_sequence(self) -> int | None: ...
    @property
    def last_handed_out_sequence(self) -> int | None: ...
    @property
    def next_sequence(self) -> int: ...
    def next_descriptors(self, max: int) -> list[BatchDescriptor]: ...  # noqa: A002
    def ack_through(self, sequence: int) -> None: ...
    def close(self) -> None: ...


class QueueCursor:
    """An opened queue, and those of its entries that were read and not acknowledged.

    Not thread-safe: Spark makes one call at a time.

    Args:
        reader: The claimed queue, or a reader beside its consumer.
        queue_id: Its identity; empty for a queue that has none.
        options: What the query asked for.
        read_beside: Reads on behind a sequence, where the queue was closed because it has left
            its topic.
    """

    def __init__(
        self,
        reader: _EntryReader,
        queue_id: str,
        options: SourceOptions,
        read_beside: Callable[[int | None], _EntryReader],
    ) -> None:
        self._reader = reader
        self._read_beside = read_beside
        self._options = options
        self._manifest_path = options.consumer.manifest_path
        self.queue_id = queue_id
        self._pending: list[BatchDescriptor] = []
        self._rebased: tuple[Position, int] | None = None
        self._beyond: Position | None = None  # A position that this new queue never reached.

    @classmethod
    def open(
        cls,
        options: SourceOptions,
        store: Store,
        runtime: Runtime,
        retrying: Retrying,
        start: Position | None,
        stable_end: int,
        queue_id: str,
    ) -> QueueCursor:
        """Become the queue's consumer behind ``start``; or, without acknowledging, read there.

        Args:
            options: What the query asked for.
            store: The opened store.
            runtime: Clock and sleep.
            retrying: Repeats what fails for a time.
            start: A position in the commit log: what was read before it may leave the queue.
            stable_end: The first sequence that must stay in the queue for ``start``; 0 without one.
            queue_id: The queue the checkpoint is about; empty when it does not say.

        Raises:
            InvalidInput: There is no queue, and none is to be made.
            QueueReset: The checkpoint is about another queue, unless a loss is allowed; or the
                queue's manifest is gone or went backwards.
            DataLoss: The queue begins behind ``start``, unless a loss is allowed.
        """
        # With a loss allowed, a replay may go on where its whole queue is gone.
        is_replay = queue_id != "" and not options.fail_on_data_loss
        if start is None and not is_replay and not options.create_if_missing:
            _check_exists(options, store, runtime)

        def read_beside(last_acked: int | None) -> _EntryReader:
            reader = read_only(options, store, runtime)
            reader.seek(None if last_acked is None else last_acked + 1)
            return reader

        def read_behind(last_acked: int | None) -> _EntryReader:
            if not options.acknowledge:
                return read_beside(last_acked)
            try:
                return Consumer(
                    options.consumer,
                    last_acked,
                    store=store,
                    runtime=runtime,
                    allow_data_loss=not options.fail_on_data_loss,
                    # With the claim that was just made: a second one would ask the store twice.
                    # Beside a busy broker this one is let in.
                    queue=Queue(
                        store,
                        options.consumer,
                        runtime=runtime,
                        role="consumer",
                        claim=claim,
                        open_pause=broker_pause,
                    ),
                    program=PROGRAM,
                )
            except Drained:
                # A queue is closed when it leaves its topic, and it was empty then: there is
                # nothing to consume. Reading beside it shows whether all of it was read.
                return read_beside(last_acked)

        claim: QueueClaim | None = retrying(_claimed, options, store, runtime)
        found = "" if claim is None else claim.queue_id
        last = stable_end - 1 if stable_end > 0 else None
        try:
            # Before anything is claimed or dropped (failure F4).
            _check_identity(options, store, queue_id, found)
            cursor = cls(retrying(read_behind, last), found, options, read_beside)
            try:
                if start is not None:
                    cursor._check_holds(start, stable_end, store.url)
            except OpenDataBufferError:
                cursor.close()
                raise
            return cursor
        except QueueReset as error:
            options.report_data_loss(error)
        cursor = cls(retrying(read_behind, None), found, options, read_beside)
        if start is not None:
            cursor._rebase(start)
        return cursor

    @property
    def read_end(self) -> int:
        """First sequence whose entry was not read yet."""
        last = self._reader.last_handed_out_sequence
        return 0 if last is None else last + 1

    @property
    def acknowledged(self) -> int:
        """First sequence that is not acknowledged."""
        last = self._reader.last_acked_sequence
        return 0 if last is None else last + 1

    @property
    def end(self) -> int:
        """The queue's next sequence, by the manifest that was read last."""
        return self._reader.next_sequence

    @property
    def empty(self) -> bool:
        """Whether all entries of the manifest that was read last are acknowledged."""
        return self.end == self.acknowledged

    def owns(self, position: Position) -> bool:
        """Whether a position is about this queue, as far as ids tell."""
        return position.queue in ("", self.queue_id) or not self.queue_id

    def continue_behind(self, start: Position) -> tuple[int, int]:
        """Where reading continues behind ``start``, and the base that goes with it.

        That is ``start`` itself, unless ``start`` is a position of a queue that was replaced.
        """
        if start.next > self.end:
            # A loss was allowed: this queue ends before `start`, and all of it was read.
            self._rebase(start)
        if self._rebased is not None and self._rebased[0] == start:
            return self._rebased[1], self._rebased[1]
        # Spark is beyond it. A later position may be equal to it, and is then of this queue.
        self._rebased = None
        return start.next, start.base

    def starting_offset(self, run_end: int | None) -> int:
        """The sequence at which a new query begins.

        Args:
            run_end: Where this run ends, if that is decided.

        Raises:
            InvalidInput: The wanted sequence is beyond the end.
            DataLoss: It is not queued any more, unless a loss is allowed.
        """
        options, first = self._options, self.read_end
        wanted, since_ms = options.starting_offsets, options.starting_timestamp_ms
        assert not isinstance(wanted, tuple), "of_partition() picks one"
        if since_ms is not None:
            self.read_until(EVERYTHING)
            wanted = first_since(self._pending, since_ms, self.read_end)
        elif wanted == EARLIEST:
            return first
        elif wanted == LATEST:
            wanted = self.end
        else:
            self._check_starting_offset(int(wanted), first)
            return max(first, int(wanted))
        return int(wanted) if run_end is None else max(first, min(int(wanted), run_end))

    def read_until(self, stop: int) -> None:
        """Read the entries below ``stop`` that were not read yet, as far as the queue has them."""
        if self.read_end < stop:
            wanted = min(stop - self.read_end, EVERYTHING)
            try:
                entries = self._reader.next_descriptors(wanted)
            except Drained:
                self._read_closed_queue()
                entries = self._reader.next_descriptors(wanted)
            self._pending.extend(entries)

    def pending(self, begin: int, stop: int = EVERYTHING) -> list[BatchDescriptor]:
        """Entries in [begin, stop) that were read and not acknowledged."""
        first = bisect_left(self._pending, begin, key=_sequence)
        return self._pending[first : bisect_left(self._pending, stop, key=_sequence)]

    def next_available(self, begin: int) -> int:
        """The first sequence from ``begin`` on that may be queued, by what was read.

        It is ``begin``, unless a loss was allowed and passed by.
        """
        pending = self.pending(begin)
        return pending[0].sequence if pending else max(begin, self.read_end)

    def entries(self, begin: int, stop: int) -> list[BatchDescriptor]:
        """Exactly the entries [begin, stop).

        Raises:
            DataLoss: They are gone, unless a loss is allowed.
            QueueReset: The queue ends before them, unless a loss is allowed.
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
            oldest = found[0].sequence if found else stop
            self._options.report_data_loss(
                QueueReset(f"{message}. The queue was replaced or went backwards.")
                if end < stop
                else DataLoss(self._manifest_path, begin, oldest, f"So {message}.")
            )
        return found

    def acknowledge(self, end: Position, stable_end: int) -> bool:
        """Let everything below ``stable_end`` leave the queue; whether anything did.

        Args:
            end: A position in the commit log.
            stable_end: The first sequence that a query which continues there may still ask for.

        Cumulative and repeatable: what was done before, and a position of a queue that was
        replaced, does nothing. A store that does not answer is no failure either: the next
        acknowledgement makes up for it.
        """
        if not self.owns(end) or not self.acknowledged < stable_end <= self.read_end:
            return False
        if end == self._beyond:
            # With asynchronous progress tracking it is committed when reading has continued, and
            # may have come as far as it says: with batches that are not yet on record.
            return False
        try:
            self._reader.ack_through(stable_end - 1)
        except (TransientStorageError, Conflict) as error:
            log.warning("acknowledging through %d is put off: %s", stable_end - 1, error)
            return False
        except Drained:
            self._read_closed_queue()  # Only an empty queue is closed: the entries have left it.
        self._pending = self.pending(stable_end)
        return True

    def close(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        self._reader.close()

    def _check_holds(self, start: Position, stable_end: int, url: str) -> None:
        """Refuse a position that this queue does not hold.

        Raises:
            DataLoss: The queue begins behind it, unless a loss is allowed.
            QueueReset: The queue ends before it.
        """
        # A consumer cannot be opened behind a position before the first batch, and so could not
        # check this.
        if stable_end == 0 and self.read_end > 0:
            cause = "Another consumer read this queue."
            self._options.report_data_loss(
                DataLoss(self._manifest_path, stable_end, self.read_end, cause)
            )
        # With a transaction open the queue is claimed behind an earlier sequence than this.
        if start.next > self.end:
            raise QueueReset(ends_before(start.next - 1, self.end, self._manifest_path, url))

    def _check_starting_offset(self, wanted: int, first: int) -> None:
        if wanted > self.end:
            raise InvalidInput(
                f"option startingOffsets is {wanted} and manifest "
                f"{self._manifest_path!r} ends at {self.end - 1}: use a sequence up to {self.end}, "
                "'earliest' or 'latest'"
            )
        if wanted < first:
            advice = "Start at 'earliest' or at a sequence that is still queued."
            self._options.report_data_loss(DataLoss(self._manifest_path, wanted, first, advice))

    def _rebase(self, start: Position) -> None:
        self._rebased = (start, self.read_end)
        self._beyond = start

    def _read_closed_queue(self) -> None:
        """The queue was closed for good: read on without being its consumer."""
        last = self._reader.last_handed_out_sequence
        self._reader.close()
        self._reader = self._read_beside(last)


def read_only(options: SourceOptions, store: Store, runtime: Runtime) -> ReadOnlyReader:
    """A reader that takes nothing out of the queue and writes nothing."""
    return ReadOnlyReader(
        options.consumer,
        store=store,
        runtime=runtime,
        allow_data_loss=not options.fail_on_data_loss,
    )


def no_queue(options: SourceOptions, store: Store, advice: str = "") -> InvalidInput:
    """The error for a path without a queue.

    Raises:
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    if lost := missing_topic_hint(store):
        return InvalidInput(lost)
    return InvalidInput(
        f"there is no queue with manifest {options.queue.manifest_path!r} in {store.url}: check "
        f"the path and the options dataPathPrefix and manifestPath{advice}"
    )


def oldest_ms(batch: BatchDescriptor) -> int | None:
    """Ingestion time of the batch's first record, milliseconds since the Unix epoch.

    The producer writes a time for each range of records. A batch without ranges is as old as the
    ULID in its name, and None where there is no ULID either. The name is asked last: a Spark sink
    names its batches ahead of time.
    """
    times = [each.ingestion_time_ms for each in batch.metadata]
    return min(times) if times else location_timestamp_ms(batch.location)


def first_since(queued: Iterable[BatchDescriptor], since_ms: int, end: int) -> int:
    """The first batch with a record ingested at that time or later; the end if none has."""
    for each in queued:
        times = [metadata.ingestion_time_ms for metadata in each.metadata]
        newest_ms = max(times) if times else location_timestamp_ms(each.location)
        # A batch whose time is unknown is rather read once too often than never.
        if newest_ms is None or newest_ms >= since_ms:
            return each.sequence
    return end


def _check_exists(options: SourceOptions, store: Store, runtime: Runtime) -> None:
    """Refuse a path that no queue was ever made at; a manifest that was lost is not this."""
    if read_only(options, store, runtime).find() is not None:  # Retries.
        return
    claim = check_owner(store, options.consumer, runtime=runtime)
    if claim is None or claim.watermark is None:
        raise no_queue(
            options,
            store,
            ". For a query that starts before its first producer, set the option createIfMissing "
            "to true",
        )


def _claimed(options: SourceOptions, store: Store, runtime: Runtime) -> QueueClaim | None:
    """The queue's claim. With ``acknowledge`` it is made where there is none."""
    config = options.consumer
    if options.acknowledge:
        return claim_for_writing(store, config, runtime=runtime)
    claim = check_owner(store, config, runtime=runtime)
    if claim is not None and options.fail_on_data_loss:
        claim.check(read_only(options, store, runtime).find())
    return claim


def _check_identity(options: SourceOptions, store: Store, expected: str, found: str) -> None:
    if expected and found and found != expected:
        config = options.consumer
        raise QueueReset(
            f"the checkpoint is about queue {expected}, and manifest "
            f"{config.manifest_path!r} in {store.url} belongs to queue {found}: the "
            "path or the prefix was changed, or the queue was deleted and made anew. If only "
            f"{owner_key(config.data_path_prefix)!r} was lost, write the old id back into it."
        )


def _sequence(descriptor: BatchDescriptor) -> int:
    return descriptor.sequence
