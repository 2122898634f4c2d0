"""The size of waiting batches, the number that a trigger reads, and their division among tasks.

:class:`BatchSizes` asks the store for sizes and records; everything else here is pure. "Partition"
means a partition of a topic here. Spark's ``InputPartition`` is the input of a task,
:class:`TaskBatches`.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from pyspark.sql.datasource import InputPartition

from buffer_source.options import SourceOptions
from buffer_source.partitions import ONLY
from opendata_buffer import errors
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import FOOTER_SIZE, is_confined, parse_footer
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.runtime import Retries, Runtime
from opendata_buffer.stores.base import Blob, Store, exists

OPEN_COST_BYTES = 256 * 1024  # that a task could have read instead of opening one more batch
MIN_TASK_BYTES = 1 * MIB  # below which a second task costs more than it saves
MAX_TASK_BYTES = 256 * MIB  # above which a task is split, so that a retried task repeats little

MIN_PART_BYTES = 16 * MIB
"""Bytes of the smallest part of a batch: each task that shares a batch fetches all of it, and
decodes what lies before its part."""

LIST_INTERVAL_S = 30.0  # between two listings that are made for estimates only
PAGE = 1000  # objects in one listing: as many as S3 gives in one answer
KEEP = 50_000  # remembered sizes of objects which a listing showed and no caller asked for yet
MOST_LISTED = 10_000  # batches whose sizes are listed for estimates; the others count as average
WORTH_LISTING = 16  # batches of unknown size from which on tasks are planned by a listing
UNKNOWN_SIZE = 1 * MIB  # of a batch while no size is known

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Batches, stored bytes and records that one trigger may read; the lowest limit wins."""

    batches: int | None = None
    bytes: int | None = None
    records: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionBatch(BatchDescriptor):
    """A queued batch of one partition, or the part of it that one of several tasks reads.

    Attributes:
        partition: The partition's name in offsets and in the column of that name.
        part: The number of this part, from 0.
        parts: Into how many parts the batch is divided.
    """

    partition: str = ONLY
    part: int = 0
    parts: int = 1

    @classmethod
    def within(cls, partition: str, batch: BatchDescriptor) -> PartitionBatch:
        """Return the batch as one of a partition."""
        return cls(batch.sequence, batch.location, batch.metadata, batch.size, partition=partition)

    def rows(self, count: int) -> range:
        """Return the rows of this part, of ``count`` in the batch: each row is in one part."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)

    def shared_by(self, parts: int) -> list[PartitionBatch]:
        """Return the batch for several tasks, in the order of its rows."""
        if parts == 1:
            return [self]
        return [replace(self, part=part, parts=parts) for part in range(parts)]


class TaskBatches(InputPartition):
    """The batches of one task, of each partition in queue order; Spark pickles them to it."""

    def __init__(self, batches: tuple[PartitionBatch, ...]) -> None:
        super().__init__(batches)
        self.batches = batches


class BatchSizes:
    """Stored sizes (bytes) and record counts of one queue's waiting batches, kept once known.

    Batches outside of the data prefix count as average.
    """

    def __init__(
        self, store: Store, options: SourceOptions, runtime: Runtime, retrying: Retries
    ) -> None:
        self._store = store
        self._options = options
        self._runtime = runtime
        self._retrying = retrying
        self._sizes: dict[str, int | None] = {}  # By location; None: no listing shows it.
        self._asked: dict[int, str] = {}  # Locations that were asked for, by sequence.
        self._records: dict[int, int] = {}
        self._listed_at: float | None = None
        self._average = UNKNOWN_SIZE

    def sizes(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Return stored bytes of each; lists those that are unknown.

        A deleted batch counts as average.
        """
        self._measure(batches)
        return self._known(batches)

    def total(self, batches: Sequence[BatchDescriptor]) -> int | None:
        """Return stored bytes of all, if the size of each is known; makes no request."""
        found = [self._sizes.get(each.location) for each in batches]
        known = [size for size in found if size is not None]
        return sum(known) if len(known) == len(found) else None

    def estimates(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Return sizes as :meth:`sizes`, but list only if that is cheap next to reading them."""
        unknown = sum(1 for each in batches if each.location not in self._sizes)
        # With fewer batches than tasks that the user asked for, it is worth a listing to see
        # whether tasks can share one.
        tasks = max(self._options.cores or 0, self._options.min_partitions or 0)
        worth = 1 if len(batches) < tasks else WORTH_LISTING
        now = self._runtime.monotonic()
        if unknown >= worth and (
            self._listed_at is None or now - self._listed_at >= LIST_INTERVAL_S
        ):
            self._listed_at = now
            # The average will do: do not end the query.
            with suppress(errors.TransientStorageError):
                self._measure(batches[:MOST_LISTED])
        return self._known(batches)

    def records(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Return the records of each, from the footers: a listing does not show them."""
        unknown = [each for each in batches if each.sequence not in self._records]
        if unknown:
            self._measure(unknown)
            counts = self._fetched(self._footer, unknown)
            for each, count in zip(unknown, counts, strict=True):
                self._records[each.sequence] = count
        return [self._records[each.sequence] for each in batches]

    def missing(self, batches: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
        """Return the batches whose object does not exist, by a request for each."""
        exists = self._fetched(self._exists, batches)
        return [each for each, found in zip(batches, exists, strict=True) if not found]

    def forget_before(self, sequence: int) -> None:
        """Forget the sizes of batches that were read."""
        for known in [each for each in self._records if each < sequence]:
            del self._records[known]
        for known in [each for each in self._asked if each < sequence]:
            self._sizes.pop(self._asked.pop(known), None)

    def _known(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        sizes = (self._sizes.get(each.location) for each in batches)
        return [self._average if size is None else size for size in sizes]

    def _measure(self, batches: Sequence[BatchDescriptor]) -> None:
        """List the sizes of those batches that are unknown."""
        self._asked.update((each.sequence, each.location) for each in batches)
        unknown: dict[str, list[str]] = {}
        prefix = self._options.queue.data_path_prefix
        root = f"{prefix}/"
        for each in batches:
            # Listing is reading: a manifest must not make us look elsewhere (failure F23).
            if each.location not in self._sizes and is_confined(each.location, prefix):
                # The data prefix is listed, or one writer's folder below it.
                inner, slash, _ = each.location[len(root) :].partition("/")
                folder = f"{root}{inner}/" if slash else root
                unknown.setdefault(folder, []).append(each.location)
        if not unknown:
            return
        for folder, locations in unknown.items():
            self._list(folder, min(locations), max(locations))
            for location in locations:
                self._sizes.setdefault(location, None)
        if len(self._sizes) > KEEP + len(self._asked):
            kept = {location: self._sizes.get(location) for location in self._asked.values()}
            self._sizes = kept
        sizes = [size for size in self._sizes.values() if size is not None]
        if sizes:
            self._average = sum(sizes) // len(sizes)

    def _list(self, folder: str, first: str, last: str) -> None:
        after = first[:-1]  # Sorts before `first`, and behind all that is before it.
        while True:
            listing = self._retrying(self._store.list, folder, start_after=after, limit=PAGE)
            self._sizes.update((each.key, each.size) for each in listing.objects)
            if not listing.truncated or listing.objects[-1].key >= last:
                return
            after = listing.objects[-1].key

    def _fetched(
        self, fetch: Callable[[BatchDescriptor], T], batches: Sequence[BatchDescriptor]
    ) -> Iterator[T]:
        """Make one small request for each batch, several at the same time."""
        from opendata_buffer.consumer.fetch import fetch_many  # 10 ms, and most plans need none

        return fetch_many(
            lambda batch: self._retrying(fetch, batch),
            batches,
            max_in_flight_bytes=UNKNOWN_SIZE,
            runtime=self._runtime,
            size_of=lambda _: 1,
        )

    def _footer(self, batch: BatchDescriptor) -> int:
        size = self._sizes.get(batch.location)
        if size is None or size < FOOTER_SIZE:
            return 0  # The task that reads it raises the error, with its advice.
        try:
            got = self._store.get(batch.location, byte_range=(size - FOOTER_SIZE, size))
            return parse_footer(got.data).record_count if isinstance(got, Blob) else 0
        except (errors.ObjectNotFound, errors.CorruptBatch):
            return 0

    def _exists(self, batch: BatchDescriptor) -> bool:
        try:
            return exists(self._store, batch.location)
        except (errors.InvalidInput, errors.CorruptData):
            return True  # Foreign or damaged: the task that reads it raises the error.


def rate_limit(
    batches: Sequence[T],
    limits: ReadLimits,
    sizes: Callable[[Sequence[T]], Sequence[int]],
    records: Callable[[Sequence[T]], Sequence[int]],
    *,
    chunk: int = 64,
) -> int:
    """Return how many of the batches that wait, from the front, one trigger reads.

    Limits are soft: a first batch larger than one would otherwise stop the stream for good.

    Args:
        batches: The batches that wait, in order.
        limits: What one trigger may read.
        sizes: Returns stored bytes of batches; asked for ``chunk`` batches together, because it
            makes requests, and for no more of them than the limits may admit.
        records: Returns records of batches, as ``sizes``.
        chunk: Batches that are measured together.
    """
    most = len(batches) if limits.batches is None else min(len(batches), limits.batches)
    if limits.bytes is None and limits.records is None:
        return most
    total_bytes = total_records = 0
    for begin in range(0, most, chunk):
        part = batches[begin : min(most, begin + chunk)]
        part_sizes = sizes(part) if limits.bytes is not None else [0] * len(part)
        part_records = records(part) if limits.records is not None else [0] * len(part)
        for index, (size, count) in enumerate(zip(part_sizes, part_records, strict=True), begin):
            total_bytes += size
            total_records += count
            over = (limits.bytes is not None and total_bytes > limits.bytes) or (
                limits.records is not None and total_records > limits.records
            )
            if over and index > 0:
                return index
    return most


def interleave(lengths: Sequence[int], backlogs: Sequence[int]) -> Iterator[int]:
    """Yield the order in which a trigger takes batches from queues, as indices of queues.

    Wherever it is cut, each queue has a share in proportion to its backlog, and at least one batch
    before any has two. Equal queues are taken in the order they are given.

    Args:
        lengths: Batches that may be taken of each queue.
        backlogs: Batches that wait in each, which may be more.
    """
    heap = [(0.0, index, 0) for index, length in enumerate(lengths) if length]
    while heap:
        _, index, taken = heap[0]
        yield index
        taken += 1
        if taken < lengths[index]:
            heapq.heapreplace(heap, (taken / max(1, backlogs[index]), index, taken))
        else:
            heapq.heappop(heap)


def plan_tasks(
    batches: Sequence[PartitionBatch], sizes: Sequence[int], options: SourceOptions
) -> list[TaskBatches]:
    """Divide batches, in the order they are read, among tasks; several share a very large one.

    A batch is shared from one and a half shares of a task on: below that, reading all of it twice
    costs more than the other tasks save.
    """
    # A source does not get the size of the cluster from Spark.
    parallelism = options.cores or options.min_partitions or os.cpu_count() or 1
    wanted = max(parallelism, options.min_partitions or 1)
    share = max(MIN_PART_BYTES, _share(sum(sizes), wanted))
    parts: list[PartitionBatch] = []
    part_sizes: list[int] = []
    for batch, size in zip(batches, sizes, strict=True):
        count = max(1, (2 * size + share) // (2 * share))
        parts += batch.shared_by(count)
        part_sizes += [size // count] * count
    later = {index for index, each in enumerate(parts) if each.part}
    packed = pack(parts, part_sizes, parallelism, options.min_partitions, begins=later)
    return [TaskBatches(each) for each in packed]


def _share(total: int, parallelism: int) -> int:
    """Return the bytes of a task, so that tasks fill whole rounds and no core waits in the last."""
    rounds = max(1, -(-total // (parallelism * MAX_TASK_BYTES)))
    return -(-total // (parallelism * rounds))


def pack(
    batches: Sequence[T],
    sizes: Sequence[int],
    parallelism: int,
    at_least: int | None = None,
    *,
    begins: Container[int] = (),
) -> list[tuple[T, ...]]:
    """Divide batches among tasks: contiguous, in order, of about equal cost.

    Args:
        batches: The batches, in the order they are read.
        sizes: Stored bytes of each.
        parallelism: Tasks that run at the same time.
        at_least: Make this many tasks while there are batches for them.
        begins: Indices at which a task begins: no task reads two parts of one batch, because it
            would fetch the batch twice.
    """
    if not batches:
        return []
    costs = [max(size, OPEN_COST_BYTES) for size in sizes]
    left = sum(costs)
    share = max(MIN_TASK_BYTES, _share(left, parallelism))
    open_tasks = min(len(batches), max(-(-left // share), at_least or 1))
    packed: list[tuple[T, ...]] = []
    begin, spent = 0, 0
    for index, cost in enumerate(costs):
        # A batch belongs to the task its middle falls into; and every task gets one batch.
        past = (2 * spent + cost) * open_tasks >= 2 * left
        full = open_tasks > 1 and (past or len(batches) - index < open_tasks)
        if index > begin and (full or index in begins):
            packed.append(tuple(batches[begin:index]))
            left -= spent
            begin, spent, open_tasks = index, 0, open_tasks - 1
            if not full:  # The task ends before it has its share.
                open_tasks = max(open_tasks, -(-left // share))
        spent += cost
    packed.append(tuple(batches[begin:]))
    return packed
