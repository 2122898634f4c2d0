"""One queue of a source: the position of the query, and what a micro-batch reads behind it.

Every answer of a :class:`PartitionStream` is a function of the positions that Spark hands over and
of the manifest; what is kept between calls only saves requests.

Which entries behind a position are delivered, and which may leave the queue, is the rule
:class:`~opendata_buffer.consumer.isolation.ReadCommitted`. Its state is part of each position. An
:class:`IsolationFilter` restores it at a position and applies it to the entries that follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from buffer_source.offsets import PartitionOffset
from buffer_source.options import SourceOptions
from buffer_source.planner import BatchSizes, PartitionBatch
from buffer_source.queue_cursor import (
    EVERYTHING,
    QueueCursor,
    check_start,
    oldest_ms,
    read_only,
)
from opendata_buffer.consumer.isolation import READ_COMMITTED, ReadCommitted, is_acknowledgement
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.queue.ownership import topic_hint
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

READ_AHEAD = 10_000
"""Entries polled for one trigger when only bytes or records limit it."""


def rule_behind(start: PartitionOffset | None, options: SourceOptions) -> ReadCommitted:
    """The rule in the state it had at a position.

    Raises:
        InvalidInput: Transactions were open there, and the query does not hold any back now.
    """
    prefix, isolation = options.queue.data_path_prefix, options.isolation
    if start is None or not start.transactions:
        return ReadCommitted(prefix, isolation)
    rule = ReadCommitted.from_dict(start.transactions, prefix, isolation)
    if isolation != READ_COMMITTED and rule.stable_end(start.next) < start.next:
        hint = topic_hint(options.queue.store, options.queue)
        raise InvalidInput(
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

    ``entries`` gives the entries of a range of sequences that are still in the queue.
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
        """Left out because their writer had repeated an append or a transaction."""
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

    def moves_to(self, end: PartitionOffset) -> bool:
        """Whether a micro-batch that ends there takes anything from this partition."""
        return self.fixed is not None or end.next > self.begin


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The batches that one micro-batch reads of one partition."""

    batches: list[PartitionBatch]  # In the order they are read.
    sizes: list[int]  # Stored bytes of each, estimated.
    total: int | None  # Stored bytes of all together, where each is known.
    missing: int  # How many are passed by because their objects are gone.
    repeats: list[BatchDescriptor]  # Left out: their writer had repeated them.


class PartitionStream:
    """Positions, limits and plans of one queue, for one run of one query.

    Nothing is claimed before the first position is handed over. Not thread-safe: calls of one
    partition follow each other, those of several may be made at once.
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
        self._acknowledged: PartitionOffset | None = None  # The last one that was acknowledged.

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

        Cumulative and repeatable. An undecided batch stays, and all behind it.
        """
        cursor, stable_end = self._opened(end, end.queue), stable_end_of(end, self._options)
        if cursor.acknowledge(end, stable_end):
            self.sizes.forget_before(stable_end)
        if cursor.acknowledged >= stable_end or not cursor.owns(end):
            self._acknowledged = end

    def has_acknowledged(self, end: PartitionOffset) -> bool:
        """Whether :meth:`acknowledge` has nothing more to do."""
        return end == self._acknowledged

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

    def end_offset(self, poll: PollResult, count: int) -> PartitionOffset:
        """The position behind the first ``count`` batches that wait; the start itself for none."""
        end = self._end_offset(poll, count)
        self._next = end.next
        return end

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
        if len(found) == end.next - begin > 0:  # What was lost may be what decides the others.
            self._check_isolation(isolated.rule, end)
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
        return self._cursor is not None and self._cursor.empty

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
            self._cursor = QueueCursor.open(
                options, store, runtime, self._retrying, start, stable_end, queue_id
            )
        return self._cursor

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

    def _check_isolation(self, rule: ReadCommitted, end: PartitionOffset) -> None:
        """Refuse to hold back a batch that the position behind it does not name: it is lost."""
        if rule.stable_end(end.next) < stable_end_of(end, self._options):
            raise InvalidInput(
                f"option isolationLevel is {self._options.isolation!r}, and the micro-batch that "
                f"is repeated was planned with read_uncommitted, up to sequence {end.next - 1} of "
                f"{self._options.queue.data_path_prefix!r}: its undecided batches would never be "
                "read. Start the query with read_uncommitted until that micro-batch is done, then "
                "change it"
            )


def _contiguous(batches: Sequence[BatchDescriptor], begin: int) -> list[BatchDescriptor]:
    """The batches from the front on that follow each other, if the first is ``begin``."""
    end = len(batches)
    if batches and batches[-1].sequence - begin >= end:
        end = next(index for index in range(end) if batches[index].sequence != begin + index)
    return list(batches[:end])
