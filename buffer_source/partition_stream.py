"""One queue of a source: the end of a micro-batch, and the batches that it reads.

The problem: Spark may ask the same question twice. After a crash it plans again the micro-batch
from ``start`` to ``end`` that is in its checkpoint, in a new process, while the queue has more
batches and writers have repeated some. Exactly the same batches must then be read again.

The idea: every answer is a function of Spark's positions and of the manifest. A position says how
far the queue was read (``next``), where reading began (``base``), and in which state the rule of
transactions was there. A micro-batch takes these steps::

    poll(start)              entries 7, 8, 9 wait after start (next=7)
    end_offset(poll, 2)      two of them fit: the position with next=9
    plan(start, end)         reads the batches 7 and 8, in this run and in any other

What can go wrong:

* The queue was replaced, or batches were lost, and the query allows that. Then the next micro-batch
  has no rows and only moves the position (``PollResult.fixed``). With rows, the number of its end
  might be greater than ``start``, and a replay would take it for a micro-batch that begins there.
* All waiting entries are undecided. A micro-batch of them would have no rows, and no entry could
  leave the queue, so the end is the start. The entries are read again when more entries have come.
* A batch was missing when the micro-batch was planned, but exists at the replay. So the position
  names the missing batches (``PartitionOffset.missing``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from buffer_source.delivery import IsolationFilter, stable_end_of
from buffer_source.options import SourceOptions
from buffer_source.partitions import PartitionOffset, check_start, oldest_ms, read_only
from buffer_source.planner import BatchSizes, PartitionBatch
from buffer_source.queue_session import EVERYTHING, QueueSession, open_session
from opendata_buffer import errors
from opendata_buffer.consumer.isolation import is_acknowledgement
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.queue.marker import held_batches
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

MOST_ENTRIES = 100_000
"""Most entries of a micro-batch without a limit; a log may have millions of them."""

READ_AHEAD = 10_000
"""Entries polled for one trigger if only bytes or records limit it."""


@dataclass(frozen=True, slots=True)
class PollResult:
    """The entries that wait in one partition, in a row.

    Attributes:
        start: The position that Spark handed over; None for a partition that is new to the query.
        begin: The sequence of the first entry that waits, or the queue's next one.
        base: The ``base`` of the position where the micro-batch ends.
        waiting: The entries.
        fixed: Where the micro-batch ends, whatever waits; None if the end depends on the entries.
        is_full: Whether as many entries wait as one trigger may read.
    """

    start: PartitionOffset | None
    begin: int
    base: int
    waiting: list[BatchDescriptor] = field(default_factory=list)
    fixed: PartitionOffset | None = None
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """The batches that one micro-batch reads of one partition.

    Attributes:
        batches: The batches, in the order in which they are read.
        sizes: Stored bytes of each batch, estimated.
        total: Stored bytes of all batches together; None if a size is not known.
        missing: How many batches are skipped because their objects are gone.
        repeats: Batches left out because their writer had repeated them.
    """

    batches: list[PartitionBatch]
    sizes: list[int]
    total: int | None
    missing: int
    repeats: list[BatchDescriptor]


class PartitionStream:
    """Positions, limits and plans of one queue, for one run of one query. Not thread-safe.

    Nothing is claimed before the first position is handed over.
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
        self._session: QueueSession | None = None
        self._starting_offset: int | None = None  # None until it is resolved.
        self._run_end = EVERYTHING  # With AvailableNow: the first sequence of a later run.
        self._next = 0  # Where the last answer ends.
        self._is_fresh = False  # Whether the last poll has read the manifest.
        self._noted = 0  # How far the position of a log's reader says that the query has read.
        self.removed = 0
        """Batches that had left the queue before this query began with its oldest one."""
        self.acknowledged: PartitionOffset | None = None
        """The last position for which :meth:`acknowledge` has nothing more to do."""

    def freeze_end(self) -> None:
        """Let this run end at the batches that are queued now."""
        manifest = read_only(self._options, self._store, self._runtime).find()  # It retries.
        self._run_end = 0 if manifest is None else manifest.next_sequence

    def check_start(self) -> None:
        """Refuse a new query that would remove unread batches; claims nothing yet."""
        if self._session is None:
            self._retrying(check_start, self._options, self._store, self._runtime)

    def acknowledge(self, end: PartitionOffset) -> None:
        """Let batches before ``end`` leave the queue, since Spark has ``end`` in its commit log.

        An undecided batch stays, and all batches after it.
        """
        session = self._opened(end, end.queue)
        stable_end = stable_end_of(end, self._options)
        if session.acknowledge(end, stable_end):
            self.sizes.forget_before(stable_end)
        if session.acknowledged >= stable_end or not session.owns(end):
            self.acknowledged = end

    def poll(
        self,
        start: PartitionOffset | None,
        most: int = EVERYTHING,
        *,
        earliest: bool = False,
        committed: bool = False,
    ) -> PollResult:
        """Find the entries that wait after ``start``. Read the manifest at most once.

        Args:
            start: The position where the micro-batch starts; None for a partition that is new to
                the query.
            most: Most entries that one trigger may read.
            earliest: Without a start, begin with the oldest entry and not at ``startingOffsets``,
                because the partition is new to a query that has already begun.
            committed: The start is in Spark's commit log, so first let the batches before it leave
                the queue.

        Returns:
            The entries that wait, and the base of the next position.
        """
        if committed and start is not None and start != self.acknowledged:
            self.acknowledge(start)
        session = self._opened(start, "" if start is None else start.queue)
        self._is_fresh = False
        if start is None:
            begin = base = self._first(session, earliest=earliest)
            self._retrying(session.seek, begin)
        else:
            resumed = session.resume(start)
            begin, base = resumed.next, resumed.base
            if begin != start.next or not session.owns(start):
                return PollResult(start, begin, base, fixed=resumed)
        waiting = self._waiting(session, begin, most)
        if waiting and waiting[0].sequence > begin:
            begin = base = waiting[0].sequence  # The consumer skipped a loss that is allowed.
        self._next = begin
        return PollResult(start, begin, base, waiting, is_full=len(waiting) >= most)

    def end_offset(self, poll: PollResult, count: int) -> PartitionOffset:
        """Return the position after the first ``count`` waiting batches.

        The position includes more batches if a transaction ends later, or if the first ``count``
        batches deliver nothing. It is the start itself if there is nothing to read.
        """
        end = self._end_after(poll, count) if poll.fixed is None else poll.fixed
        self._next = end.next
        return end

    def plan(self, start: PartitionOffset | None, end: PartitionOffset) -> PartitionPlan:
        """Find the batches of the micro-batch from ``start`` to ``end``.

        They are the same in any run.

        Args:
            start: Where the micro-batch starts; None for a partition that is new to the query.
            end: Where it ends.

        Returns:
            The batches, and their sizes.

        Raises:
            InvalidInput: The micro-batch was planned with another isolation level, and would lose
                batches with this one.
            DataLoss: Some of its batches have left the queue.
            QueueReset: The queue ends before ``end``.
        """
        begin = end.begin_of(start)
        # The first call of a run is a replay after a crash. Batches before `start` belong to
        # earlier micro-batches, which are in the commit log. But batches before another base were
        # never read, and must stay.
        same = start is not None and begin == start.next and start.queue == end.queue
        session = self._opened(start if same else None, end.queue)
        if not same:
            self._retrying(session.seek, begin)
        isolated = IsolationFilter(start, self._options, session.pending)
        missing = frozenset(end.missing)
        found = session.entries(begin, end.next)
        for batch in found:
            isolated.step(batch, missing=batch.sequence in missing)
        # This cannot be checked if entries were lost: they may have decided the others.
        if len(found) == end.next - begin > 0 and (
            isolated.rule.stable_end(end.next) < stable_end_of(end, self._options)
        ):
            # The rule would hold back a batch that the position after it does not name. That batch
            # would be lost.
            raise errors.InvalidInput(
                f"option isolationLevel is {self._options.isolation!r}, and the micro-batch that "
                f"is repeated was planned with read_uncommitted, up to sequence {end.next - 1} of "
                f"{self._options.queue.data_path_prefix!r}: its undecided batches would never be "
                "read. Start the query with read_uncommitted until that micro-batch is done, then "
                "change it"
            )
        return PartitionPlan(
            [PartitionBatch.within(self.name, batch) for batch in isolated.delivered],
            self.sizes.estimates(isolated.delivered),
            self.sizes.total(isolated.delivered),
            sum(1 for sequence in missing if sequence >= begin),
            isolated.repeats,
        )

    def note_read(self, start: PartitionOffset) -> None:
        """Note that an idle query has read everything before ``start``, once for each position."""
        session = self._session
        if session is None or self._noted == start.next:
            return
        self._noted = start.next
        if session.acknowledged < start.next == session.read_end:
            session.note_read()

    @property
    def opened(self) -> bool:
        """Whether Spark has handed over a position."""
        return self._session is not None

    @property
    def queue_end(self) -> int:
        """The queue's next sequence, by the manifest that was read last."""
        return max(self._next, 0 if self._session is None else self._session.end)

    @property
    def empty(self) -> bool:
        """Whether all entries of the manifest that was read last are acknowledged."""
        return self._session is not None and self._session.end == self._session.acknowledged

    @property
    def newly_registered(self) -> bool:
        """Whether this run registered the query's reader on the log."""
        return self._session is not None and self._session.newly_registered

    @property
    def backlog(self) -> int:
        """Batches after the last answer, by the manifest that was read last.

        Batches that another program took off a log are not counted: they cannot be read.
        """
        return 0 if self._session is None else self._session.count(self._next, self.queue_end)

    @property
    def lag_ms(self) -> int:
        """Age of the oldest record after the last answer, milliseconds; 0 if none waits."""
        pending = [] if self._session is None else self._session.pending(self._next)
        ingested_ms = oldest_ms(pending[0]) if pending else None
        return 0 if ingested_ms is None else max(0, self._runtime.now_ms() - ingested_ms)

    def close(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _opened(self, start: PartitionOffset | None, queue_id: str) -> QueueSession:
        """Return the queue, which the first call of a run opens at ``start``."""
        if self._session is None:
            self._session = open_session(
                self._options, self._store, self._runtime, self._retrying, start, queue_id
            )
        return self._session

    def _first(self, session: QueueSession, *, earliest: bool) -> int:
        """Return where a partition begins that is new to the query; constant during the run."""
        if self._starting_offset is None:
            if earliest:
                self._starting_offset = session.read_end
            else:
                self._starting_offset = self._retrying(session.begin, self._run_end)
                if self._options.starts_at_oldest and not session.is_log:
                    self.removed = held_batches(self._starting_offset, session.skipped)
        return self._starting_offset

    def _end_after(self, poll: PollResult, count: int) -> PartitionOffset:
        """Apply the rule of transactions to the batches that a trigger takes."""
        session = self._session
        assert session is not None
        isolated = IsolationFilter(poll.start, self._options, session.pending)
        first_stable_end = isolated.rule.stable_end(poll.begin)
        end = poll.begin
        missing: list[int] = []
        for number, (batch, is_missing) in enumerate(self._taken(session, poll, count), 1):
            isolated.step(batch, missing=is_missing)
            end = batch.sequence + 1
            if is_missing:
                missing.append(batch.sequence)
            if number >= count and (
                isolated.delivered or missing or isolated.rule.stable_end(end) > first_stable_end
            ):
                break
        else:
            if not (count and session.pending(end, self._run_end)):
                # All of them are undecided. A micro-batch of them would have no rows, and no batch
                # could leave the queue. They are read again when more batches have come.
                if poll.start is not None:
                    return poll.start
                end = poll.begin
                isolated = IsolationFilter(None, self._options, session.pending)
        # The rule forgets apps here and not in plan(), because plan() must always give the same
        # answer for the same offsets.
        isolated.rule.prune(self._runtime.now_ms())
        # An open transaction is read again from its first batch. So the position keeps the
        # sequences that are missing from there on.
        stable_end = isolated.rule.stable_end(end)
        if poll.start is not None:
            missing[:0] = [number for number in poll.start.missing if number >= stable_end]
        return PartitionOffset(
            end, poll.base, isolated.rule.to_dict(), session.queue_id, tuple(missing)
        )

    def _taken(
        self, session: QueueSession, poll: PollResult, count: int
    ) -> Iterator[tuple[BatchDescriptor, bool]]:
        """Yield the batches that a trigger takes, and whether their objects are gone.

        After the ``count`` batches that the limits allow come all others, so that a larger
        transaction can be read as a whole.
        """
        taken = poll.waiting[:count]
        while taken:
            missing = self._missing(taken)
            for batch in taken:
                yield batch, batch.sequence in missing
            next_sequence = taken[-1].sequence + 1
            stop = min(self._run_end, next_sequence + READ_AHEAD)
            if not self._is_fresh or session.read_end < session.end:
                session.read_until(stop)
                self._is_fresh = True
            taken = _contiguous(session.pending(next_sequence, stop), next_sequence)

    def _waiting(self, session: QueueSession, begin: int, most: int) -> list[BatchDescriptor]:
        """Return the entries in a row from ``begin`` on that this trigger may read."""
        stop = min(self._run_end, session.next_available(begin) + most)
        if session.read_end < stop:
            # One more than requested: the progress shows its age as the lag.
            session.read_until(stop + 1)
            self._is_fresh = True
        # Count again: a loss that was skipped may be larger than the limit of a trigger.
        stop = min(self._run_end, session.next_available(begin) + most)
        waiting = session.pending(begin, stop)
        # A loss that is allowed may lie in the middle. A micro-batch ends before it.
        return _contiguous(waiting, waiting[0].sequence) if waiting else []

    def _missing(self, batches: Sequence[BatchDescriptor]) -> frozenset[int]:
        """Return the sequences of batches that are skipped because their objects are gone.

        The store is asked only if a loss is allowed, and only about batches whose writer repeats a
        batch that it finds to be gone. The rule delivers such a repeat only if it knows of the
        loss. Tasks find all other missing batches.
        """
        if self._options.fail_on_data_loss:
            return frozenset()
        missing = self.sizes.missing([batch for batch in batches if self._writer_will_retry(batch)])
        for batch in missing:
            log.warning(
                "data loss allowed: batch %d at %r is passed by, its object does not exist",
                batch.sequence,
                batch.location,
            )
        return frozenset(batch.sequence for batch in missing)

    def _writer_will_retry(self, batch: BatchDescriptor) -> bool:
        """Return whether the batch's writer repeats it when it finds that its object is gone."""
        prefix = self._options.queue.data_path_prefix
        named = parse_location(batch.location, prefix)
        if named is None or is_acknowledgement(batch.location, prefix):
            return False
        return named.txn is not None or named.message is not None


def _contiguous(batches: Sequence[BatchDescriptor], begin: int) -> list[BatchDescriptor]:
    """Return the leading batches without a gap; none if the first is not ``begin``."""
    end = len(batches)
    if batches and batches[-1].sequence - begin >= end:
        end = next(index for index in range(end) if batches[index].sequence != begin + index)
    return list(batches[:end])
