"""Turns Spark's calls into offsets and task plans, for one run of one query. No Spark in it.

Every answer is a function of the offsets Spark hands over and of the manifests; what is kept
between calls only saves requests. So a replay after a crash, which calls
:meth:`StreamDriver.plan` first, needs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from buffer_source.batches import PartitionBatch, tasks_of
from buffer_source.commit_log import CommitLog
from buffer_source.offsets import Position, SourceOffset
from buffer_source.options import QUARANTINE, SourceOptions
from buffer_source.partition import READ_AHEAD, Part, PollResult
from buffer_source.partitions import Partitions
from buffer_source.planner import Limits, admit, interleave
from buffer_source.progress import Progress
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.queue.ownership import TOPIC_KEY
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["StreamDriver"]


class StreamDriver:
    """Offsets, limits and plans of one run of one query, over all partitions of its source.

    What concerns one queue is its :class:`~buffer_source.partition.PartitionStream`'s; here is
    what they share: the trigger's limits, the tasks, and what Spark has committed. Partitions
    are looked at, acknowledged and planned at the same time.

    Nothing is claimed before Spark hands over the first offset: a reader that is only made, to
    be pickled or to look at its schema, must not fence a running query.

    Args:
        options: What the query asked for.
        store: The opened store.
        runtime: Clock, sleep and threads.
    """

    def __init__(self, options: SourceOptions, store: Store, runtime: Runtime) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        # An error in any call ends the query, so what may pass is waited for.
        self._progress = Progress()
        self._patient = queue_retry(runtime, options.consumer, before_pause=self._progress.retried)
        self._partitions = Partitions(options, store, runtime, self._patient)
        self._log = CommitLog()
        self._frozen: list[str] | None = None  # What a run with AvailableNow reads.
        self._left: set[str] = set()  # Partitions of offsets before, closed for good and empty.
        self._idle_at: float | None = None  # When nothing was found, monotonic seconds.
        self._counted: tuple[SourceOffset | None, SourceOffset] | None = None
        self._quarantine_known = False  # Whether no task ran since the quarantine was looked at.

    def prepare_available_now(self) -> None:
        """Freeze the end of the run: what is queued now, and nothing later."""
        self._frozen = self._partitions.names()
        streams = [self._partitions.stream(name) for name in self._frozen]
        in_parallel(self._runtime, lambda stream: stream.freeze(), streams)
        self._log.available_now()

    def latest(self, start: SourceOffset | None, *, unlimited: bool = False) -> SourceOffset:
        """The end of the next micro-batch; ``start`` itself when nothing waits.

        Partitions that are new are read from their beginning; those that have left the topic
        leave the offset when there is one to be made.

        Args:
            start: Where the last micro-batch ended; None for a new query.
            unlimited: Ignore the limits per trigger.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: ``start`` is not a position of this queue any more.
            InvalidInput: ``start`` is about something else than this source reads.
        """
        self._partitions.check(start)
        before: Mapping[str, Position] = {} if start is None else start.partitions
        if self._log.handed(start, self._runtime.monotonic()):
            self._acknowledge(before)
        self._await_poll()
        options = self._options
        limits = (
            Limits()
            if unlimited
            else Limits(options.max_batches, options.max_bytes, options.max_records)
        )
        current, looks = self._look(before, limits, earliest=start is not None)
        names = sorted(looks)
        self._look_at_quarantine(names)
        counts: Mapping[str, int] = self._patient(self._admitted, looks, limits)

        def end_of(name: str) -> Position:
            return self._partitions.stream(name).end_of(looks[name], counts[name])

        taken = [name for name in names if counts[name]]
        ends = dict(zip(taken, in_parallel(self._runtime, end_of, taken), strict=True))
        ends |= {name: end_of(name) for name in names if name not in ends}  # no request, no thread
        moved = [name for name, look in looks.items() if look.moves_to(ends[name])]
        self._idle_at = None if moved else self._runtime.monotonic()
        self._partitions.let_drained_leave()
        if start is not None and not moved:
            return start
        left = {
            name
            for name in {*before}.difference(current, moved)
            if not self._partitions.stream(name).backlog
        }
        self._partitions.close(left)
        self._left |= left
        return SourceOffset({name: ends[name] for name in names if name not in left})

    def plan(
        self, start: SourceOffset | None, end: SourceOffset
    ) -> list[tuple[PartitionBatch, ...]]:
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
        before: Mapping[str, Position] = {} if start is None else start.partitions
        names = sorted(end.partitions)

        def part_of(name: str) -> Part:
            return self._partitions.stream(name).plan(before.get(name), end.partitions[name])

        parts = in_parallel(self._runtime, part_of, names)
        if (start, end) != self._counted:  # Spark plans once for each scan of the source.
            self._counted = (start, end)
            self._quarantine_known = False
            for part in parts:
                self._progress.planned(len(part.batches), part.total, part.missing, part.repeats)
        options = self._options
        batches = [batch for part in parts for batch in part.batches]
        sizes = [size for part in parts for size in part.sizes]
        return tasks_of(batches, sizes, options)

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
        """What the source is, how far the queue reaches, and what was read; makes no request.

        Spark shows it as the ``latestOffset`` of the query's progress: a Python source has no
        other place there, neither for metrics nor for a description. All counts are of this
        run. ``{"v":1, "source": "<store>/<manifest>", "next": first sequence not queued yet,
        "backlogBatches", "lagMs": age of the oldest of them, "batches" and "bytes" planned,
        "droppedRepeats", "missing", "quarantined", "retries"}``; see
        :class:`~buffer_source.progress.Progress`. Of a topic ``next`` is a map, as is
        ``partitionBacklogs`` with those partitions that have one, and ``lagMs`` is the largest.
        """
        streams = sorted(self._partitions.opened, key=lambda each: each.name)
        if not streams:
            return None
        topic = self._partitions.topic
        key = self._options.queue.manifest_path if topic is None else TOPIC_KEY
        ahead = {each.name: each.ahead for each in streams}
        self._progress.quarantined = sum(each.quarantined for each in streams)
        report = {
            "v": 1,
            "source": f"{self._store.url}/{key}",
            "next": ahead if topic is not None else streams[0].ahead,
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
        self._partitions.close()

    def _look(
        self, before: Mapping[str, Position], limits: Limits, *, earliest: bool
    ) -> tuple[list[str], dict[str, PollResult]]:
        """Which partitions there are now, and what waits in those and in the ones ``before``."""
        looks: dict[str, PollResult] = {}
        read_ahead = max(1, READ_AHEAD // max(1, len(before)))
        current: list[str] = []

        def look(name: str | None) -> None:
            if name is None:
                current.extend(self._partitions.names())
                return
            looks[name] = self._partitions.stream(name).look(
                before.get(name), limits, read_ahead=read_ahead, earliest=earliest
            )

        first: list[str | None] = [*before]
        if self._frozen is not None:
            current += self._frozen
        elif self._partitions.topic is None:
            current += self._partitions.names()  # no request, so no thread to wait for
        else:
            # At the same time, or every idle trigger would wait for two answers, one by one.
            first.append(None)
        in_parallel(self._runtime, look, first)
        in_parallel(self._runtime, look, sorted({*current}.difference(before)))
        return current, looks

    def _acknowledge(self, ends: Mapping[str, Position]) -> None:
        # Spark commits the offset before once more when a partition has left it: opened again for
        # that, it would be claimed, and be shown as a backlog for as long as this run lasts.
        streams = {name: self._partitions.stream(name) for name in {*ends}.difference(self._left)}
        due = [name for name in streams if not streams[name].has_acknowledged(ends[name])]
        in_parallel(self._runtime, lambda name: streams[name].acknowledge(ends[name]), due)

    def _admitted(self, looks: Mapping[str, PollResult], limits: Limits) -> Mapping[str, int]:
        """How many of the batches that wait in each partition one trigger reads."""
        if limits == Limits():
            return {name: len(look.waiting) for name, look in looks.items()}
        # Where the limit is smaller than the number of partitions, those go first that wait
        # longest, and so none waits for ever.
        names = sorted(looks, key=lambda name: -self._partitions.stream(name).lag_ms)
        lengths = [len(looks[name].waiting) for name in names]
        backlogs = [self._partitions.stream(name).backlog for name in names]
        most = sum(lengths) if limits.batches is None else limits.batches
        taken = Counter[str]()
        merged: list[PartitionBatch] = []
        for index in interleave(lengths, backlogs):
            if len(merged) >= most:
                break
            name = names[index]
            merged.append(PartitionBatch.within(name, looks[name].waiting[taken[name]]))
            taken[name] += 1

        def sizes(batches: Sequence[PartitionBatch]) -> Sequence[int]:
            return self._measured("sizes", batches)

        def records(batches: Sequence[PartitionBatch]) -> Sequence[int]:
            return self._measured("records", batches)

        count = admit(merged, limits, sizes, records)
        return Counter(each.partition for each in merged[:count])

    def _measured(self, what: str, batches: Sequence[PartitionBatch]) -> Sequence[int]:
        """Sizes or records of batches, looked up in all their partitions at the same time."""
        groups: dict[str, list[int]] = {}
        for index, batch in enumerate(batches):
            groups.setdefault(batch.partition, []).append(index)

        def measure(name: str) -> Sequence[int]:
            found: Sequence[int] = getattr(self._partitions.stream(name).measures, what)(
                [batches[index] for index in groups[name]]
            )
            return found

        measured = [0] * len(batches)
        for name, found in zip(groups, in_parallel(self._runtime, measure, groups), strict=True):
            for index, value in zip(groups[name], found, strict=True):
                measured[index] = value
        return measured

    def _look_at_quarantine(self, names: Sequence[str]) -> None:
        """Count the batches in quarantine, once after each micro-batch that may have added one."""
        if self._options.corrupt_batches == QUARANTINE and not self._quarantine_known:
            counted = in_parallel(
                self._runtime,
                lambda name: self._partitions.stream(name).count_quarantine(),
                names,
            )
            self._quarantine_known = all(counted)

    def _await_poll(self) -> None:
        """Let ``pollIntervalMs`` pass between two looks at idle queues.

        Waits and then looks, rather than answering from the last look: an answer older than
        the call would let ``processAllAvailable()`` return before it saw what was there.
        """
        if self._idle_at is not None and self._frozen is None:
            due = self._idle_at + self._options.poll_interval_ms / 1000
            left = due - self._runtime.monotonic()
            if left > 0:
                self._runtime.sleep(left)
