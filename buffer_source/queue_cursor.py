"""One queue's reader, as a stream uses it: claimed, read and acknowledged. No Spark in it.

:meth:`QueueCursor.open` checks the queue's identity, becomes its consumer (or, with
``acknowledge=false``, reads beside its consumer), and raises if the checkpoint does not fit.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime

from buffer_source.offsets import PartitionOffset
from buffer_source.options import EARLIEST, LATEST, PROGRAM, SourceOptions
from opendata_buffer.consumer.consumer import Consumer, open_queue
from opendata_buffer.consumer.position import Position
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
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.queue.log import Log, LogView
from opendata_buffer.queue.ownership import (
    QueueClaim,
    check_owner,
    claim_for_writing,
    ends_before,
    missing_topic_hint,
    owner_key,
    queue_hint,
)
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

EVERYTHING = 1 << 64
"""A sequence beyond the end of any queue."""

MOST_ENTRIES = 100_000
"""Entries that a micro-batch without a limit reads; a log may have millions of them."""


class QueueCursor:
    """An opened queue, and those of its entries that were read and not acknowledged.

    Not thread-safe: Spark makes one call at a time.
    """

    def __init__(
        self, options: SourceOptions, store: Store, runtime: Runtime, claim: QueueClaim | None
    ) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        self._claim = claim
        self._manifest_path = options.consumer.manifest_path
        self.queue_id = "" if claim is None else claim.queue_id
        self._reader: Consumer | ReadOnlyReader
        self._pending: list[BatchDescriptor] = []
        self._rebased: tuple[PartitionOffset, int] | None = None
        self._beyond: PartitionOffset | None = None  # A position that this new queue never reached.

    @classmethod
    def open(
        cls,
        options: SourceOptions,
        store: Store,
        runtime: Runtime,
        retrying: Retries,
        start: PartitionOffset | None,
        stable_end: int,
        queue_id: str,
    ) -> QueueCursor:
        """Become the queue's consumer behind ``start``; or, without acknowledging, read there.

        ``start`` is in the commit log: what was read before it may leave the queue, up to the
        sequence ``stable_end`` (0 without a start). ``queue_id`` is the queue that the checkpoint
        is about, or empty.

        Raises:
            InvalidInput: There is no queue, and none is to be created.
            QueueReset: The checkpoint is about another queue, unless a loss is allowed; or the
                queue's manifest is gone or went backwards.
            DataLoss: The queue begins behind ``start``, unless a loss is allowed.
        """
        if queue_id or not options.create_if_missing:
            _check_exists(options, store, runtime)
        cursor = cls(options, store, runtime, retrying(_claimed, options, store, runtime))
        try:
            # Before anything is claimed or dropped (failure F4).
            cursor._check_identity(queue_id)
            known = stable_end > 0 or (start is not None and options.reader)
            retrying(cursor._read_behind, stable_end - 1 if known else None)
            if start is not None:
                cursor._check_holds(start, stable_end)
            return cursor
        except QueueReset as error:
            options.report_data_loss(error)
        retrying(cursor._read_behind, None)
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

    @property
    def _is_log(self) -> bool:
        return self._claim is not None and self._claim.is_log

    def owns(self, position: PartitionOffset) -> bool:
        """Whether a position is of this queue, as far as ids show."""
        return position.queue in ("", self.queue_id) or not self.queue_id

    def continue_behind(self, start: PartitionOffset) -> tuple[int, int]:
        """Where reading continues behind ``start``, and its base; in a new queue that differs."""
        if start.next > self.end:
            # A loss was allowed: this queue ends before `start`, and all of it was read.
            self._rebase(start)
        if self._rebased is not None and self._rebased[0] == start:
            return self._rebased[1], self._rebased[1]
        # Spark is beyond it. A later position may be equal to it, and is then of this queue.
        self._rebased = None
        return start.next, start.base

    def starting_offset(self, run_end: int) -> int:
        """The sequence at which a new query begins, if its run ends at ``run_end``.

        Raises:
            InvalidInput, DataLoss: The wanted sequence is beyond the end, or not queued any more;
                or the query would acknowledge unread batches before it.
        """
        options, first = self._options, self.read_end
        if options.starts_at_oldest:
            return first
        view = read_only(options, self._store, self._runtime).view()
        if isinstance(view, LogView):
            first = view.first_sequence  # A reader may also go back.
        begin = wanted_start(options, view, first, self._store.url)
        return max(
            first, begin if isinstance(options.starting_offsets, int) else min(begin, run_end)
        )

    def seek(self, begin: int) -> None:
        """Read from ``begin`` on, where a query begins that has no position yet.

        The position of a reader moves there, back or forward. A queue's entries are all read.
        """
        first = self._pending[0].sequence if self._pending else self.read_end
        if self._is_log and not first <= begin <= self.read_end:
            self._reader.close()
            self._pending = []
            self._read_behind(begin - 1)

    def read_until(self, stop: int) -> None:
        """Read the entries below ``stop`` that were not read yet, as far as the queue has them."""
        if self.read_end < stop:
            wanted = min(stop - self.read_end, EVERYTHING)
            try:
                entries = self._reader.next_entries(wanted)
            except Drained:
                self._read_closed_queue()
                entries = self._reader.next_entries(wanted)
            self._pending.extend(entries)

    def pending(self, begin: int, stop: int = EVERYTHING) -> list[BatchDescriptor]:
        """Entries in [begin, stop) that were read and not acknowledged."""
        first = bisect_left(self._pending, begin, key=_sequence)
        return self._pending[first : bisect_left(self._pending, stop, key=_sequence)]

    def next_available(self, begin: int) -> int:
        """The first sequence from ``begin`` on that may be queued; a later one behind a loss."""
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
            if end < stop:
                self._options.report_data_loss(
                    QueueReset(f"{message}. The queue was replaced or went backwards.")
                )
            else:
                oldest = found[0].sequence if found else stop
                self._report_loss(begin, oldest, f"So {message}.")
        return found

    def acknowledge(self, end: PartitionOffset, stable_end: int) -> bool:
        """Let everything below ``stable_end`` leave the queue; whether anything did.

        Cumulative and repeatable. ``end`` is in the commit log, and a query that continues there
        may still ask for ``stable_end``. A position of a queue that was replaced does nothing. A
        store that does not answer is no failure: the next acknowledgement makes up for it.
        """
        if not self.owns(end) or not self.acknowledged < stable_end <= self.read_end:
            return False
        if end == self._beyond:
            # With asynchronous progress tracking it is committed when reading has continued, and
            # the new queue may have grown to it, by batches that are not yet on record.
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

    def _read_behind(self, last_acked: int | None) -> None:
        """Read behind a sequence, as the queue's consumer where the query acknowledges."""
        if not self._options.acknowledge:
            self._read_beside(last_acked)
            return
        # With the claim that was just made: a second one would ask the store twice.
        queue = open_queue(
            self._store, self._options.consumer, self._runtime, self._claim, program=PROGRAM
        )
        try:
            self._reader = Consumer(
                self._options.consumer,
                # Also -1: a reader that was further on goes back to sequence 0.
                None if last_acked is None else Position("", last_acked),
                store=self._store,
                runtime=self._runtime,
                allow_data_loss=not self._options.fail_on_data_loss,
                queue=queue,
                program=PROGRAM,
            )
        except Drained:
            # A queue is closed when it leaves its topic, and it was empty then: there is
            # nothing to consume. Reading beside it shows whether all of it was read.
            self._read_beside(last_acked)

    def _read_beside(self, last: int | None) -> None:
        """Read behind a sequence without being the queue's consumer."""
        reader = read_only(self._options, self._store, self._runtime)
        reader.seek(None if last is None else last + 1)
        self._reader = reader

    def _read_closed_queue(self) -> None:
        """The queue was closed for good: read on without being its consumer."""
        last = self._reader.last_handed_out_sequence
        self._reader.close()
        self._read_beside(last)

    def _check_identity(self, expected: str) -> None:
        if expected and self.queue_id and self.queue_id != expected:
            raise QueueReset(
                f"the checkpoint is about queue {expected}, and manifest "
                f"{self._manifest_path!r} in {self._store.url} belongs to queue {self.queue_id}: "
                "the path or the prefix was changed, or the queue was deleted and made anew. If "
                f"only {owner_key(self._options.queue.data_path_prefix)!r} was lost, write the old "
                "id back into it."
            )

    def _check_holds(self, start: PartitionOffset, stable_end: int) -> None:
        """Refuse a position that the queue begins behind or ends before."""
        try:
            # A consumer that opens behind no sequence does not check this.
            if stable_end == 0 and self.read_end > 0:
                self._report_loss(stable_end, self.read_end, "Another consumer read this queue.")
            # With a transaction open the queue is claimed behind an earlier sequence than this.
            if start.next > self.end:
                last, url = start.next - 1, self._store.url
                raise QueueReset(ends_before(last, self.end, self._manifest_path, url))
        except OpenDataBufferError:
            self.close()
            raise

    def _report_loss(self, needed: int, oldest: int, cause: str) -> None:
        self._options.report_data_loss(DataLoss(self._manifest_path, needed, oldest, cause))

    def _rebase(self, start: PartitionOffset) -> None:
        log.warning(
            "data loss allowed: what the queue had from sequence %d on is lost; reading goes on in "
            "the new queue at sequence %d, of %d batches",
            start.next,
            self.read_end,
            self.end - self.read_end,
        )
        self._rebased = (start, self.read_end)
        self._beyond = start


def read_only(options: SourceOptions, store: Store, runtime: Runtime) -> ReadOnlyReader:
    """A reader that takes nothing out of the queue and writes nothing."""
    return ReadOnlyReader(
        options.consumer,
        store=store,
        runtime=runtime,
        allow_data_loss=not options.fail_on_data_loss,
    )


def check_start(options: SourceOptions, store: Store, runtime: Runtime) -> None:
    """Refuse a new query that would acknowledge unread batches, before it fences a consumer.

    Raises:
        InvalidInput, DataLoss: As :meth:`QueueCursor.starting_offset`.
    """
    if options.acknowledge and not options.starts_at_oldest:
        view = read_only(options, store, runtime).view()
        if options.reader or not isinstance(view, LogView):  # Without, opening it is refused.
            wanted_start(options, view, view.first_sequence, store.url)


def wanted_start(options: SourceOptions, view: Manifest | LogView, first: int, url: str) -> int:
    """The sequence that the options start at in a queue from ``first`` on; not below that.

    Raises:
        InvalidInput, DataLoss: As :meth:`QueueCursor.starting_offset`.
    """
    wanted, since_ms, key = (
        options.starting_offsets, options.starting_timestamp_ms, options.queue.manifest_path
    )  # fmt: skip
    assert not isinstance(wanted, tuple), "of_partition() picks one"
    end = view.next_sequence
    if since_ms is not None:
        begin = sequence_since(view, since_ms)
    else:
        begin = first if wanted == EARLIEST else end if wanted == LATEST else int(wanted)
    if begin > end:
        raise InvalidInput(
            f"option startingOffsets is {wanted} and manifest {key!r} ends at {end - 1}: use a "
            f"sequence up to {end}, 'earliest' or 'latest'"
        )
    if begin < first:
        advice = "Start at 'earliest' or at a sequence that is still queued."
        options.report_data_loss(DataLoss(key, begin, first, advice))
    elif options.acknowledge and not options.reader and begin > first:
        name = "startingOffsets" if since_ms is None else "startingTimestamp"
        raise InvalidInput(
            f"option {name} starts at sequence {begin} of manifest {key!r}, and {begin - first} "
            f"unread batches from {first} on would leave the queue. To read without taking "
            "anything, set the option acknowledge to false. To delete them first and keep a copy, "
            f"run 'opendata-buffer trim {queue_hint(url, options.queue)} --to {begin}'. To read "
            "them, start at 'earliest'"
        )
    return max(first, begin)


def view_of(options: SourceOptions, store: Store, runtime: Runtime) -> Manifest | LogView | None:
    """The queue's manifest, or all that a log keeps; None for a partition never written to.

    Raises:
        InvalidInput: There is no queue.
        QueueReset: The manifest was lost, unless a loss is allowed (failure F4).
    """
    manifest = read_only(options, store, runtime).find()
    if manifest is None:
        if not options.create_if_missing:
            raise _no_queue(options, store)
        return None
    log_ = Log(store, options.queue, runtime)
    index = log_.read()
    return manifest if index is None else log_.view(index, manifest)


def _no_queue(options: SourceOptions, store: Store, advice: str = "") -> InvalidInput:
    if lost := missing_topic_hint(store):
        return InvalidInput(lost)
    return InvalidInput(
        f"there is no queue with manifest {options.queue.manifest_path!r} in {store.url}: check "
        f"the path and the option dataPathPrefix{advice}"
    )


def oldest_ms(batch: BatchDescriptor) -> int | None:
    """Ingestion time of the batch's oldest record, milliseconds since the Unix epoch."""
    return min(_times_ms(batch), default=None)


def sequence_since(view: Manifest | LogView, since_ms: int) -> int:
    """As :func:`first_since`, in all of a queue; of a log without reading all of it."""
    if isinstance(view, LogView):
        return view.since(since_ms)
    return first_since([*map(BatchDescriptor.of, view.entries())], since_ms, view.next_sequence)


def first_since(queued: Sequence[BatchDescriptor], since_ms: int, end: int) -> int:
    """The first batch with a record ingested at that time or later; the end if none has.

    Warns where the time is before all that is queued, and earlier batches have left the queue.
    """
    oldest = oldest_ms(queued[0]) if queued and queued[0].sequence > 0 else None
    if oldest is not None and oldest > since_ms:
        log.warning(
            "startingTimestamp is %s, and the oldest batch that is still queued, %d at %r, begins "
            "at %s: what came between and was acknowledged has left the queue, and is not read",
            _utc(since_ms),
            queued[0].sequence,
            queued[0].location,
            _utc(oldest),
        )
    for each in queued:
        times = _times_ms(each)
        # A batch whose time is unknown is rather read once too often than never.
        if not times or max(times) >= since_ms:
            return each.sequence
    return end


def _utc(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"  # no year that datetime has: times of other writers may be anything


def _times_ms(batch: BatchDescriptor) -> list[int]:
    """When the records were ingested, of each range of them; empty if that is unknown.

    A batch without ranges is as old as the ULID in its name. The name is asked last: a Spark sink
    names its batches ahead of time.
    """
    times = [each.ingestion_time_ms for each in batch.metadata]
    if not times and (named_ms := location_timestamp_ms(batch.location)) is not None:
        times.append(named_ms)
    return times


def _check_exists(options: SourceOptions, store: Store, runtime: Runtime) -> None:
    """Refuse a path that no queue was ever made at; a manifest that was lost is not this."""
    if read_only(options, store, runtime).find() is not None:
        return
    claim = check_owner(store, options.consumer, runtime=runtime)
    if claim is None or claim.watermark is None:
        advice = "For a query that starts before its first producer"
        raise _no_queue(options, store, f". {advice}, set the option createIfMissing to true")


def _claimed(options: SourceOptions, store: Store, runtime: Runtime) -> QueueClaim | None:
    """The queue's claim. With ``acknowledge`` it is made where there is none."""
    config = options.consumer
    if options.acknowledge:
        return claim_for_writing(store, config, runtime=runtime)
    claim = check_owner(store, config, runtime=runtime)
    if claim is not None and options.fail_on_data_loss:
        claim.check(read_only(options, store, runtime).find())
    return claim


def _sequence(descriptor: BatchDescriptor) -> int:
    return descriptor.sequence
