"""Turns Spark's calls into offsets and task plans, for one run of one query. No Spark in it.

Every answer is a function of the offsets Spark hands over and of the manifests; what is kept
between calls only saves requests. So a replay after a crash, which calls
:meth:`MicroBatchStream.plan_input_partitions` first, needs nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any, TypeVar

from buffer_source.offsets import ONLY, PartitionOffset, SourceOffset
from buffer_source.options import SourceOptions
from buffer_source.partition_stream import READ_AHEAD, PartitionPlan, PartitionStream, PollResult
from buffer_source.planner import (
    BatchSizes,
    PartitionBatch,
    ReadLimits,
    TaskBatches,
    interleave,
    plan_tasks,
    rate_limit,
)
from buffer_source.queue_cursor import MOST_ENTRIES
from opendata_buffer import metrics
from opendata_buffer.errors import InvalidInput, OpenDataBufferError, PermanentStorageError
from opendata_buffer.queue.ownership import TOPIC_KEY, missing_topic_hint
from opendata_buffer.runtime import Retries, Runtime, deadline, in_parallel, queue_retry
from opendata_buffer.stores.base import Get, Store
from opendata_buffer.topic.description import is_topic
from opendata_buffer.topic.topic import REFRESH_S, Topic

log = logging.getLogger(__name__)

FIRST_BATCH_LOGGED_S = 60.0
"""Idle seconds after which the first batch of a run counts as being in Spark's commit log."""

POLL_INTERVAL_S = 0.1
"""Least seconds between two polls of an idle queue."""

COMMITS_THAT_PROVE = 2
"""Commits in a row, each where a normal query makes it, that prove synchronous tracking.

Asynchronous tracking would have to win the same race each time: another thread would have to write
its log between two statements of Spark's main thread."""

T = TypeVar("T")


class Tracking(Enum):
    """How the query keeps its progress."""

    UNKNOWN = "unknown"
    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


class CommitLog:
    """What Spark's commit log certainly holds, by the order of Spark's calls in one run.

    A batch may leave the queue only when no restart can ask for it again, that is when its end
    offset is in the commit log. ``commit(end)`` proves that, but comes only with the next batch
    that has data: an idle query would never acknowledge its last one. In a normal query
    ``latestOffset(start)`` proves it too. With asynchronous progress tracking it does not, and a
    source finds out which of the two it serves only by these signs:

    - a normal query calls ``commit(start)`` between ``latestOffset(start)`` and
      ``partitions(start, end)``, always;
    - with asynchronous tracking ``commit`` follows the log's writes, some batches later; but a
      write that ends before Spark's main thread checks for it is committed in the place a normal
      query's would be, so one commit in its place proves nothing yet;
    - ``Trigger.AvailableNow`` refuses asynchronous tracking;
    - what the first call of a run hands over was read from the log;
    - with asynchronous tracking the log is always written for the first batch of a run, in the
      background, so after some idle time it is on record as well.
    """

    def __init__(self) -> None:
        self.tracking = Tracking.UNKNOWN
        self._planned = 0  # Micro-batches planned in this run.
        self._planned_from: tuple[SourceOffset | None] | None = None  # Where the last one begins.
        self._on_time = 0
        self._handed: SourceOffset | None = None
        self._handed_at = 0.0
        self._committed: SourceOffset | None = None

    def handed(self, start: SourceOffset | None, now: float) -> bool:
        """``latestOffset(start)`` was called: is ``start`` in the commit log for sure?"""
        if start != self._handed:
            self._handed = start
            self._handed_at = now
        if start is None:
            return False
        if self._planned == 0 or self.tracking is Tracking.SYNCHRONOUS:
            return True
        if self.tracking is Tracking.ASYNCHRONOUS:
            return False
        return self._planned == 1 and now - self._handed_at >= FIRST_BATCH_LOGGED_S

    def committed(self, end: SourceOffset) -> None:
        """``commit(end)`` was called: ``end`` is in the commit log, whatever the tracking."""
        self._committed = end
        if self._handed is not None and end != self._handed:
            # Only a log that lags commits an older offset than the one just handed over.
            self.tracking = Tracking.ASYNCHRONOUS

    def planned(self, start: SourceOffset | None) -> None:
        """``partitions(start, end)`` was called.

        A query that scans the source in two places, as a union of a DataFrame with itself
        does, calls it twice for each micro-batch; the second call proves nothing.
        """
        if self._planned_from == (start,):
            return
        self._planned_from = (start,)
        self._planned += 1
        if start is None or start != self._handed:
            return  # The first batch of a query, or a replay: not preceded by a commit.
        if self._committed != start:
            self.tracking = Tracking.ASYNCHRONOUS
            return
        self._on_time += 1
        if self._on_time >= COMMITS_THAT_PROVE and self.tracking is Tracking.UNKNOWN:
            self.tracking = Tracking.SYNCHRONOUS


@dataclass(slots=True)
class Progress:
    """Counts of one run, of planned and skipped batches.

    Attributes:
        batches: Batches given to tasks.
        bytes: Their stored bytes; None once the size of one was not known. Sizes are looked up
            for ``maxBytesPerTrigger`` and for large micro-batches only.
        repeats: Batches left out because their writer had repeated a transaction.
        missing: Batches passed by because their objects are gone.
        retries: Requests of the driver that were made again.
    """

    batches: int = 0
    bytes: int | None = 0
    repeats: int = 0
    missing: int = 0
    retries: int = 0

    def planned(self, plan: PartitionPlan) -> None:
        """Count what a micro-batch reads of one partition."""
        self.batches += len(plan.batches)
        if self.bytes is not None:
            self.bytes = None if plan.total is None else self.bytes + plan.total
        self.missing += plan.missing
        repeats = plan.repeats
        self.repeats += len(repeats)
        if repeats:
            # Where an append was repeated, the reader of the queue has counted it.
            if count := sum(1 for each in repeats if each.repeats is None):
                metrics.repeats_dropped.add(count)
            log.warning(
                "left out %d of %d batches, sequences %d to %d: their writer repeated "
                "appends or transactions that were read already",
                len(repeats),
                len(plan.batches) + plan.missing + len(repeats),
                repeats[0].sequence,
                repeats[-1].sequence,
            )

    def retried(self) -> None:
        """A request is about to be made again."""
        self.retries += 1

    def to_json(self) -> dict[str, Any]:
        """The counts as Spark shows them."""
        return {
            "batches": self.batches,
            "bytes": self.bytes,
            "droppedRepeats": self.repeats,
            "missing": self.missing,
            "retries": self.retries,
        }


def reads_topic(options: SourceOptions, store: Get, runtime: Runtime) -> bool:
    """Whether the options lead to a topic, by one small read; none where they name a queue."""
    if options.one_queue:
        return False
    try:
        with deadline(runtime, options.queue.cas_deadline_ms / 1000):
            return is_topic(store)
    except PermanentStorageError as error:
        # A reader that may only read below one prefix has a queue there.
        log.warning("reading a queue, as a topic's description may not be read: %s", error)
        return False


class SourcePartitions:
    """The queues of a source by their names in its offsets; :data:`ONLY` if it reads one queue.

    Makes no request before it is asked which partitions there are.
    """

    def __init__(
        self, options: SourceOptions, store: Store, runtime: Runtime, retrying: Retries
    ) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        self._retrying = retrying
        self._is_known = False  # Whether it is known that the options lead to a topic, or a queue.
        self._topic: Topic | None = None
        self._drain_at = 0.0

    @property
    def topic(self) -> Topic | None:
        """The topic, if the source reads one; one small read when it is asked first."""
        if not self._is_known:
            if self._retrying(reads_topic, self._options, self._store, self._runtime):
                self._topic = Topic.open(
                    self._options.queue, store=self._store, runtime=self._runtime
                )
            self._check_options(self._topic)
            self._is_known = True
        return self._topic

    def names(self) -> list[str]:
        """All partitions there are now; of a topic by one read of its description.

        Raises:
            InvalidInput, QueueReset: The options are about a queue; the topic was replaced.
        """
        return [ONLY] if self.topic is None else self.topic.read().names

    def options_of(self, name: str) -> SourceOptions:
        """What the query asked for, with the queue of one partition."""
        return self._options if self.topic is None else self._options.of_partition(name)

    def check(self, offset: SourceOffset | None) -> None:
        """Refuse a queue's offset for a topic, and a topic's for a queue."""
        if offset is None:
            return
        if self.topic is None:
            # A checkpoint given up for a lost description would give up its positions, too.
            if ONLY not in offset.partitions and (lost := missing_topic_hint(self._store)):
                raise InvalidInput(lost)
            offset.only  # noqa: B018  # raises
        elif ONLY in offset.partitions:
            raise InvalidInput(
                f"the checkpoint is about one queue, and {self._store.url} is a topic with "
                f"{len(self.topic.description.names)} partitions: the checkpoint belongs to "
                "another query. Give this query a checkpointLocation of its own, or name the "
                "queue with the option dataPathPrefix."
            )

    def remove_drained(self, empty: Iterable[str]) -> None:
        """Take drained partitions that are empty out of the topic; a failure is put off.

        Only the consumer of a partition knows that it is done with it.
        """
        topic = self._topic
        if topic is None or not self._options.acknowledge:
            return
        if not set(empty).intersection(topic.description.draining):
            return
        if self._runtime.monotonic() < self._drain_at:
            return
        try:
            if not topic.remove_drained():  # Other readers of a log may take long.
                self._drain_at = self._runtime.monotonic() + REFRESH_S
        except OpenDataBufferError as error:
            log.warning("drained partitions stay in the topic for now: %s", error)

    def _check_options(self, topic: Topic | None) -> None:
        for option, value in (
            ("startingOffsets", self._options.starting_offsets),
            ("endingOffsets", self._options.ending_offsets),
        ):
            if topic is not None and isinstance(value, int):
                raise InvalidInput(
                    f"option {option} is {value}, and {self._store.url} is a topic, each partition "
                    'of which counts for itself: use sequences by partition such as {"0": '
                    f"{value}}}, or name one partition with the option dataPathPrefix"
                )
            if isinstance(value, tuple):
                names = [name for name, _ in value]
                if topic is None:
                    raise InvalidInput(
                        f"option {option} has sequences by partition ({', '.join(names)}), and "
                        f"{self._store.url} with manifest {self._options.queue.manifest_path!r} is "
                        "one queue: use a sequence such as 42"
                    )
                # A partition may have left since the query began, which ignores the option now.
                for name in names:
                    if not topic.description.has_left(name):
                        topic.description.resolved(name)


class MicroBatchStream:
    """Offsets, limits and plans of one run of one query, over all partitions of its source.

    A :class:`~buffer_source.partition_stream.PartitionStream` reads one queue. Here is what they
    share: the trigger's limits, the tasks, and what Spark has committed. Partitions are polled,
    acknowledged and planned at the same time.

    Nothing is claimed before Spark hands over the first offset: a reader that is only made, to
    be pickled or to show its schema, must not fence a running query.
    """

    def __init__(self, options: SourceOptions, store: Store, runtime: Runtime) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        # An error in any call ends the query, so transient ones are retried.
        self._progress = Progress()
        self._retrying = queue_retry(runtime, options.consumer, before_pause=self._progress.retried)
        self._partitions = SourcePartitions(options, store, runtime, self._retrying)
        self._streams: dict[str, PartitionStream] = {}
        self._log = CommitLog()
        self._frozen: list[str] | None = None  # What a run with AvailableNow reads.
        self._left: set[str] = set()  # Partitions of offsets before, closed for good and empty.
        self._idle_at: float | None = None  # When nothing was found, monotonic seconds.
        self._counted: tuple[SourceOffset | None, SourceOffset] | None = None

    def prepare_available_now(self) -> None:
        """Freeze the end of the run: what is queued now, and nothing later."""
        self._frozen = self._partitions.names()
        streams = [self._stream(name) for name in self._frozen]
        in_parallel(self._runtime, PartitionStream.freeze_end, streams)
        self._log.tracking = Tracking.SYNCHRONOUS

    def latest_offset(self, start: SourceOffset | None, *, unlimited: bool = False) -> SourceOffset:
        """The end of the micro-batch behind ``start``; ``start`` itself when nothing waits.

        Partitions that are new are read from their beginning; those that have left the topic
        leave the offset with the next one that is made.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: ``start`` is not a position of this queue any more.
            InvalidInput: ``start`` is about something else than this source reads.
        """
        self._partitions.check(start)
        before: Mapping[str, PartitionOffset] = {} if start is None else start.partitions
        if self._log.handed(start, self._runtime.monotonic()):
            self._acknowledge(before)
        self._await_poll()
        options, limits = self._options, ReadLimits()
        if not unlimited:
            limits = ReadLimits(options.max_batches, options.max_bytes, options.max_records)
        current, polls = self._poll(before, limits, earliest=start is not None)
        names = sorted(polls)
        counts = self._rate_limit(polls, limits)

        def end_offset(name: str) -> PartitionOffset:
            return self._stream(name).end_offset(polls[name], counts[name])

        ends = self._in_parallel(end_offset, [name for name in names if counts[name]])
        # Without a batch to take there is no request, and so no thread.
        ends |= {name: end_offset(name) for name in names if name not in ends}
        moved = [name for name, poll in polls.items() if poll.moves_to(ends[name])]
        self._idle_at = None if moved else self._runtime.monotonic()
        self._partitions.remove_drained(each.name for each in self._streams.values() if each.empty)
        if start is not None and not moved:
            return start
        left = {
            name for name in {*before}.difference(current, moved) if not self._stream(name).backlog
        }
        for name in left:
            self._streams.pop(name).close()
        self._left |= left
        return SourceOffset({name: ends[name] for name in names if name not in left})

    def plan_input_partitions(
        self, start: SourceOffset | None, end: SourceOffset
    ) -> list[TaskBatches]:
        """The tasks of the micro-batch from ``start`` to ``end``.

        The same batches in the same order for equal arguments, in any run. Repeats of a
        transaction that was read already are left out.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: The queue does not have these entries any more.
            InvalidInput: ``end`` is about something else than this source reads.
        """
        self._partitions.check(end)
        self._log.planned(start)
        before: Mapping[str, PartitionOffset] = {} if start is None else start.partitions

        def plan(name: str) -> PartitionPlan:
            return self._stream(name).plan(before.get(name), end.partitions[name])

        plans = self._in_parallel(plan, sorted(end.partitions)).values()
        if (start, end) != self._counted:  # Spark plans once for each scan of the source.
            self._counted = (start, end)
            for each in plans:
                self._progress.planned(each)
        batches = [batch for each in plans for batch in each.batches]
        sizes = [size for each in plans for size in each.sizes]
        return plan_tasks(batches, sizes, self._options)

    def commit(self, end: SourceOffset) -> None:
        """Everything below ``end`` is safe with Spark: let it leave the queues.

        Cumulative and repeatable. A store that does not answer is no failure here: the next
        commit makes up for it.

        Raises:
            Fenced: Another consumer took the queue.
            InvalidInput: ``end`` is about something else than this source reads.
        """
        self._partitions.check(end)
        self._log.committed(end)
        self._acknowledge(end.partitions)

    def report(self) -> dict[str, Any] | None:
        """The source's name, the end and backlog of the queue, and what was read; makes no request.

        Spark shows it as the ``latestOffset`` of the query's progress, the only place that a
        Python source has there. All counts are of this run. ``{"v":1, "source":
        "<store>/<manifest>", "next": first sequence not queued yet, "backlogBatches", "lagMs": age
        of the oldest of them, "batches" and "bytes" planned, "droppedRepeats", "missing",
        "retries"}``; see :class:`Progress`. Of a topic ``next`` is a map, as is
        ``partitionBacklogs`` with those partitions that have one, and ``lagMs`` is the largest.
        """
        streams = sorted(
            (each for each in self._streams.values() if each.opened), key=lambda each: each.name
        )
        if not streams:
            return None
        topic = self._partitions.topic
        key = self._options.queue.manifest_path if topic is None else TOPIC_KEY
        ends = {each.name: each.queue_end for each in streams}
        report = {
            "v": 1,
            "source": f"{self._store.url}/{key}",
            "next": ends if topic is not None else streams[0].queue_end,
            "backlogBatches": sum(each.backlog for each in streams),
            "lagMs": max(each.lag_ms for each in streams),
            **self._progress.to_json(),
        }
        if topic is not None:
            report["partitionBacklogs"] = {
                each.name: each.backlog for each in streams if each.backlog
            }
        return report

    def stop(self) -> None:
        """Stop the collectors and let the queues go; acknowledges nothing."""
        while self._streams:
            self._streams.popitem()[1].close()

    def _stream(self, name: str) -> PartitionStream:
        if name not in self._streams:
            options = self._partitions.options_of(name)
            self._streams[name] = PartitionStream(
                name, options, self._store, self._runtime, self._retrying
            )
        return self._streams[name]

    def _in_parallel(self, function: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
        """What a function returns for each partition, called for all at the same time."""
        return dict(zip(names, in_parallel(self._runtime, function, names), strict=True))

    def _poll(
        self, before: Mapping[str, PartitionOffset], limits: ReadLimits, *, earliest: bool
    ) -> tuple[list[str], dict[str, PollResult]]:
        """Which partitions there are now, and what waits in those and in the ones ``before``."""
        most = MOST_ENTRIES if limits == ReadLimits() else READ_AHEAD
        polls: dict[str, PollResult] = {}
        current: list[str] = []

        def poll(name: str | None) -> None:
            if name is None:
                current.extend(self._partitions.names())
                return
            partitions = len(before) if name in before else len(current)
            share = limits.batches or max(1, most // partitions)
            polls[name] = self._stream(name).poll(before.get(name), share, earliest=earliest)

        first: list[str | None] = [*before]
        if self._frozen is not None:
            current += self._frozen
        elif self._partitions.topic is None:
            current += self._partitions.names()  # no request, so no thread to wait for
        else:
            # At the same time, or every idle trigger would wait for two answers, one by one.
            first.append(None)
        in_parallel(self._runtime, poll, first)
        added = sorted({*current}.difference(before))
        if not earliest:
            # Before one of them is claimed, which fences its consumer.
            in_parallel(self._runtime, lambda name: self._stream(name).check_start(), added)
        in_parallel(self._runtime, poll, added)
        return current, polls

    def _acknowledge(self, ends: Mapping[str, PartitionOffset]) -> None:
        # Spark commits the offset before once more when a partition has left it: opened again for
        # that, it would be claimed, and be shown as a backlog for as long as this run lasts.
        streams = {name: self._stream(name) for name in {*ends}.difference(self._left)}
        due = [name for name in streams if not streams[name].has_acknowledged(ends[name])]
        in_parallel(self._runtime, lambda name: streams[name].acknowledge(ends[name]), due)

    def _rate_limit(self, polls: Mapping[str, PollResult], limits: ReadLimits) -> Mapping[str, int]:
        """How many of the batches that wait in each partition one trigger reads."""
        if limits == ReadLimits():
            return {name: len(poll.waiting) for name, poll in polls.items()}
        # Where the limit is smaller than the number of partitions, those go first that wait
        # longest, and so none waits for ever.
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
        return Counter(each.partition for each in merged[:count])

    def _measured(
        self,
        measure: Callable[[BatchSizes, Sequence[PartitionBatch]], Sequence[int]],
        batches: Sequence[PartitionBatch],
    ) -> Sequence[int]:
        """Sizes or records of batches, measured in all their partitions at the same time."""
        groups: dict[str, list[PartitionBatch]] = {}
        for batch in batches:
            groups.setdefault(batch.partition, []).append(batch)
        measured = self._in_parallel(
            lambda name: iter(measure(self._stream(name).sizes, groups[name])), [*groups]
        )
        return [next(measured[batch.partition]) for batch in batches]

    def _await_poll(self) -> None:
        """Let :data:`POLL_INTERVAL_S` pass between two polls of idle queues.

        Waits and then polls, rather than answering from the last poll: an answer older than
        the call would let ``processAllAvailable()`` return before it saw what was there.
        """
        if self._idle_at is not None and self._frozen is None:
            due = self._idle_at + POLL_INTERVAL_S
            left = due - self._runtime.monotonic()
            if left > 0:
                self._runtime.sleep(left)
