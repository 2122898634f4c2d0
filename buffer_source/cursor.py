"""One queue's reader, as a stream uses it. No Spark in it.

:meth:`Cursor.open` learns the queue's identity, takes the queue over (or, with
``acknowledge=false``, looks at it from beside its consumer) and gives a cursor, or raises. The
cursor then hands out entries, acknowledges positions, and knows where reading goes on after a
loss that was allowed.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

from buffer_source.isolation import floor_of
from buffer_source.offsets import Position
from buffer_source.options import SourceOptions
from buffer_source.query_note import PROGRAM
from buffer_source.starting import first_of_offset, first_since, within
from opendata_buffer.broker.yielding_queue import YieldingQueue
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import (
    Conflict,
    DataLoss,
    Drained,
    InvalidInput,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.queue.ownership import (
    QueueClaim,
    check_owner,
    claim_for_writing,
    missing_topic_hint,
    owner_key,
)
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.rollback_checks import ends_before
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["EVERYTHING", "Cursor"]

log = logging.getLogger(__name__)

EVERYTHING = 1 << 64
"""A sequence that no queue reaches."""

Observe = Callable[[int | None], ReadOnlyReader]
"""Reads behind a sequence without being the consumer."""

Patient = Callable[..., Any]
"""Calls a function again while the store is unavailable for a time."""


class Reader(Protocol):
    """A :class:`~opendata_buffer.consumer.consumer.Consumer`, or an observer beside one."""

    @property
    def last_acked_sequence(self) -> int | None: ...
    @property
    def last_handed_out_sequence(self) -> int | None: ...
    @property
    def next_sequence(self) -> int: ...
    def next_descriptors(self, max: int) -> list[BatchDescriptor]: ...  # noqa: A002
    def ack_through(self, sequence: int) -> None: ...
    def close(self) -> None: ...


class Cursor:
    """An opened queue and the entries of it that were handed out and not acknowledged.

    Not thread-safe: Spark makes one call at a time.

    Args:
        reader: The claimed queue, or what reads beside whoever claimed it.
        queue_id: Its identity; empty for a queue that has none.
        options: What the query asked for.
        observe: Reads on where the queue was closed, because it has left its topic.
    """

    def __init__(
        self, reader: Reader, queue_id: str, options: SourceOptions, observe: Observe
    ) -> None:
        self._reader = reader
        self._observe = observe
        self._options = options
        self._manifest_path = options.consumer.manifest_path
        self.queue_id = queue_id
        self._waiting: list[BatchDescriptor] = []
        self._rebased: tuple[Position, int] | None = None
        self._beyond: Position | None = None  # What this queue, that was replaced, never reached.

    @classmethod
    def open(
        cls,
        options: SourceOptions,
        store: Store,
        runtime: Runtime,
        patient: Patient,
        start: Position | None,
        queue_id: str,
    ) -> Cursor:
        """Become the queue's consumer behind ``start``; or, without acknowledging, read there.

        Args:
            options: What the query asked for.
            store: The opened store.
            runtime: Clock and sleep.
            patient: Repeats what fails for a time.
            start: A position in the commit log: what was read before it may leave the queue.
            queue_id: The queue the checkpoint is about; empty when it does not say.

        Raises:
            InvalidInput: There is no queue, and none is to be made.
            QueueReset: The checkpoint is about another queue, unless a loss is allowed; or the
                queue's manifest is gone or went backwards.
            DataLoss: The queue begins behind ``start``, unless a loss is allowed.
        """
        # A replay that may go on behind the loss of its whole queue has no queue to find.
        loss_allowed = queue_id != "" and not options.fail_on_data_loss
        if start is None and not loss_allowed and not options.create_if_missing:
            _check_exists(store, options, runtime)

        def observe(last_acked: int | None) -> ReadOnlyReader:
            reader = ReadOnlyReader(
                options.consumer,
                store=store,
                runtime=runtime,
                allow_data_loss=not options.fail_on_data_loss,
            )
            reader.seek(None if last_acked is None else last_acked + 1)
            return reader

        def read_behind(last_acked: int | None) -> Reader:
            if not options.acknowledge:
                return observe(last_acked)
            try:
                return Consumer(
                    options.consumer,
                    last_acked,
                    store=store,
                    runtime=runtime,
                    allow_data_loss=not options.fail_on_data_loss,
                    # With the claim that was just made: a second one would ask the store twice.
                    # Beside a busy broker this one is let in.
                    queue=YieldingQueue(
                        store, options.consumer, runtime=runtime, role="consumer", claim=claim
                    ),
                    program=PROGRAM,
                )
            except Drained:
                # It was empty when it left its topic: nothing is there to be consumed, and this
                # finds out whether that was all read.
                return observe(last_acked)

        claim: QueueClaim | None = patient(_claimed, store, options, runtime)
        found = "" if claim is None else claim.queue_id
        floor = 0 if start is None else floor_of(start, options)
        last = floor - 1 if floor > 0 else None
        try:
            # Before anything is claimed or dropped (failure F4).
            _check_identity(store, options, queue_id, found)
            cursor = cls(patient(read_behind, last), found, options, observe)
            if start is not None and last is None:
                cursor._check_begins_at(floor)
            if start is None or start.next <= cursor.end:
                return cursor
            cursor.close()
            # With a transaction open the queue is claimed behind an earlier sequence than this.
            key = options.consumer.manifest_path
            raise QueueReset(ends_before(start.next - 1, cursor.end, key, store.url))
        except QueueReset as error:
            if options.fail_on_data_loss:
                raise
            log.warning("data loss allowed, reading from the start of another queue: %s", error)
        cursor = cls(patient(read_behind, None), found, options, observe)
        if start is not None:
            cursor._rebase(start)
        return cursor

    @property
    def handed_out(self) -> int:
        """First sequence that was not handed out."""
        last = self._reader.last_handed_out_sequence
        return 0 if last is None else last + 1

    @property
    def acknowledged(self) -> int:
        """First sequence that is not acknowledged."""
        last = self._reader.last_acked_sequence
        return 0 if last is None else last + 1

    @property
    def end(self) -> int:
        """The queue's next sequence, as of the last look at the manifest."""
        return self._reader.next_sequence

    def owns(self, position: Position) -> bool:
        """Whether a position is about this queue, as far as ids tell."""
        return position.queue in ("", self.queue_id) or not self.queue_id

    def resume(self, start: Position) -> tuple[int, int]:
        """Where reading goes on behind ``start``, and the base that goes with it.

        That is ``start`` itself, unless ``start`` is a position of a queue that was replaced.
        """
        if start.next > self.end:
            # A replay that was allowed to find less than `start` says has read all there was.
            self._rebase(start)
        if self._rebased is not None and self._rebased[0] == start:
            return self._rebased[1], self._rebased[1]
        # Spark is beyond it. A later position may be equal to it, and is then of this queue.
        self._rebased = None
        return start.next, start.base

    def first(self, target: int | None) -> int:
        """Where a new query begins.

        Args:
            target: Where this run ends, if that is decided.

        Raises:
            InvalidInput, DataLoss: The wanted sequence is not queued.
        """
        first, since_ms = self.handed_out, self._options.starting_timestamp_ms
        if since_ms is None:
            return first_of_offset(self._options, first, self.end, target)
        self.hand_out(EVERYTHING)
        return within(first_since(self._waiting, since_ms, self.handed_out), first, target)

    def hand_out(self, stop: int) -> None:
        """Have entries below ``stop`` handed out, as far as the queue has them."""
        if self.handed_out < stop:
            wanted = min(stop - self.handed_out, EVERYTHING)
            try:
                found = self._reader.next_descriptors(wanted)
            except Drained:
                self._leave()
                found = self._reader.next_descriptors(wanted)
            self._waiting.extend(found)

    def waiting(self, begin: int, stop: int = EVERYTHING) -> list[BatchDescriptor]:
        """Entries in [begin, stop) that were handed out and not acknowledged."""
        first = bisect_left(self._waiting, begin, key=_sequence)
        return self._waiting[first : bisect_left(self._waiting, stop, key=_sequence)]

    def behind_gap(self, begin: int) -> int:
        """The first sequence from ``begin`` on that may be queued, as of the last look.

        It is ``begin``, unless a loss was allowed and passed by.
        """
        waiting = self.waiting(begin)
        return waiting[0].sequence if waiting else max(begin, self.handed_out)

    def between(self, begin: int, stop: int) -> list[BatchDescriptor]:
        """Exactly the entries [begin, stop).

        Raises:
            DataLoss: They are gone, unless that is allowed.
            QueueReset: The queue ends before them, unless that is allowed.
        """
        if begin >= stop:
            return []
        self.hand_out(stop)
        found = self.waiting(begin, stop)
        if len(found) < stop - begin:
            end = self.end
            message = (
                f"the checkpoint needs sequences {begin} to {stop - 1} of manifest "
                f"{self._manifest_path!r}, of which {len(found)} are left; it holds "
                f"{self._waiting[0].sequence if self._waiting else end} to {end - 1}"
            )
            if self._options.fail_on_data_loss:
                if end < stop:
                    raise QueueReset(f"{message}. The queue was replaced or went backwards.")
                oldest = found[0].sequence if found else stop
                raise DataLoss(self._manifest_path, begin, oldest, f"So {message}.")
            log.warning("data loss allowed: %s", message)
        return found

    def acknowledge(self, end: Position, floor: int) -> bool:
        """Let everything below ``floor`` leave the queue; whether anything did.

        Args:
            end: A position in the commit log.
            floor: The first sequence that whoever goes on there may still ask for.

        Cumulative and repeatable: what was done before, and a position of a queue that was
        replaced, does nothing. A store that does not answer is no failure either: the next
        acknowledgement makes up for it.
        """
        if not self.owns(end) or not self.acknowledged < floor <= self.handed_out:
            return False
        if end == self._beyond:
            # With asynchronous progress tracking it is committed when reading has gone on, and
            # may have come as far as it says: with batches that are not yet on record.
            return False
        try:
            self._reader.ack_through(floor - 1)
        except (TransientStorageError, Conflict) as error:
            log.warning("acknowledging through %d is put off: %s", floor - 1, error)
            return False
        except Drained:
            self._leave()  # Only an empty queue is closed: what was to leave it has left.
        self._waiting = self.waiting(floor)
        return True

    @property
    def empty(self) -> bool:
        """Whether all there is, as of the last look, is acknowledged."""
        return self.end == self.acknowledged

    def _check_begins_at(self, floor: int) -> None:
        """For a position before the first batch, which a consumer cannot be opened behind.

        Raises:
            DataLoss: Somebody else took batches, unless that is allowed.
        """
        oldest = self.handed_out
        if oldest <= floor:
            return
        if self._options.fail_on_data_loss:
            self.close()
            raise DataLoss(self._manifest_path, floor, oldest, "Another consumer read this queue.")
        log.warning("data loss allowed: going on at %d, not at %d", oldest, floor)

    def _rebase(self, start: Position) -> None:
        self._rebased = (start, self.handed_out)
        self._beyond = start

    def _leave(self) -> None:
        """The queue was closed for good: look on."""
        last = self._reader.last_handed_out_sequence
        self._reader.close()
        self._reader = self._observe(last)

    def close(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        self._reader.close()


def _check_exists(store: Store, options: SourceOptions, runtime: Runtime) -> None:
    """Refuse a path that no queue was ever made at; a manifest that was lost is not this."""
    config = options.consumer
    if Queue(store, config, runtime=runtime, role="reader").read() is not None:  # Retries.
        return
    claim = check_owner(store, config, runtime=runtime)
    if claim is None or claim.watermark is None:
        if lost := missing_topic_hint(store):
            raise InvalidInput(lost)
        raise InvalidInput(
            f"there is no queue with manifest {config.manifest_path!r} in {store.url}: check the "
            "path and the options dataPathPrefix and manifestPath. For a query that starts before "
            "its first producer, set the option createIfMissing to true"
        )


def _claimed(store: Store, options: SourceOptions, runtime: Runtime) -> QueueClaim | None:
    """The queue's claim; who is to acknowledge makes sure that there is one."""
    config = options.consumer
    if options.acknowledge:
        return claim_for_writing(store, config, runtime=runtime)
    claim = check_owner(store, config, runtime=runtime)
    if claim is not None and options.fail_on_data_loss:
        claim.check(Queue(store, config, runtime=runtime, role="reader").read())
    return claim


def _check_identity(store: Store, options: SourceOptions, expected: str, found: str) -> None:
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
