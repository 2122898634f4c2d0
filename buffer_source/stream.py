"""Turns Spark's calls into offsets and task plans, for one run of one query. No Spark in it.

Every answer is a function of the offsets Spark hands over and of the manifest; what is kept
between calls only saves requests. So a replay after a crash, which calls
:meth:`StreamDriver.plan` first, needs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from buffer_source.commit_log import CommitLog
from buffer_source.cursor import EVERYTHING, Cursor
from buffer_source.measures import Measures
from buffer_source.offsets import Position, SourceOffset
from buffer_source.options import QUARANTINE, SourceOptions
from buffer_source.planner import Limits, admit, pack
from buffer_source.progress import Progress
from buffer_source.times import oldest_ms
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.transactions import TransactionFilter
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.quarantine import count_quarantine
from opendata_buffer.queue.queue import Queue
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store

__all__ = ["StreamDriver"]

log = logging.getLogger(__name__)

READ_AHEAD = 10_000
"""Entries looked at for one trigger when only bytes or records limit it."""


class StreamDriver:
    """Offsets, limits and plans of one run of one query; the queue itself is its cursor's.

    Nothing is claimed before Spark hands over the first offset: a reader that is only made, to
    be pickled or to look at its schema, must not fence a running query.

    Args:
        options: What the query asked for.
        store: The opened store.
        runtime: Clock and sleep.
    """

    def __init__(self, options: SourceOptions, store: Store, runtime: Runtime) -> None:
        self._options = options
        self._config = options.consumer
        self._store = store
        self._runtime = runtime
        self._measures = Measures(
            store,
            self._config.data_path_prefix,
            runtime=runtime,
            concurrency=options.fetch_concurrency,
            allow_foreign=options.allow_foreign_locations,
        )
        # An error in any call ends the query, so what may pass is waited for.
        self._progress = Progress()
        self._patient = queue_retry(runtime, self._config).copy(before_sleep=self._progress.retried)
        self._log = CommitLog()
        self._cursor: Cursor | None = None
        self._base: int | None = None  # What startingOffsets meant, once it is resolved.
        self._target: int | None = None  # Where a run with AvailableNow ends.
        self._idle_at: float | None = None  # When nothing was found, monotonic seconds.
        self._next = 0  # Where the last answer of latest() ends.
        self._counted: tuple[SourceOffset | None, SourceOffset] | None = None
        self._quarantine_known = False  # Whether no task ran since the quarantine was looked at.

    def prepare_available_now(self) -> None:
        """Freeze the end of the run: what is queued now, and nothing later."""
        queue = Queue(self._store, self._config, runtime=self._runtime, role="consumer")
        manifest = queue.read()  # Retries by itself.
        self._target = 0 if manifest is None else manifest.next_sequence
        self._log.available_now()

    def latest(self, start: SourceOffset | None, *, unlimited: bool = False) -> SourceOffset:
        """The end of the next micro-batch; ``start`` itself when nothing waits.

        Args:
            start: Where the last micro-batch ended; None for a new query.
            unlimited: Ignore the limits per trigger.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: ``start`` is not a position of this queue any more.
        """
        before = None if start is None else start.only
        cursor = self._opened(before, "" if before is None else before.queue)
        if self._log.handed(before, self._runtime.monotonic()) and before is not None:
            self._acknowledge(cursor, before)
        self._look_at_quarantine()
        end = self._next_position(cursor, before, unlimited)
        self._next = end.next
        return start if start is not None and end == before else SourceOffset.of(end)

    def _next_position(self, cursor: Cursor, start: Position | None, unlimited: bool) -> Position:
        begin, base = self._begin(cursor, start)
        if start is not None and (begin != start.next or not cursor.owns(start)):
            # First a micro-batch without rows. One with rows might end beyond `start`, and a
            # replay would take it for one that begins at `start`.
            # Writers count their batches per queue: another queue's numbers say nothing here.
            passed = start.transactions if cursor.owns(start) else {}
            return Position(begin, base, passed, cursor.queue_id)
        options = self._options
        limits = (
            Limits()
            if unlimited
            else Limits(options.max_batches, options.max_bytes, options.max_records)
        )
        waiting = self._wait_for(cursor, begin, limits)
        if waiting and waiting[0].sequence > begin:
            begin = base = waiting[0].sequence  # A loss the consumer was allowed to pass by.
        count = self._patient(admit, waiting, limits, self._measures.sizes, self._measures.records)
        if count == 0 and start is not None:
            return start
        missing = self._missing(waiting[:count])
        _, transactions = self._pass(start, waiting[:count], missing)
        # Apps are forgotten here and not in plan(), which must give the same answer for the same
        # offsets whenever it is asked.
        transactions.prune(self._runtime.now_ms())
        return Position(begin + count, base, transactions.to_dict(), cursor.queue_id, missing)

    def plan(
        self, start: SourceOffset | None, end: SourceOffset
    ) -> list[tuple[BatchDescriptor, ...]]:
        """The tasks of the micro-batch from ``start`` to ``end``.

        The same batches in the same order for equal arguments, in any run. Repeats of a
        transaction that was read already are left out.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: The queue does not have these entries any more.
        """
        before, until = None if start is None else start.only, end.only
        self._log.planned(before)
        begin = until.begin_of(before)
        # The first call of a run is a replay after a crash. What is before `start` is in the
        # commit log of the batch before; what is before another base was never read, nor is it
        # ours to drop.
        same = before is not None and begin == before.next and before.queue == until.queue
        cursor = self._opened(before if same else None, until.queue)
        batches = cursor.between(begin, until.next)
        passed, _ = self._pass(before, batches, until.missing)
        sizes = self._patient(self._measures.estimates, passed)
        if (start, end) != self._counted:  # Spark plans once for each scan of the source.
            self._counted = (start, end)
            self._quarantine_known = False
            known = {each.sequence for each in passed}.union(until.missing)
            repeats = [each for each in batches if each.sequence not in known]
            size = self._measures.total(passed)
            self._progress.planned(len(passed), size, len(until.missing), repeats)
        options = self._options
        return pack(passed, sizes, options.parallelism, options.min_partitions)

    def commit(self, end: SourceOffset) -> None:
        """Everything below ``end`` is safe with Spark: let it leave the queue.

        Cumulative and repeatable. A store that does not answer is no failure here: the next
        commit makes up for it.

        Raises:
            Fenced: Another consumer took the queue.
        """
        position = end.only
        self._log.committed(position)
        self._acknowledge(self._opened(position, position.queue), position)

    def report(self) -> dict[str, Any] | None:
        """What the source is, how far the queue reaches, and what was read; makes no request.

        Spark shows it as the ``latestOffset`` of the query's progress: a Python source has no
        other place there, neither for metrics nor for a description. All counts are of this
        run. ``{"v":1, "source": "<store>/<manifest>", "next": first sequence not queued yet,
        "backlogBatches", "lagMs": age of the oldest of them, "batches" and "bytes" planned,
        "droppedRepeats", "missing", "quarantined", "retries"}``; see
        :class:`~buffer_source.progress.Progress`.
        """
        if self._cursor is None:
            return None
        behind = self._cursor.waiting(self._next)
        written = oldest_ms(behind[0]) if behind else None
        lag_ms = 0 if written is None else max(0, self._runtime.now_ms() - written)
        end = max(self._next, self._cursor.end)
        return {
            "v": 1,
            "source": f"{self._store.url}/{self._config.manifest_path}",
            "next": end,
            "backlogBatches": end - self._next,
            "lagMs": lag_ms,
            **self._progress.to_json(),
        }

    def stop(self) -> None:
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

    def _begin(self, cursor: Cursor, start: Position | None) -> tuple[int, int]:
        """Where the next micro-batch begins, and the base that goes with it."""
        if start is not None:
            return cursor.resume(start)
        if self._base is None:
            self._base = cursor.first(self._target)
        return self._base, self._base

    def _acknowledge(self, cursor: Cursor, end: Position) -> None:
        if cursor.acknowledge(end):
            self._measures.forget_before(end.next)

    def _filter(self, start: Position | None) -> TransactionFilter:
        prefix = self._config.data_path_prefix
        if start is None or not start.transactions:
            return TransactionFilter(prefix)
        return TransactionFilter.from_dict(start.transactions, prefix)

    def _missing(self, batches: Sequence[BatchDescriptor]) -> tuple[int, ...]:
        """Sequences of batches that are passed by because their objects are gone.

        Only looked for where that is allowed, and only among batches of transactions: the
        writer of one knows that it is gone and repeats it, and the filter lets the repeat
        through only when it is told. Of other batches the task finds out by itself.
        """
        if self._options.fail_on_data_loss:
            return ()
        prefix = self._config.data_path_prefix
        named = [
            each
            for each in batches
            if (parsed := parse_location(each.location, prefix)) is not None and parsed.txn
        ]
        missing: list[BatchDescriptor] = self._patient(self._measures.missing, named)
        for each in missing:
            log.warning(
                "data loss allowed: batch %d at %r is passed by, its object does not exist",
                each.sequence,
                each.location,
            )
        return tuple(each.sequence for each in missing)

    def _pass(
        self, start: Position | None, batches: Sequence[BatchDescriptor], missing: Sequence[int]
    ) -> tuple[list[BatchDescriptor], TransactionFilter]:
        """The batches behind ``start`` that are read, and the transactions known after them.

        A function of its arguments alone: what :meth:`latest` puts on record :meth:`plan` finds
        again.
        """
        transactions = self._filter(start)
        gone = frozenset(missing)
        passed = []
        expected = None if start is None else start.next
        for each in batches:
            if expected is not None and each.sequence > expected:
                transactions.lost(each.sequence - 1)
            expected = each.sequence + 1
            if each.sequence in gone:
                transactions.skip(each.sequence, each.location)
            elif transactions.offer(each.sequence, each.location):
                passed.append(each)
        return passed, transactions

    def _look_at_quarantine(self) -> None:
        """Count the batches in quarantine, once after each micro-batch that may have added one."""
        if self._options.corrupt_batches != QUARANTINE or self._quarantine_known:
            return
        try:
            reports = count_quarantine(self._store, self._config.data_path_prefix)
        except TransientStorageError as error:
            log.warning("the quarantine was not counted: %s", error)
            return
        self._progress.quarantined = reports
        self._quarantine_known = True

    def _wait_for(self, cursor: Cursor, begin: int, limits: Limits) -> list[BatchDescriptor]:
        """Entries in a row from ``begin`` on that this trigger may read."""
        stop = self._stop(cursor.behind_gap(begin), limits)
        if cursor.handed_out < stop:
            if self._target is None and not cursor.waiting(begin):
                self._await_poll()
            # One more than is wanted: its age is the lag the progress shows.
            cursor.hand_out(stop + 1)
        # Counted anew: a gap that was passed by may be wider than all that a trigger reads.
        waiting = cursor.waiting(begin, self._stop(cursor.behind_gap(begin), limits))
        self._idle_at = None if waiting else self._runtime.monotonic()
        if waiting and waiting[-1].sequence - waiting[0].sequence >= len(waiting):
            # A loss that was allowed, in the middle: a micro-batch ends at it.
            gap = next(
                index
                for index in range(1, len(waiting))
                if waiting[index].sequence != waiting[index - 1].sequence + 1
            )
            waiting = waiting[:gap]
        return waiting

    def _stop(self, begin: int, limits: Limits) -> int:
        """Where a trigger that reads from ``begin`` on ends at the latest."""
        stop = EVERYTHING if self._target is None else self._target
        if limits.batches is not None:
            return min(stop, begin + limits.batches)
        if limits.bytes is not None or limits.records is not None:
            return min(stop, begin + READ_AHEAD)
        return stop

    def _await_poll(self) -> None:
        """Let ``pollIntervalMs`` pass between two looks at an idle queue.

        Waits and then looks, rather than answering from the last look: an answer older than
        the call would let ``processAllAvailable()`` return before it saw what was there.
        """
        if self._idle_at is not None:
            due = self._idle_at + self._options.poll_interval_ms / 1000
            left = due - self._runtime.monotonic()
            if left > 0:
                self._runtime.sleep(left)
