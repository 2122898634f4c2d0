"""Offsets, limits and tasks of one run of a query, over all partitions of its source.

Every answer is a function of the offsets that Spark hands over and of the manifests. The state that
is kept between calls only saves requests. So a replay after a crash, which plans first, does not
need the state of the run before it.

A micro-batch takes these steps, in parallel over the partitions::

    latest_offset(start)
        PartitionStream.poll(start)            acknowledge the start; which entries wait after it
        rate_limit(...)                        how many of them one trigger reads
        PartitionStream.end_offset(poll, n)    the position after those
    plan_input_partitions(start, end)
        PartitionStream.plan(start, end)       which batches lie between the two
        plan_tasks(...)                        which task reads which of them
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from buffer_source.commit_log import CommitLog, Tracking
from buffer_source.options import SourceOptions
from buffer_source.partition_stream import (
    MOST_ENTRIES,
    READ_AHEAD,
    PartitionPlan,
    PartitionStream,
    PollResult,
)
from buffer_source.partitions import PartitionOffset, SourceOffset, SourcePartitions
from buffer_source.planner import (
    BatchSizes,
    PartitionBatch,
    ReadLimits,
    TaskBatches,
    hold_at_least,
    interleave,
    plan_tasks,
    rate_limit,
)
from opendata_buffer import metrics
from opendata_buffer.consumer.pace import FIRST_PAUSE_S, PollPace
from opendata_buffer.queue.hints import removed_before
from opendata_buffer.queue.neighbours import TOPIC_KEY
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.listed import with_looks

log = logging.getLogger(__name__)

QUIET_S = 0.5
"""Seconds of a pause from which on the partitions of a topic are polled by a listing."""

NOTE_READ_S = 10.0
"""Idle seconds after which a reader of a log notes how far it has read."""

T = TypeVar("T")


class MicroBatchStream:
    """Offsets, limits and plans of one run of one query, over all partitions of its source.

    Partitions are polled, acknowledged and planned at the same time. Nothing is claimed before
    Spark hands over the first offset: a reader that is only made, to be pickled or to show its
    schema, must not fence a running query.
    """

    def __init__(self, options: SourceOptions, store: Store, runtime: Runtime) -> None:
        self._options = options
        self._store, self._look = with_looks(store, runtime)
        self._runtime = runtime
        self._pace = PollPace(options.idle_poll_ms)
        self._queue_ends: dict[str, int] = {}  # As the last poll has seen them.
        self._polled_at = 0.0  # When the last poll ended, monotonic seconds.
        self._ran = False  # Whether Spark has run a micro-batch since then.
        # An error in any call ends the query, so transient ones are retried.
        self._retrying = options.consumer.retries(runtime, before_pause=self._count_retry)
        names = ("batches", "bytes", "droppedRepeats", "missing", "retries")
        self._counts: dict[str, Any] = dict.fromkeys(names, 0)  # Of this run; see report().
        self._partitions = SourcePartitions(options, self._store, runtime)
        self._streams: dict[str, PartitionStream] = {}
        self._log = CommitLog()
        self._warned = False
        self._frozen: list[str] | None = None  # Partitions that a run with AvailableNow reads.
        self._left: set[str] = set()  # Partitions that left the offset, closed for good and empty.
        self._moved_at: float | None = None  # When a micro-batch was last ended, monotonic seconds.
        self._counted: tuple[SourceOffset | None, SourceOffset] | None = None

    def prepare_available_now(self) -> None:
        """Let the run end at the batches that are queued now."""
        self._frozen = self._partitions.names_for_reader()
        streams = [self._stream(name) for name in self._frozen]
        in_parallel(self._runtime, PartitionStream.freeze_end, streams)
        self._log.tracking = Tracking.SYNCHRONOUS

    def latest_offset(self, start: SourceOffset | None, *, unlimited: bool = False) -> SourceOffset:
        """Return the end of the micro-batch after ``start``.

        A new partition is read from its beginning. One that has left the topic leaves the offset
        with the next end.

        Args:
            start: The end of the previous micro-batch; None for a query that has read nothing.
            unlimited: Ignore the limits of the options.

        Returns:
            The end; ``start`` itself if nothing waits.

        Raises:
            Fenced: Another consumer reads a queue.
            DataLoss: Batches after ``start`` are gone.
            QueueReset: A queue ends before ``start``, or was replaced.
            InvalidInput: ``start`` belongs to another source.
        """
        self._partitions.check(start)
        starts: Mapping[str, PartitionOffset] = {} if start is None else start.partitions
        committed = self._log.holds(start, self._runtime.monotonic())
        self._await_poll()
        began = self._runtime.monotonic()
        options, limits = self._options, ReadLimits()
        if not unlimited:
            limits = ReadLimits(options.max_batches, options.max_bytes, options.max_records)
        with self._look(len(starts) + 1, idle=self._pace.pause_s > QUIET_S):
            current, polls = self._poll(starts, limits, is_new=start is None, committed=committed)
        if start is None:
            self._warn_of_removed()
        self._register_reader()
        counts = self._rate_limit(polls, limits)
        if not unlimited and self._waits_for_more(polls, counts, limits):
            counts = dict.fromkeys(polls, 0)
        ends = self._ends(polls, counts)
        moved = {name for name, poll in polls.items() if poll.fixed or ends[name].next > poll.begin}
        self._polled_at, self._ran = self._runtime.monotonic(), False
        if moved:
            self._moved_at = self._polled_at
        queue_ends = {name: self._stream(name).queue_end for name in polls}
        # Batches also come if a transaction or minOffsetsPerTrigger holds them back.
        if moved or queue_ends != self._queue_ends:
            self._pace.looked(True, began, self._polled_at)
        if not moved:
            self._pace.looked(False, began, self._polled_at)
        self._queue_ends = queue_ends
        drained = [stream.name for stream in self._streams.values() if stream.empty]
        self._partitions.remove_drained(drained)
        if start is not None and not moved:
            if self._options.reader:
                self._note_read(start)
            return start
        left = self._close_left({*starts}.difference(current, moved))
        return SourceOffset({name: ends[name] for name in sorted(ends) if name not in left})

    def plan_input_partitions(
        self, start: SourceOffset | None, end: SourceOffset
    ) -> list[TaskBatches]:
        """Plan the tasks of the micro-batch from ``start`` to ``end``.

        The plan is the same in any run. The tasks leave out repeats of transactions that were read
        before.

        Args:
            start: Where the micro-batch starts; None for the beginning of the query.
            end: Where it ends.

        Returns:
            The tasks.

        Raises:
            OpenDataBufferError: As :meth:`latest_offset`.
        """
        self._partitions.check(end)
        self._ran = True
        self._log.planned(start)
        starts: Mapping[str, PartitionOffset] = {} if start is None else start.partitions

        def plan(name: str) -> PartitionPlan:
            return self._stream(name).plan(starts.get(name), end.partitions[name])

        plans = self._in_parallel(plan, sorted(end.partitions)).values()
        if (start, end) != self._counted:  # Spark plans once for each scan of the source.
            self._counted = (start, end)
            for partition_plan in plans:
                self._count(partition_plan)
        batches = [batch for partition_plan in plans for batch in partition_plan.batches]
        sizes = [size for partition_plan in plans for size in partition_plan.sizes]
        return plan_tasks(batches, sizes, self._options)

    def commit(self, end: SourceOffset) -> None:
        """Let everything below ``end`` leave the queues, since Spark has it in its commit log.

        If a store does not answer, that is not an error here: the next commit makes up for it.

        Args:
            end: The end of the committed micro-batch.

        Raises:
            Fenced: Another consumer reads a queue.
            InvalidInput: ``end`` belongs to another source.
        """
        self._partitions.check(end)
        self._ran = True
        self._log.committed(end)
        self._acknowledge(end.partitions)

    def report(self) -> dict[str, Any] | None:
        """Return the source's name, its end, its backlog and its counters; makes no request.

        Spark shows it as the ``latestOffset`` of the query's progress, the only place there for a
        Python source. ``"bytes"``, the stored bytes, is null if the size of a batch is not known:
        sizes are looked up only for ``maxBytesPerTrigger`` and for large micro-batches. For a
        topic, ``next`` is a map, ``partitionBacklogs`` has the partitions with a backlog, and
        ``lagMs`` is the largest.
        """
        streams = sorted(
            (stream for stream in self._streams.values() if stream.opened),
            key=lambda stream: stream.name,
        )
        if not streams:
            return None
        topic = self._partitions.topic
        key = self._options.queue.manifest_path if topic is None else TOPIC_KEY
        ends = {stream.name: stream.queue_end for stream in streams}
        backlogs = {stream.name: stream.backlog for stream in streams}
        report = {
            "v": 1,
            "source": f"{self._store.url}/{key}",
            "next": ends if topic is not None else streams[0].queue_end,
            "backlogBatches": sum(backlogs.values()),
            "lagMs": max(stream.lag_ms for stream in streams),
            **self._counts,
        }
        if topic is not None:
            report["partitionBacklogs"] = {
                name: backlog for name, backlog in backlogs.items() if backlog
            }
        return report

    def stop(self) -> None:
        """Stop the collectors and let the queues go; acknowledges nothing."""
        while self._streams:
            self._streams.popitem()[1].close()

    def _poll(
        self,
        starts: Mapping[str, PartitionOffset],
        limits: ReadLimits,
        *,
        is_new: bool,
        committed: bool,
    ) -> tuple[list[str], dict[str, PollResult]]:
        """Return the topic's current partitions, and the waiting entries of all partitions.

        Args:
            starts: Where the micro-batch starts in each partition that the query knows.
            limits: The limits of one trigger.
            is_new: Whether the query has read nothing yet.
            committed: Whether the start is in Spark's commit log.

        Returns:
            The names of the current partitions; and the polls of these partitions and those of
            ``starts``.
        """
        most = MOST_ENTRIES if limits == ReadLimits() else READ_AHEAD
        polls: dict[str, PollResult] = {}
        current: list[str] = []

        def poll(name: str | None) -> None:
            if name is None:
                current.extend(self._partitions.names_for_reader())
                return
            partitions = len(starts) if name in starts else len(current)
            share = limits.batches or max(1, most // partitions)
            polls[name] = self._stream(name).poll(
                starts.get(name),
                share,
                earliest=not is_new,
                committed=committed and name not in self._left,
            )

        first: list[str | None] = [*starts]
        if self._frozen is not None:
            current += self._frozen
        elif self._partitions.topic is None:
            current += self._partitions.names()  # Makes no request, so it needs no thread.
        else:
            # At the same time: otherwise each idle trigger would wait for two answers in turn.
            first.append(None)
        in_parallel(self._runtime, poll, first)
        added = sorted({*current}.difference(starts))
        if is_new:
            # Check all of them before claiming the first one, which fences its consumer.
            in_parallel(self._runtime, lambda name: self._stream(name).check_start(), added)
        in_parallel(self._runtime, poll, added)
        return current, polls

    def _ends(
        self, polls: Mapping[str, PollResult], counts: Mapping[str, int]
    ) -> dict[str, PartitionOffset]:
        """Return the position in each partition after the batches that a trigger takes."""

        def end_offset(name: str) -> PartitionOffset:
            return self._stream(name).end_offset(polls[name], counts[name])

        ends = self._in_parallel(end_offset, [name for name in sorted(polls) if counts[name]])
        # A partition without a batch to take makes no request, so it needs no thread.
        ends |= {name: end_offset(name) for name in sorted(polls) if name not in ends}
        return ends

    def _acknowledge(self, ends: Mapping[str, PartitionOffset]) -> None:
        # After a partition has left the offset, Spark commits the previous offset once more. If
        # that opened the partition again, it would be claimed, and count as a backlog until the
        # run ends.
        streams = {name: self._stream(name) for name in {*ends}.difference(self._left)}
        due = [name for name in streams if streams[name].acknowledged != ends[name]]
        in_parallel(self._runtime, lambda name: streams[name].acknowledge(ends[name]), due)

    def _close_left(self, names: set[str]) -> set[str]:
        """Close those partitions that have left the topic and are read to their end."""
        left = {name for name in names if not self._stream(name).backlog}
        for name in left:
            self._streams.pop(name).close()
        self._left |= left
        return left

    def _register_reader(self) -> None:
        """Register the query's reader on the topic before Spark gets a record.

        A topic that is expanded from now on then has this reader in the new partitions, too.
        """
        if self._options.reader:
            is_new = any(stream.newly_registered for stream in self._streams.values())
            self._retrying(self._partitions.register_reader, is_new)

    def _note_read(self, start: SourceOffset) -> None:
        """Note in each log that this idle query has read everything, if it cannot acknowledge it.

        Spark tells a source with the next micro-batch that the last one is in the commit log. A
        reader of a log that waits for it would appear to be behind.
        """
        if self._log.idle_s(self._runtime.monotonic()) >= NOTE_READ_S:
            in_parallel(
                self._runtime,
                lambda name: self._stream(name).note_read(start.partitions[name]),
                [name for name in start.partitions if name not in self._left],
            )

    def _rate_limit(self, polls: Mapping[str, PollResult], limits: ReadLimits) -> Mapping[str, int]:
        """Return how many of the batches that wait in each partition one trigger reads."""
        if limits == ReadLimits():
            return {name: len(poll.waiting) for name, poll in polls.items()}
        # If the limit is smaller than the number of partitions, the partitions that have waited
        # longest go first, so that no partition waits forever.
        names = sorted(polls, key=lambda name: -self._stream(name).lag_ms)
        lengths = [len(polls[name].waiting) for name in names]
        backlogs = [self._stream(name).backlog for name in names]
        waiting = [iter(polls[name].waiting) for name in names]
        merged = [
            PartitionBatch.within(names[index], next(waiting[index]))
            for index in islice(interleave(lengths, backlogs), limits.batches)
        ]
        count = rate_limit(
            merged,
            limits,
            lambda batches: self._measured(BatchSizes.sizes, batches),
            lambda batches: self._measured(BatchSizes.records, batches),
        )
        return Counter(batch.partition for batch in merged[:count])

    def _waits_for_more(
        self, polls: Mapping[str, PollResult], counts: Mapping[str, int], limits: ReadLimits
    ) -> bool:
        """Return whether so few records wait that this trigger reads none (minOffsetsPerTrigger).

        As in Spark's Kafka source, the first micro-batch of a run does not wait, and no micro-batch
        waits longer than ``maxTriggerDelay`` after the one before it. A run with AvailableNow would
        end instead of waiting, so it reads everything.
        """
        least, now = self._options.min_records, self._runtime.monotonic()
        if (
            least is None
            or self._frozen is not None
            or self._moved_at is None
            or now - self._moved_at >= self._options.max_delay_ms / 1000
            or any(poll.fixed is not None for poll in polls.values())
        ):
            return False
        waiting = sum(len(poll.waiting) for poll in polls.values())
        if (
            sum(counts.values()) < waiting
            or (limits.batches is not None and waiting >= limits.batches)
            or any(poll.is_full for poll in polls.values())
        ):
            # The trigger is full. If it waited, the query would read one trigger in each delay, and
            # fall behind.
            return False
        batches = [
            PartitionBatch.within(name, batch)
            for name, poll in polls.items()
            for batch in poll.waiting
        ]
        return not hold_at_least(
            batches, least, lambda part: self._measured(BatchSizes.records, part)
        )

    def _measured(
        self,
        measure: Callable[[BatchSizes, Sequence[PartitionBatch]], Sequence[int]],
        batches: Sequence[PartitionBatch],
    ) -> Sequence[int]:
        """Return sizes or records of batches, measured in all their partitions at the same time."""
        groups: dict[str, list[PartitionBatch]] = {}
        for batch in batches:
            groups.setdefault(batch.partition, []).append(batch)
        measured = self._in_parallel(
            lambda name: iter(measure(self._stream(name).sizes, groups[name])), [*groups]
        )
        return [next(measured[batch.partition]) for batch in batches]

    def _await_poll(self) -> None:
        """Wait until an idle queue is to be polled again.

        The answer of the last poll is older than the call, so it must not be given again. Otherwise
        ``processAllAvailable()`` would return before the query has seen all available batches.

        Spark calls again after 10 ms if nothing was found by the sources of a query. Then the pause
        is that of :class:`.PollPace`. It is a short one if Spark has done something else since the
        last poll: it ran a micro-batch of another source, polled another source that waited, or let
        the interval of its trigger pass. Then a longer pause would delay the records of others, or
        make the interval longer than it was set.
        """
        if self._frozen is not None or not self._pace.pause_s:
            return
        waited_s = self._runtime.monotonic() - self._polled_at
        pause_s = self._pace.pause_s
        if self._ran or waited_s >= FIRST_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        if pause_s > waited_s:
            self._runtime.sleep(pause_s - waited_s)

    def _warn_of_removed(self) -> None:
        """Warn once if batches were removed before this new query began with the oldest ones.

        Without the warning a new checkpoint looks like a way to read everything again.
        """
        removed = sum(stream.removed for stream in self._streams.values())
        if removed and not self._warned:
            self._warned = True
            log.warning(
                "%s", removed_before(removed, self._store.url, self._options.queue, "this query")
            )

    def _count_retry(self) -> None:
        self._counts["retries"] += 1

    def _count(self, plan: PartitionPlan) -> None:
        """Count the batches that a micro-batch reads from one partition."""
        counts, repeats = self._counts, plan.repeats
        counts["batches"] += len(plan.batches)
        if counts["bytes"] is not None:  # None after a batch of unknown size.
            counts["bytes"] = None if plan.total is None else counts["bytes"] + plan.total
        counts["missing"] += plan.missing
        counts["droppedRepeats"] += len(repeats)
        if repeats:
            # Repeats of an append were counted by the consumer of the queue.
            if count := sum(1 for batch in repeats if batch.repeats is None):
                metrics.repeats_dropped.add(count)
            log.warning(
                "left out %d of %d batches, sequences %d to %d: their writer repeated "
                "appends or transactions that were read already",
                len(repeats),
                len(plan.batches) + plan.missing + len(repeats),
                repeats[0].sequence,
                repeats[-1].sequence,
            )

    def _stream(self, name: str) -> PartitionStream:
        if name not in self._streams:
            options = self._partitions.options_of(name)
            self._streams[name] = PartitionStream(
                name, options, self._store, self._runtime, self._retrying
            )
        return self._streams[name]

    def _in_parallel(self, function: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
        return dict(zip(names, in_parallel(self._runtime, function, names), strict=True))
