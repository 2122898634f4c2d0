"""One queue of a source: where reading is, what waits behind it, what a micro-batch takes of it.

A :class:`PartitionStream` answers for its queue what :class:`~buffer_source.stream.StreamDriver`
answers for all: every answer is a function of the positions handed over and of the manifest;
what is kept between calls only saves requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from buffer_source.batches import PartitionBatch
from buffer_source.cursor import EVERYTHING, Cursor
from buffer_source.isolation import IsolationFilter, check_remembered, floor_of, vouched_for
from buffer_source.measures import Measures
from buffer_source.offsets import Position
from buffer_source.options import SourceOptions
from buffer_source.planner import Limits
from buffer_source.times import oldest_ms
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.errors import StorageError, TransientStorageError
from opendata_buffer.late import late_imports
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["READ_AHEAD", "PollResult", "Part", "PartitionStream"]

log = logging.getLogger(__name__)

READ_AHEAD = 10_000
"""Entries looked at for one trigger when only bytes or records limit it."""

Patient = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PollResult:
    """What waits in one partition behind a position.

    Attributes:
        start: The position; None where none was read yet.
        begin: First sequence that the next micro-batch may read.
        base: Where reading began, as it goes into the next position.
        waiting: Entries in a row from ``begin`` on.
        fixed: Where the next micro-batch ends, whatever waits; None when that depends.
    """

    start: Position | None
    begin: int
    base: int
    waiting: list[BatchDescriptor] = field(default_factory=list)
    fixed: Position | None = None

    def moves_to(self, end: Position) -> bool:
        """Whether a micro-batch that ends there takes anything from this partition."""
        return self.fixed is not None or end.next > self.begin


@dataclass(frozen=True, slots=True)
class Part:
    """What one micro-batch reads of one partition.

    Attributes:
        batches: In the order they are read.
        sizes: Stored bytes of each, estimated.
        total: Of all together, where each is known.
        missing: How many are passed by because they are gone.
        repeats: Left out, because their writer had repeated a transaction.
    """

    batches: list[PartitionBatch]
    sizes: list[int]
    total: int | None
    missing: int
    repeats: list[BatchDescriptor]


class PartitionStream:
    """Positions, limits and plans of one queue, for one run of one query.

    Nothing is claimed before the first position is handed over. Not thread-safe: calls of one
    partition follow each other, those of several may be made at once.

    Args:
        name: The partition's name in offsets and in the column ``partition``.
        options: What the query asked for, with this partition's queue.
        store: The opened store.
        runtime: Clock and sleep.
        patient: Repeats what fails for a time.
    """

    def __init__(
        self,
        name: str,
        options: SourceOptions,
        store: Store,
        runtime: Runtime,
        patient: Patient,
    ) -> None:
        self.name = name
        self.quarantined = 0
        """Batches in the queue's quarantine when it was last looked at."""
        self.measures = Measures(
            store,
            options.queue.data_path_prefix,
            runtime=runtime,
            concurrency=options.fetch_concurrency,
            allow_foreign=options.allow_foreign_locations,
        )
        self._options = options
        self._store = store
        self._runtime = runtime
        self._patient = patient
        self._cursor: Cursor | None = None
        self._may_count = True
        self._base: int | None = None  # What startingOffsets meant, once it is resolved.
        self._target: int | None = None  # Where a run with AvailableNow ends.
        self._next = 0  # Where the last answer ends.
        self._looked = False  # Whether the last look was one at the manifest.
        self._acknowledged: Position | None = None  # The last one that is done with.

    def freeze(self) -> None:
        """Let this run end at what is queued now."""
        queue = Queue(self._store, self._options.consumer, runtime=self._runtime, role="reader")
        manifest = queue.read()  # Retries by itself.
        self._target = 0 if manifest is None else manifest.next_sequence

    def acknowledge(self, end: Position) -> None:
        """What was read below ``end`` is safe with Spark: let it leave the queue.

        Cumulative and repeatable. What is undecided there stays, and all behind it.

        Raises:
            Fenced: Another consumer took the queue.
        """
        if end == self._acknowledged:
            return
        cursor, floor = self._opened(end, end.queue), floor_of(end, self._options)
        if cursor.acknowledge(end, floor):
            self.measures.forget_before(floor)
        if cursor.acknowledged >= floor or not cursor.owns(end):
            self._acknowledged = end

    def has_acknowledged(self, end: Position) -> bool:
        """Whether :meth:`acknowledge` has nothing more to do."""
        return end == self._acknowledged

    def look(
        self,
        start: Position | None,
        limits: Limits,
        *,
        read_ahead: int = READ_AHEAD,
        earliest: bool = False,
    ) -> PollResult:
        """What waits behind ``start``; one look at the manifest, if more is wanted than is known.

        Args:
            start: Where the last micro-batch ended; None where none was read yet.
            limits: What one trigger may read.
            read_ahead: Entries looked at when only bytes or records limit it.
            earliest: Begin with the oldest, whatever ``startingOffsets`` says: the partition is
                new to a query that has begun.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: ``start`` is not a position of this queue any more.
        """
        cursor = self._opened(start, "" if start is None else start.queue)
        self._looked = False
        if start is not None:
            begin, base = cursor.resume(start)
        else:
            if self._base is None:
                self._base = cursor.handed_out if earliest else cursor.first(self._target)
            begin = base = self._base
        if start is not None and (begin != start.next or not cursor.owns(start)):
            # First a micro-batch without rows. One with rows might end beyond `start`, and a replay
            # would take it for one that begins there. Writers count per queue: another queue's
            # numbers say nothing here.
            passed = start.transactions if cursor.owns(start) else {}
            return PollResult(
                start, begin, base, fixed=Position(begin, base, passed, cursor.queue_id)
            )
        waiting = self._wait_for(cursor, begin, limits, read_ahead)
        if waiting and waiting[0].sequence > begin:
            begin = base = waiting[0].sequence  # A loss the consumer was allowed to pass by.
        self._next = begin
        return PollResult(start, begin, base, waiting)

    def end_of(self, look: PollResult, count: int) -> Position:
        """The position behind the first ``count`` batches that wait; the start itself for none."""
        end = self._end_of(look, count)
        self._next = end.next
        return end

    def plan(self, start: Position | None, end: Position) -> Part:
        """What the micro-batch from ``start`` to ``end`` reads.

        The same batches in the same order for equal arguments, in any run. Repeats of a
        transaction that was read already are left out.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: The queue does not have these entries any more.
            InvalidInput: It was planned with another isolation.
        """
        begin = end.begin_of(start)
        # The first call of a run is a replay after a crash. What is before `start` is in the commit
        # log of the batch before; what is before another base was never read, nor ours to drop.
        same = start is not None and begin == start.next and start.queue == end.queue
        cursor = self._opened(start if same else None, end.queue)
        walk, gone = self._walk(start), frozenset(end.missing)
        for batch in (found := cursor.between(begin, end.next)):
            walk.step(batch, gone=batch.sequence in gone)
        if len(found) == end.next - begin > 0:  # What was lost may be what decides the others.
            check_remembered(walk.rule, end, self._options)
        asked = self._options.parallelism_asked
        sizes: list[int] = self._patient(self.measures.estimates, walk.delivered, asked)
        return Part(
            [PartitionBatch.within(self.name, each) for each in walk.delivered],
            sizes,
            self.measures.total(walk.delivered),
            sum(1 for sequence in gone if sequence >= begin),
            walk.repeats,
        )

    @property
    def opened(self) -> bool:
        """Whether a position was handed over yet."""
        return self._cursor is not None

    @property
    def ahead(self) -> int:
        """The queue's next sequence, as of the last look at it."""
        return max(self._next, 0 if self._cursor is None else self._cursor.end)

    @property
    def empty(self) -> bool:
        """Whether all that was seen of the queue is acknowledged."""
        return self._cursor is not None and self._cursor.empty

    @property
    def backlog(self) -> int:
        """Batches behind the last answer, as of the last look at the queue."""
        return self.ahead - self._next

    @property
    def lag_ms(self) -> int:
        """Age of the oldest record behind the last answer, milliseconds; 0 where none waits."""
        behind = [] if self._cursor is None else self._cursor.waiting(self._next)
        taken_in_ms = oldest_ms(behind[0]) if behind else None
        return 0 if taken_in_ms is None else max(0, self._runtime.now_ms() - taken_in_ms)

    def count_quarantine(self) -> bool:
        """Look how many batches are in quarantine; whether that need not be asked again soon."""
        if not self._may_count:
            return True
        with late_imports():  # or each query's start would wait for what few need
            from opendata_buffer.quarantine import count_quarantine

        try:
            self.quarantined = count_quarantine(self._store, self._options.queue.data_path_prefix)
        except StorageError as error:
            log.warning("the quarantine was not counted: %s", error)
            # Without the right to list nobody can count. The number is for people, so the query
            # goes on, and does not ask and warn at each trigger.
            self._may_count = isinstance(error, TransientStorageError)
            return not self._may_count
        return True

    def close(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            cursor.close()

    def _opened(self, start: Position | None, queue_id: str) -> Cursor:
        """The queue's cursor, opened behind ``start`` by the first call of a run."""
        if self._cursor is None:
            self._cursor = Cursor.open(
                self._options, self._store, self._runtime, self._patient, start, queue_id
            )
        return self._cursor

    def _end_of(self, look: PollResult, count: int) -> Position:
        if look.fixed is not None:
            return look.fixed
        cursor = self._cursor
        assert cursor is not None
        walk = self._walk(look.start)
        at_first = walk.rule.stable_end(look.begin)
        next_sequence, missing = look.begin, list[int]()
        for number, batch, gone in self._taken(cursor, look, count):
            walk.step(batch, gone=gone)
            next_sequence = batch.sequence + 1
            if gone:
                missing.append(batch.sequence)
            settled = (
                bool(walk.delivered or missing) or walk.rule.stable_end(next_sequence) > at_first
            )
            if settled and number >= count:
                break
        else:
            gap = count and cursor.waiting(next_sequence, self._last())
            if not gap:
                # Nothing but undecided batches: a micro-batch of them would have no row, and let
                # nothing leave the queue. They are looked at again when more has come.
                if look.start is not None:
                    return look.start
                next_sequence, walk = look.begin, self._walk(None)
        # Apps are forgotten here and not in plan(), which must give the same answer for the same
        # offsets whenever it is asked.
        walk.rule.prune(self._runtime.now_ms())
        state, floor = walk.rule.to_dict(), walk.rule.stable_end(next_sequence)
        # What an open transaction will be read again from is known to be gone there, too.
        before = () if look.start is None else look.start.missing
        known = (*(each for each in before if each >= floor), *missing)
        return Position(next_sequence, look.base, state, cursor.queue_id, known)

    def _taken(
        self, cursor: Cursor, look: PollResult, count: int
    ) -> Iterator[tuple[int, BatchDescriptor, bool]]:
        """The batches that a trigger takes, numbered from 1, and whether their objects are gone.

        Behind the ``count`` that limits allow come all others: a transaction larger than the
        limits is read whole, and its batches count when it is decided.
        """
        if count == 0:
            return
        taken, number = look.waiting[:count], 0
        while taken:
            gone = self._missing(taken)
            for number, batch in enumerate(taken, number + 1):  # noqa: B020
                yield number, batch, batch.sequence in gone
            behind = taken[-1].sequence + 1
            stop = min(self._last(), behind + READ_AHEAD)
            if not self._looked or cursor.handed_out < cursor.end:
                cursor.hand_out(stop)
                self._looked = True
            taken = _in_a_row(cursor.waiting(behind, stop), behind)

    def _wait_for(
        self, cursor: Cursor, begin: int, limits: Limits, read_ahead: int
    ) -> list[BatchDescriptor]:
        """Entries in a row from ``begin`` on that this trigger may read."""
        stop = self._stop(cursor.behind_gap(begin), limits, read_ahead)
        if cursor.handed_out < stop:
            # One more than is wanted: its age is the lag the progress shows.
            cursor.hand_out(stop + 1)
            self._looked = True
        # Counted anew: a gap that was passed by may be wider than all that a trigger reads.
        waiting = cursor.waiting(begin, self._stop(cursor.behind_gap(begin), limits, read_ahead))
        # A loss that was allowed, in the middle: a micro-batch ends at it.
        return _in_a_row(waiting, waiting[0].sequence) if waiting else []

    def _stop(self, begin: int, limits: Limits, read_ahead: int) -> int:
        """Where a trigger that reads from ``begin`` on ends at the latest."""
        stop = self._last()
        if limits.batches is not None:
            return min(stop, begin + limits.batches)
        if limits.bytes is not None or limits.records is not None:
            return min(stop, begin + read_ahead)
        return stop

    def _last(self) -> int:
        """Where this run ends at the latest."""
        return EVERYTHING if self._target is None else self._target

    def _walk(self, start: Position | None) -> IsolationFilter:
        assert self._cursor is not None
        return IsolationFilter(start, self._options, self._cursor.waiting)

    def _missing(self, batches: Sequence[BatchDescriptor]) -> frozenset[int]:
        """Sequences of batches that are passed by because their objects are gone.

        Only looked for where that is allowed, and only among batches whose writer knows that
        one is gone and repeats it: the rule lets the repeat through only when it is told. Of
        other batches the task finds out by itself.
        """
        if self._options.fail_on_data_loss:
            return frozenset()
        prefix = self._options.queue.data_path_prefix
        named = [each for each in batches if vouched_for(each, prefix)]
        missing: list[BatchDescriptor] = self._patient(self.measures.missing, named)
        for each in missing:
            log.warning(
                "data loss allowed: batch %d at %r is passed by, its object does not exist",
                each.sequence,
                each.location,
            )
        return frozenset(each.sequence for each in missing)


def _in_a_row(batches: Sequence[BatchDescriptor], begin: int) -> list[BatchDescriptor]:
    """The batches from the front on that follow each other, if the first is ``begin``."""
    end = len(batches)
    if batches and batches[-1].sequence - begin >= end:
        end = next(index for index in range(end) if batches[index].sequence != begin + index)
    return list(batches[:end])
