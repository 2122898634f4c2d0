"""The streaming source: Spark's calls, and the offsets and tasks that answer them.

For each source of a query Spark makes one :class:`BufferStreamReader` in a process of its own
beside the driver, and another that it pickles into every task. Its runner may be of another copy of
pyspark than the one that is imported here. So its classes are known by their names, and no version
of Spark is compared.

Every answer of a :class:`MicroBatchStream` is a function of the offsets Spark hands over and of the
manifests; what is kept between calls only saves requests. So a replay after a crash, which plans
first, needs nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import make_dataclass
from enum import Enum
from importlib import import_module
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from buffer_source.options import SKIP_LOSS, SourceOptions
from buffer_source.partition_stream import (
    MOST_ENTRIES,
    READ_AHEAD,
    PartitionPlan,
    PartitionStream,
    PollResult,
)
from buffer_source.partitions import INITIAL, PartitionOffset, SourceOffset, SourcePartitions
from buffer_source.planner import (
    BatchSizes,
    PartitionBatch,
    ReadLimits,
    TaskBatches,
    interleave,
    plan_tasks,
    rate_limit,
)
from buffer_source.schema import check_not_inferred, check_schema
from opendata_buffer import metrics
from opendata_buffer.errors import DataLoss, Fenced, InvalidInput
from opendata_buffer.queue.neighbours import TOPIC_KEY
from opendata_buffer.queue.queue import removed_before
from opendata_buffer.runtime import Runtime, SystemRuntime, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)

Json = dict[str, Any]

M_ARENA_MAX = -8  # of glibc's malloc.h: how many heaps a process may have

FIRST_BATCH_LOGGED_S = 60.0  # idle, after which a run's first batch counts as being in the log
POLL_INTERVAL_S = 0.1  # at least between two polls of an idle queue

COMMITS_THAT_PROVE = 2
"""Commits in a row, each where a normal query makes it, that prove synchronous tracking: another
thread would have to write its log each time between two statements of Spark's main thread."""

T = TypeVar("T")


Tracking = Enum("Tracking", ("UNKNOWN", "SYNCHRONOUS", "ASYNCHRONOUS"))
"""How the query keeps its progress."""


class CommitLog:
    """What Spark's commit log certainly holds, by the order of Spark's calls in one run.

    ``commit(end)`` proves that ``end`` is in it, but comes only with the next batch that has data.
    ``latestOffset(start)`` proves it of ``start``, unless the query tracks its progress
    asynchronously (decision 0006). A normal query calls ``commit(start)`` between
    ``latestOffset(start)`` and ``partitions(start, end)``, always. With asynchronous tracking
    ``commit`` follows the log's writes, some batches later; one that ends in time proves nothing
    yet. The log is always written for the first batch of a run, in the background, so after some
    idle time it is on record.
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
        """``partitions(start, end)`` was called."""
        if self._planned_from == (start,):
            return  # The second of two scans of the source, as in a union, proves nothing.
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


class MicroBatchStream:
    """Offsets, limits and plans of one run of one query, over all partitions of its source.

    Partitions are polled, acknowledged and planned at the same time. Nothing is claimed before
    Spark hands over the first offset: a reader that is only made, to be pickled or to show its
    schema, must not fence a running query.
    """

    def __init__(self, options: SourceOptions, store: Store, runtime: Runtime) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        # An error in any call ends the query, so transient ones are retried.
        self._retrying = options.consumer.retries(runtime, before_pause=self._count_retry)
        names = ("batches", "bytes", "droppedRepeats", "missing", "retries")
        self._counts: dict[str, Any] = dict.fromkeys(names, 0)  # of this run, as in :meth:`report`
        self._partitions = SourcePartitions(options, store, runtime)
        self._streams: dict[str, PartitionStream] = {}
        self._log = CommitLog()
        self._warned = False
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
        leave the offset with the next one that is made. Raises Fenced for another consumer,
        DataLoss or QueueReset for a position that is not queued, InvalidInput for another source's.
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
        if start is None:
            self._warn_of_removed()
        if self._options.reader:
            # Before Spark gets a record: a topic that is expanded from now on has this reader.
            is_new = any(each.newly_registered for each in self._streams.values())
            self._retrying(self._partitions.register_reader, is_new)
        names = sorted(polls)
        counts = self._rate_limit(polls, limits)

        def end_offset(name: str) -> PartitionOffset:
            return self._stream(name).end_offset(polls[name], counts[name])

        ends = self._in_parallel(end_offset, [name for name in names if counts[name]])
        # Without a batch to take there is no request, and so no thread.
        ends |= {name: end_offset(name) for name in names if name not in ends}
        moved = [name for name, poll in polls.items() if poll.fixed or ends[name].next > poll.begin]
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
        """The tasks of the micro-batch from ``start`` to ``end``, in any run the same.

        Repeats of a transaction that was read are left out. Raises as :meth:`latest_offset`.
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
                self._count(each)
        batches = [batch for each in plans for batch in each.batches]
        sizes = [size for each in plans for size in each.sizes]
        return plan_tasks(batches, sizes, self._options)

    def commit(self, end: SourceOffset) -> None:
        """Everything below ``end`` is safe with Spark: let it leave the queues.

        A store that does not answer is no failure here: the next commit makes up for it. Raises
        Fenced for another consumer, InvalidInput for another source's offset.
        """
        self._partitions.check(end)
        self._log.committed(end)
        self._acknowledge(end.partitions)

    def report(self) -> dict[str, Any] | None:
        """The source's name, the end and backlog of the queue, and what was read; makes no request.

        Spark shows it as the ``latestOffset`` of the query's progress, the only place that a Python
        source has there. Stored ``"bytes"`` are null where the size of a batch is not known: sizes
        are looked up for ``maxBytesPerTrigger`` and large micro-batches only. Of a topic ``next``
        is a map, as is ``partitionBacklogs`` with those partitions that have one, and ``lagMs`` is
        the largest.
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
            **self._counts,
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

    def _warn_of_removed(self) -> None:
        """Warn once if batches of a queue were removed before this new query began with the oldest
        ones. Without the warning a new checkpoint looks like a way to read everything again."""
        removed = sum(each.removed for each in self._streams.values())
        if removed and not self._warned:
            self._warned = True
            log.warning(
                "%s", removed_before(removed, self._store.url, self._options.queue, "this query")
            )

    def _count_retry(self) -> None:
        self._counts["retries"] += 1

    def _count(self, plan: PartitionPlan) -> None:
        """Count what a micro-batch reads of one partition."""
        counts, repeats = self._counts, plan.repeats
        counts["batches"] += len(plan.batches)
        if counts["bytes"] is not None:  # None once the size of one batch was not known.
            counts["bytes"] = None if plan.total is None else counts["bytes"] + plan.total
        counts["missing"] += plan.missing
        counts["droppedRepeats"] += len(repeats)
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

    def _stream(self, name: str) -> PartitionStream:
        if name not in self._streams:
            options = self._partitions.options_of(name)
            self._streams[name] = PartitionStream(
                name, options, self._store, self._runtime, self._retrying
            )
        return self._streams[name]

    def _in_parallel(self, function: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
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
        due = [name for name in streams if streams[name].acknowledged != ends[name]]
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

        An answer from the last poll, older than the call, would let ``processAllAvailable()``
        return before it saw what was there.
        """
        if self._idle_at is not None and self._frozen is None:
            left = self._idle_at + POLL_INTERVAL_S - self._runtime.monotonic()
            if left > 0:
                self._runtime.sleep(left)


# Spark's runner knows a limit by the name and the field of its class.
ReadAllAvailable = make_dataclass("ReadAllAvailable", [], frozen=True)
ReadMaxRows = make_dataclass("ReadMaxRows", [("max_rows", int)], frozen=True)
ReadMaxFiles = make_dataclass("ReadMaxFiles", [("max_files", int)], frozen=True)
ReadMaxBytes = make_dataclass("ReadMaxBytes", [("max_bytes", int)], frozen=True)


class UntoldStart:
    """Where the next micro-batch starts, for a Spark that calls ``latestOffset()`` without it.

    It starts where the last planned one ended (decision 0031). Until Spark has planned an end, it
    gets the same one again: what it wrote into its log is the answer that it heard last.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._start: Json = dict(INITIAL)
        self._end: Json | None = None

    def latest(self, end_of: Callable[[Json], Json]) -> Json:
        """The end of the next micro-batch; ``end_of`` finds it for a start."""
        self.is_used = True
        if self._end is None or self._end == self._start:
            self._end = end_of(self._start)
        return self._end

    def planned(self, start: Json, end: Json) -> None:
        """Spark plans a micro-batch; InvalidInput if it had another answer for its end.

        Batches might be repeated or passed by. Spark has not logged that answer yet, since a
        restart plans first.
        """
        if self._end is not None and (start, end) != (self._start, self._end):
            raise InvalidInput(
                f"Spark plans a micro-batch from {start} to {end}, and this source had answered "
                f"{self._end} for the start {self._start}. Nothing was read. Spark 4.0, 4.1 and "
                "Databricks before 18.1 do not tell a source where to start: leave the setting "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled off, and start the query "
                "again"
            )
        self._start, self._end = end, None


def know_engine(schema: StructType) -> None:
    """Let the runner that made ``schema`` see that the reader supports Trigger.AvailableNow.

    It asks for an instance of its own class, which Spark 4.0 and 4.1 lack, and which is not that of
    the pyspark here where Databricks runs a copy under another name.
    """
    for package in {"pyspark", type(schema).__module__.partition(".")[0]}:
        try:
            module = import_module(f"{package}.sql.streaming.datasource")
        except ImportError:
            continue
        module.SupportsTriggerAvailableNow.register(BufferStreamReader)


class BufferStreamReader(DataSourceStreamReader):
    """Streams a buffer, each batch once."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.check_stream()
        check_not_inferred(schema)
        check_schema(schema, options.values)
        self._options = options
        self._schema = schema
        self._micro_batches: MicroBatchStream | None = None
        self._untold = UntoldStart()

    def __getstate__(self) -> dict[str, Any]:
        # Tasks read; positions and the consumer stay with the driver.
        return {**self.__dict__, "_micro_batches": None}

    def initialOffset(self) -> dict[str, Any]:
        """A fixed sentinel: Spark asks twice and stores the answer nowhere."""
        return dict(INITIAL)

    def getDefaultReadLimit(self) -> Any:
        """Spark's name for the limit, for its progress; all limits are applied in latestOffset."""
        options = self._options
        kinds = (ReadMaxFiles, ReadMaxBytes, ReadMaxRows)
        limits = (options.max_batches, options.max_bytes, options.max_records)
        given = (kind(most) for kind, most in zip(kinds, limits, strict=True) if most is not None)
        return next(given, ReadAllAvailable())

    def prepareForTriggerAvailableNow(self) -> None:
        """Read what is queued now and stop."""
        with _with_advice():
            self._stream().prepare_available_now()

    def latestOffset(self, start: Json | None = None, limit: object = None) -> Json:
        """The end of the next micro-batch; ``start`` itself when nothing waits.

        ``start`` is None by Spark 4.0 and 4.1, and ``limit`` Spark's ``ReadAllAvailable`` where
        all is to be read.
        """
        with _with_advice():
            if start is not None:
                # Given back only where no limit is set, or by Trigger.Once, which has none.
                return self._latest(start, unlimited=type(limit).__name__ == "ReadAllAvailable")
            limits = not isinstance(self.getDefaultReadLimit(), ReadAllAvailable)
            if limits and not self._untold.is_used:
                log.warning(
                    "this Spark does not tell a Python source its trigger: with "
                    "Trigger.AvailableNow or Trigger.Once a run reads one micro-batch, not more "
                    "than the limits allow. Leave the limits out, or start the run again until "
                    "nothing is left"
                )
            return self._untold.latest(lambda start: self._latest(start, unlimited=False))

    def _latest(self, start: Json, *, unlimited: bool) -> Json:
        position = SourceOffset.from_json(start)
        end = self._stream().latest_offset(position, unlimited=unlimited)
        return start if end == position else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Backlog and lag, for the query's progress."""
        return self._stream().report()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch; a replay gets the same ones."""
        with _with_advice():
            until = SourceOffset.from_json(end)
            if until is None:
                return []
            self._untold.planned(start, end)
            if start == end:
                # At a restart Spark 4.0 and 4.1 plan this first, also for an end that is not in the
                # commit log: to open the queue there would acknowledge what is still to be read.
                return []
            begin = SourceOffset.from_json(start)
            return self._stream().plan_input_partitions(begin, until)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Fetch, decode and cut the batches of one task. Runs on an executor."""
        from buffer_source.task import read_partition  # not where Spark plans

        return read_partition(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """The batches before ``end`` may leave the queue."""
        with _with_advice():
            position = SourceOffset.from_json(end)
            if position is not None:
                self._stream().commit(position)

    def stop(self) -> None:
        """Stop the collector. Spark mostly ends the process instead."""
        if self._micro_batches is not None:
            self._micro_batches.stop()

    def _stream(self) -> MicroBatchStream:
        if self._micro_batches is None:
            _reserve_less_memory()
            queue = self._options.queue
            store = open_store(queue.store, queue.store_options)
            self._micro_batches = MicroBatchStream(self._options, store, SystemRuntime())
        return self._micro_batches


def _reserve_less_memory() -> None:
    """Let threads share one heap where the address space is limited (PYSPARK_PLANNER_MEMORY_MB).

    glibc reserves up to 128 MiB of it for the heap of each thread, and 8 MiB for its stack.
    """
    try:
        resource, ctypes = import_module("resource"), import_module("ctypes")
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            threading.stack_size(1 << 20)
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except (ImportError, AttributeError):
        pass  # another C library, or no Unix


_ONE_LOAD = (
    "Spark reads a DataFrame that is joined with itself as two sources. load() it once in a query; "
    "that DataFrame may be used several times in a union. Join within foreachBatch, where a "
    "micro-batch can be joined with itself."
)
_FENCED_QUEUE = (
    "Another streaming query or consumer reads this queue, or this query loads the queue twice. "
    f"{_ONE_LOAD} Use one query for each queue. To look at a queue that another query reads, set "
    "the option acknowledge to false."
)
_FENCED_READER = (
    "Or this query loads the log twice by one name: in that case give each load() its own option "
    f"reader. {_ONE_LOAD}"
)


@contextmanager
def _with_advice() -> Iterator[None]:
    """Add to an error of the library what it means in a query."""
    try:
        yield
    except Fenced as error:
        error.args = (f"{error} {_FENCED_QUEUE if error.reader is None else _FENCED_READER}",)
        raise
    except MemoryError as error:
        error.args = (
            "the memory of the process that plans the query is used up. Each batch that waits in "
            "the manifest takes 0.2 kB there, and each that one micro-batch reads 0.9 kB: set "
            "the option maxBatchesPerTrigger, or raise the limit, the setting "
            "spark.sql.planner.pythonExecution.memory",
        )
        raise
    except DataLoss as error:
        error.args = (f"{error} {SKIP_LOSS}",)
        raise
