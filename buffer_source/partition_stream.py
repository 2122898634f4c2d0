"""One queue of a source: the position of the query, and what a micro-batch reads behind it.

Which entries behind a position are delivered, and which may leave the queue, is the rule
:class:`~opendata_buffer.consumer.isolation.ReadCommitted`. Its state is part of each position. An
:class:`IsolationFilter` restores it at a position and applies it to the entries that follow.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from buffer_source.options import PROGRAM, SourceOptions
from buffer_source.partitions import (
    PartitionOffset,
    check_exists,
    check_start,
    claimed,
    oldest_ms,
    read_only,
    wanted_start,
)
from buffer_source.planner import BatchSizes, PartitionBatch
from opendata_buffer import errors
from opendata_buffer.assembly import open_pause
from opendata_buffer.consumer.entries import EntryConsumer
from opendata_buffer.consumer.isolation import READ_COMMITTED, ReadCommitted, is_acknowledgement
from opendata_buffer.consumer.opening import open_queue
from opendata_buffer.consumer.position import Position
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.queue.hints import topic_hint
from opendata_buffer.queue.log import LogView
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_queue import ReaderQueue
from opendata_buffer.queue.stored_manifest import ends_before
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

EVERYTHING = 1 << 64  # a sequence beyond the end of any queue
MOST_ENTRIES = 100_000  # of a micro-batch without a limit; a log may have millions of them
READ_AHEAD = 10_000  # entries polled for one trigger when only bytes or records limit it


class QueueCursor:
    """An opened queue, and those of its entries that were read and not acknowledged.

    Making it is to become the queue's consumer behind ``start``; or, without acknowledging, to read
    there. ``start`` is in the commit log: what was read before it may leave the queue, up to the
    sequence ``stable_end`` (0 without a start). ``queue_id`` is the queue that the checkpoint is
    about, or empty.

    InvalidInput where there is no queue, and none is to be created; QueueReset for a manifest that
    is gone or went backwards. Unless a loss is allowed, QueueReset for another queue than the
    checkpoint's, and DataLoss for one that begins behind ``start``.
    """

    def __init__(
        self,
        options: SourceOptions,
        store: Store,
        runtime: Runtime,
        retrying: Retries,
        start: PartitionOffset | None,
        stable_end: int,
        queue_id: str,
    ) -> None:
        if queue_id or not options.create_if_missing:
            check_exists(options, store, runtime)
        self._options = options
        self._store = store
        self._runtime = runtime
        self._claim = retrying(claimed, options, store, runtime)
        self._manifest_path = options.consumer.manifest_path
        self.queue_id = "" if self._claim is None else self._claim.queue_id
        self._reader: EntryConsumer | ReadOnlyReader
        self._queue: Queue | ReaderQueue | None = None  # None where the query does not acknowledge.
        self._pending: list[BatchDescriptor] = []
        self._rebased: tuple[PartitionOffset, int] | None = None
        self._beyond: PartitionOffset | None = None  # A position that this new queue never reached.
        try:
            # Before anything is claimed or dropped (failure F4).
            self._check_identity(queue_id)
            known = stable_end > 0 or (start is not None and options.reader)
            retrying(self._read_behind, stable_end - 1 if known else None)
            if start is not None:
                self._check_holds(start, stable_end)
        except errors.QueueReset as error:
            options.report_data_loss(error)
            retrying(self._read_behind, None)
            if start is not None:
                self._rebase(start)

    @property
    def newly_registered(self) -> bool:
        """Whether the log did not have the query's reader before this run."""
        return isinstance(self._queue, ReaderQueue) and self._queue.newly_registered

    @property
    def read_end(self) -> int:
        """First sequence whose entry was not read yet."""
        return _behind(self._reader.last_handed_out_sequence)

    @property
    def acknowledged(self) -> int:
        """First sequence that is not acknowledged."""
        return _behind(self._reader.last_acked_sequence)

    @property
    def end(self) -> int:
        """The queue's next sequence, by the manifest that was read last."""
        return self._reader.next_sequence

    @property
    def is_log(self) -> bool:
        """Whether the queue keeps what is read, for other readers."""
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
        """Where a new query begins, if its run ends at ``run_end``; as :func:`.wanted_start`."""
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
        """Read from ``begin`` on. The position of a log's reader moves there, back or forward."""
        first = self.next_available(0)
        if self.is_log and not first <= begin <= self.read_end:
            self._reader.close()
            self._pending = []
            self._read_behind(begin - 1)

    def read_until(self, stop: int) -> None:
        """Read the entries below ``stop`` that were not read yet, as far as the queue has them."""
        if self.read_end < stop:
            wanted = min(stop - self.read_end, EVERYTHING)
            try:
                entries = self._reader.next_entries(wanted)
            except errors.Drained:
                self._read_closed_queue()
                entries = self._reader.next_entries(wanted)
            self._pending.extend(entries)

    def pending(self, begin: int, stop: int = EVERYTHING) -> list[BatchDescriptor]:
        """Entries in [begin, stop) that were read and not acknowledged."""
        first = bisect_left(self._pending, begin, key=attrgetter("sequence"))
        return self._pending[first : bisect_left(self._pending, stop, key=attrgetter("sequence"))]

    def next_available(self, begin: int) -> int:
        """The first sequence from ``begin`` on that may be queued; a later one behind a loss."""
        pending = self.pending(begin)
        return pending[0].sequence if pending else max(begin, self.read_end)

    def entries(self, begin: int, stop: int) -> list[BatchDescriptor]:
        """Exactly the entries [begin, stop); DataLoss or QueueReset unless a loss is allowed."""
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
                    errors.QueueReset(f"{message}. The queue was replaced or went backwards.")
                )
            else:
                oldest = found[0].sequence if found else stop
                self._report_loss(begin, oldest, f"So {message}.")
        return found

    def acknowledge(self, end: PartitionOffset, stable_end: int) -> bool:
        """Let everything below ``stable_end`` leave the queue; whether anything did.

        ``end`` is in the commit log, and a query that continues there may still ask for
        ``stable_end``. A position of a queue that was replaced does nothing. A store that does not
        answer is no failure: the next acknowledgement makes up for it.
        """
        if not self.owns(end) or not self.acknowledged < stable_end <= self.read_end:
            return False
        if end == self._beyond:
            # With asynchronous progress tracking it is committed when reading has continued, and
            # the new queue may have grown to it, by batches that are not yet on record.
            return False
        try:
            self._reader.ack_through(stable_end - 1)
        except (errors.TransientStorageError, errors.Conflict) as error:
            log.warning("acknowledging through %d is put off: %s", stable_end - 1, error)
            return False
        except errors.Drained:
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
        self._queue = queue = open_queue(
            self._store,
            self._options.consumer,
            self._runtime,
            self._claim,
            program=PROGRAM,
            open_pause=open_pause,
            resettable=False,  # A query takes its position from the checkpoint.
        )
        try:
            self._reader = EntryConsumer(
                self._options.consumer,
                # Also -1: a reader that was further on goes back to sequence 0.
                None if last_acked is None else Position("", last_acked),
                store=self._store,
                runtime=self._runtime,
                allow_data_loss=not self._options.fail_on_data_loss,
                queue=queue,
                program=PROGRAM,
            )
        except errors.Drained:
            # A queue is closed when it leaves its topic, and it was empty then: there is
            # nothing to consume. Reading beside it shows whether all of it was read.
            self._read_beside(last_acked)

    def _read_beside(self, last: int | None) -> None:
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
            raise errors.QueueReset(
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
                raise errors.QueueReset(ends_before(last, self.end, self._manifest_path, url))
        except errors.OpenDataBufferError:
            self.close()
            raise

    def _report_loss(self, needed: int, oldest: int, cause: str) -> None:
        self._options.report_data_loss(errors.DataLoss(self._manifest_path, needed, oldest, cause))

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


def _behind(last: int | None) -> int:
    return 0 if last is None else last + 1


def rule_behind(start: PartitionOffset | None, options: SourceOptions) -> ReadCommitted:
    """The rule in the state it had at a position.

    InvalidInput if transactions were open there, and the query does not hold any back now.
    """
    prefix, isolation = options.queue.data_path_prefix, options.isolation
    if start is None or not start.transactions:
        return ReadCommitted(prefix, isolation)
    rule = ReadCommitted.from_dict(start.transactions, prefix, isolation)
    if isolation != READ_COMMITTED and rule.stable_end(start.next) < start.next:
        hint = topic_hint(options.queue.store, options.queue)
        raise errors.InvalidInput(
            f"option isolationLevel is {isolation!r}, and the checkpoint holds back transactions "
            f"that were undecided at sequence {rule.stable_end(start.next)} of {prefix!r}: their "
            "batches would never be read. Go on with read_committed until they are decided "
            f"('opendata-buffer status {hint}'), or give the query a new "
            "checkpointLocation"
        )
    return rule


def stable_end_of(position: PartitionOffset, options: SourceOptions) -> int:
    """The first sequence that a query which continues at the position may still ask for."""
    return rule_behind(position, options).stable_end(position.next)


class IsolationFilter:
    """Applies the rule to the entries behind ``start``, in order of sequence.

    ``entries`` gives those of a range of sequences that are still in the queue; ``repeats`` are
    left out because their writer had repeated an append or a transaction.
    """

    def __init__(
        self,
        start: PartitionOffset | None,
        options: SourceOptions,
        entries: Callable[[int, int], Sequence[BatchDescriptor]],
    ) -> None:
        self.rule = rule_behind(start, options)
        self.delivered: list[BatchDescriptor] = []
        self.repeats: list[BatchDescriptor] = []
        self._prefix = options.queue.data_path_prefix
        self._entries = entries
        self._expected = None if start is None else start.next
        self._missing = set[int]() if start is None else set(start.missing)

    def step(self, batch: BatchDescriptor, *, missing: bool = False) -> None:
        """Apply the rule to the next entry; ``missing`` passes it by, as its object is gone."""
        if self._expected is not None and batch.sequence > self._expected:
            self.rule.lost(batch.sequence - 1)
        self._expected = batch.sequence + 1
        if batch.repeats is not None:
            self.repeats.append(batch)
            return
        if missing:
            self._missing.add(batch.sequence)
            self.rule.skip(batch.sequence, batch.location)
            return
        delivered = self.rule.offer(batch.sequence, batch.location, self._held_back)
        if delivered == [batch.sequence]:
            self.delivered.append(batch)
            return
        for sequence in delivered:
            self.delivered += self._entries(sequence, sequence + 1)
        if not delivered:
            named = parse_location(batch.location, self._prefix)
            if named is not None and named.message is None:
                self.repeats.append(batch)

    def _held_back(self, begin: int, end: int) -> list[tuple[int, str]]:
        # Without missing entries: of a message and its repeat the rule takes the first it sees.
        return [
            (each.sequence, each.location)
            for each in self._entries(begin, end)
            if each.sequence not in self._missing
        ]


@dataclass(frozen=True, slots=True)
class PollResult:
    """The waiting entries of one partition behind the position ``start``, in a row from ``begin``.

    ``fixed`` is where the next micro-batch ends, whatever waits; None where it depends on that.
    """

    start: PartitionOffset | None
    begin: int
    base: int
    waiting: list[BatchDescriptor] = field(default_factory=list)
    fixed: PartitionOffset | None = None


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The batches that one micro-batch reads of one partition."""

    batches: list[PartitionBatch]  # In the order they are read.
    sizes: list[int]  # Stored bytes of each, estimated.
    total: int | None  # Stored bytes of all together, where each is known.
    missing: int  # How many are passed by because their objects are gone.
    repeats: list[BatchDescriptor]  # Left out: their writer had repeated them.


class PartitionStream:
    """Positions, limits and plans of one queue, for one run of one query. Not thread-safe.

    Every answer is a function of the positions that Spark hands over and of the manifest. Nothing
    is claimed before the first position is handed over.
    """

    def __init__(
        self, name: str, options: SourceOptions, store: Store, runtime: Runtime, retrying: Retries
    ) -> None:
        self.name = name
        self.sizes = BatchSizes(store, options, runtime, retrying)
        self._options = options
        self._store = store
        self._runtime = runtime
        self._retrying = retrying
        self._cursor: QueueCursor | None = None
        self._starting_offset: int | None = None  # Once it is resolved.
        self._run_end = EVERYTHING  # With AvailableNow: the first sequence of a later run.
        self._next = 0  # Where the last answer ends.
        self._is_fresh = False  # Whether the last poll has read the manifest.
        self.removed = 0
        """Batches that had left the queue before this query began with its oldest one."""
        self.acknowledged: PartitionOffset | None = None
        """The last one for which :meth:`acknowledge` has nothing more to do."""

    def freeze_end(self) -> None:
        """Let this run end at what is queued now."""
        manifest = read_only(self._options, self._store, self._runtime).find()  # Retries by itself.
        self._run_end = 0 if manifest is None else manifest.next_sequence

    def check_start(self) -> None:
        """Refuse a new query that would remove unread batches; claims nothing yet."""
        if self._cursor is None:
            self._retrying(check_start, self._options, self._store, self._runtime)

    def acknowledge(self, end: PartitionOffset) -> None:
        """What was read below ``end`` is safe with Spark: let it leave the queue.

        An undecided batch stays, and all behind it.
        """
        cursor, stable_end = self._opened(end, end.queue), stable_end_of(end, self._options)
        if cursor.acknowledge(end, stable_end):
            self.sizes.forget_before(stable_end)
        if cursor.acknowledged >= stable_end or not cursor.owns(end):
            self.acknowledged = end

    def poll(
        self, start: PartitionOffset | None, most: int = EVERYTHING, *, earliest: bool = False
    ) -> PollResult:
        """What waits behind ``start``; reads the manifest once, if it needs more than it knows.

        One trigger may read ``most`` entries. With ``earliest`` a partition without a start begins
        with its oldest entry and not at ``startingOffsets``: it is new to a query that has begun.
        """
        cursor = self._opened(start, "" if start is None else start.queue)
        self._is_fresh = False
        if start is not None:
            begin, base = cursor.continue_behind(start)
        else:
            if self._starting_offset is None:
                self._starting_offset = (
                    cursor.read_end if earliest else cursor.starting_offset(self._run_end)
                )
                if self._options.starts_at_oldest and not earliest and not cursor.is_log:
                    self.removed = self._starting_offset
            begin = base = self._starting_offset
            self._retrying(cursor.seek, begin)
        if start is not None and (begin != start.next or not cursor.owns(start)):
            # First a micro-batch without rows. One with rows might end beyond `start`, and a replay
            # would take it for one that begins there. Writers count per queue: another queue's
            # numbers say nothing here.
            passed = start.transactions if cursor.owns(start) else {}
            return PollResult(
                start, begin, base, fixed=PartitionOffset(begin, base, passed, cursor.queue_id)
            )
        waiting = self._waiting(cursor, begin, most)
        if waiting and waiting[0].sequence > begin:
            begin = base = waiting[0].sequence  # A loss the consumer was allowed to pass by.
        self._next = begin
        return PollResult(start, begin, base, waiting)

    def plan(self, start: PartitionOffset | None, end: PartitionOffset) -> PartitionPlan:
        """What the micro-batch from ``start`` to ``end`` reads; in any run the same."""
        begin = end.begin_of(start)
        # The first call of a run is a replay after a crash. What is before `start` is in the commit
        # log of the batch before; what is before another base was never read, nor ours to drop.
        same = start is not None and begin == start.next and start.queue == end.queue
        cursor = self._opened(start if same else None, end.queue)
        if not same:
            self._retrying(cursor.seek, begin)
        isolated = IsolationFilter(start, self._options, cursor.pending)
        missing = frozenset(end.missing)
        for batch in (found := cursor.entries(begin, end.next)):
            isolated.step(batch, missing=batch.sequence in missing)
        # What was lost may be what decides the others.
        if len(found) == end.next - begin > 0 and (
            isolated.rule.stable_end(end.next) < stable_end_of(end, self._options)
        ):
            # A batch would be held back that the position behind it does not name: it is lost.
            raise errors.InvalidInput(
                f"option isolationLevel is {self._options.isolation!r}, and the micro-batch that "
                f"is repeated was planned with read_uncommitted, up to sequence {end.next - 1} of "
                f"{self._options.queue.data_path_prefix!r}: its undecided batches would never be "
                "read. Start the query with read_uncommitted until that micro-batch is done, then "
                "change it"
            )
        return PartitionPlan(
            [PartitionBatch.within(self.name, each) for each in isolated.delivered],
            self.sizes.estimates(isolated.delivered),
            self.sizes.total(isolated.delivered),
            sum(1 for sequence in missing if sequence >= begin),
            isolated.repeats,
        )

    @property
    def opened(self) -> bool:
        """Whether a position was handed over yet."""
        return self._cursor is not None

    @property
    def queue_end(self) -> int:
        """The queue's next sequence, by the manifest that was read last."""
        return max(self._next, 0 if self._cursor is None else self._cursor.end)

    @property
    def empty(self) -> bool:
        """Whether all entries of the manifest that was read last are acknowledged."""
        return self._cursor is not None and self._cursor.end == self._cursor.acknowledged

    @property
    def newly_registered(self) -> bool:
        """Whether the log did not have the query's reader before this run."""
        return self._cursor is not None and self._cursor.newly_registered

    @property
    def backlog(self) -> int:
        """Batches behind the last answer, by the manifest that was read last."""
        return self.queue_end - self._next

    @property
    def lag_ms(self) -> int:
        """Age of the oldest record behind the last answer, milliseconds; 0 where none waits."""
        behind = [] if self._cursor is None else self._cursor.pending(self._next)
        ingested_ms = oldest_ms(behind[0]) if behind else None
        return 0 if ingested_ms is None else max(0, self._runtime.now_ms() - ingested_ms)

    def close(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            cursor.close()

    def _opened(self, start: PartitionOffset | None, queue_id: str) -> QueueCursor:
        """The queue's cursor, opened behind ``start`` by the first call of a run."""
        if self._cursor is None:
            stable_end = 0 if start is None else stable_end_of(start, self._options)
            options, store, runtime = self._options, self._store, self._runtime
            self._cursor = QueueCursor(
                options, store, runtime, self._retrying, start, stable_end, queue_id
            )
        return self._cursor

    def end_offset(self, poll: PollResult, count: int) -> PartitionOffset:
        """The position behind the first ``count`` batches that wait; the start itself for none."""
        end = self._end_offset(poll, count)
        self._next = end.next
        return end

    def _end_offset(self, poll: PollResult, count: int) -> PartitionOffset:
        if poll.fixed is not None:
            return poll.fixed
        cursor = self._cursor
        assert cursor is not None
        isolated = IsolationFilter(poll.start, self._options, cursor.pending)
        first_stable_end = isolated.rule.stable_end(poll.begin)
        next_sequence, missing = poll.begin, list[int]()
        for number, batch, is_missing in self._taken(cursor, poll, count):
            isolated.step(batch, missing=is_missing)
            next_sequence = batch.sequence + 1
            if is_missing:
                missing.append(batch.sequence)
            if number >= count and (
                isolated.delivered
                or missing
                or isolated.rule.stable_end(next_sequence) > first_stable_end
            ):
                break
        else:
            if not (count and cursor.pending(next_sequence, self._run_end)):
                # Nothing but undecided batches: a micro-batch of them would have no row, and let
                # nothing leave the queue. They are read again when more has come.
                if poll.start is not None:
                    return poll.start
                next_sequence = poll.begin
                isolated = IsolationFilter(None, self._options, cursor.pending)
        # Apps are forgotten here and not in plan(), which must give the same answer for the same
        # offsets whenever it is asked.
        isolated.rule.prune(self._runtime.now_ms())
        state, stable_end = isolated.rule.to_dict(), isolated.rule.stable_end(next_sequence)
        # An open transaction is read again from its first batch, so what is missing from there on
        # stays known.
        before = () if poll.start is None else poll.start.missing
        known = (*(each for each in before if each >= stable_end), *missing)
        return PartitionOffset(next_sequence, poll.base, state, cursor.queue_id, known)

    def _taken(
        self, cursor: QueueCursor, poll: PollResult, count: int
    ) -> Iterator[tuple[int, BatchDescriptor, bool]]:
        """The batches that a trigger takes, numbered from 1, and whether their objects are gone.

        Behind the ``count`` that limits allow come all others, to read a larger transaction whole.
        """
        if count == 0:
            return
        taken, number = poll.waiting[:count], 0
        while taken:
            missing = self._missing(taken)
            for number, batch in enumerate(taken, number + 1):  # noqa: B020
                yield number, batch, batch.sequence in missing
            behind = taken[-1].sequence + 1
            stop = min(self._run_end, behind + READ_AHEAD)
            if not self._is_fresh or cursor.read_end < cursor.end:
                cursor.read_until(stop)
                self._is_fresh = True
            taken = _contiguous(cursor.pending(behind, stop), behind)

    def _waiting(self, cursor: QueueCursor, begin: int, most: int) -> list[BatchDescriptor]:
        """Entries in a row from ``begin`` on that this trigger may read."""
        stop = min(self._run_end, cursor.next_available(begin) + most)
        if cursor.read_end < stop:
            # One more than is wanted: its age is the lag the progress shows.
            cursor.read_until(stop + 1)
            self._is_fresh = True
        # Counted anew: a loss that was passed by may be larger than all that a trigger reads.
        stop = min(self._run_end, cursor.next_available(begin) + most)
        waiting = cursor.pending(begin, stop)
        # A loss that was allowed, in the middle: a micro-batch ends at it.
        return _contiguous(waiting, waiting[0].sequence) if waiting else []

    def _missing(self, batches: Sequence[BatchDescriptor]) -> frozenset[int]:
        """Sequences of batches that are passed by because their objects are gone.

        The store is asked only where a loss is allowed, and only about batches whose writer repeats
        one that it finds to be gone: the rule delivers the repeat only when it knows of the loss.
        Tasks find other missing batches.
        """
        if self._options.fail_on_data_loss:
            return frozenset()
        missing = self.sizes.missing([each for each in batches if self._writer_will_retry(each)])
        for each in missing:
            log.warning(
                "data loss allowed: batch %d at %r is passed by, its object does not exist",
                each.sequence,
                each.location,
            )
        return frozenset(each.sequence for each in missing)

    def _writer_will_retry(self, batch: BatchDescriptor) -> bool:
        """Whether the batch's writer repeats it when it finds that its object is gone."""
        prefix = self._options.queue.data_path_prefix
        named = parse_location(batch.location, prefix)
        if named is None or is_acknowledgement(batch.location, prefix):
            return False
        return named.txn is not None or named.message is not None


def _contiguous(batches: Sequence[BatchDescriptor], begin: int) -> list[BatchDescriptor]:
    """The batches from the front on that follow each other, if the first is ``begin``."""
    end = len(batches)
    if batches and batches[-1].sequence - begin >= end:
        end = next(index for index in range(end) if batches[index].sequence != begin + index)
    return list(batches[:end])
