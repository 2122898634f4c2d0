"""Measure waiting batches, limit how many a trigger reads, and divide them among tasks.

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

OPEN_COST_BYTES = 256 * 1024  # Opening a batch takes as long as reading this many bytes.
MIN_TASK_BYTES = 1 * MIB  # For less than this, a second task costs more than it saves.
MAX_TASK_BYTES = 256 * MIB  # Larger tasks are split, so that a retried task repeats little.

MIN_PART_BYTES = 16 * MIB
"""Bytes of the smallest part of a batch that tasks share. Each of these tasks fetches the whole
batch, and decodes everything before its part."""

LIST_INTERVAL_S = 30.0  # Between two listings that are made only for estimates.
PAGE = 1000  # Objects in one listing: the most that S3 returns in one answer.
KEEP = 50_000  # Sizes kept of listed objects that no caller has asked for yet.
MOST_LISTED = 10_000  # Batches listed for estimates; all others count as average.
WORTH_LISTING = 16  # Plan tasks with a listing if at least this many sizes are unknown.
UNKNOWN_SIZE = 1 * MIB  # Assumed for a batch while no size is known.

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
        """Return the rows of this part, out of ``count`` in the batch; each row is in one part."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)

    def shared_by(self, parts: int) -> list[PartitionBatch]:
        """Return the batch as parts for several tasks, in the order of its rows."""
        if parts == 1:
            return [self]
        return [replace(self, part=part, parts=parts) for part in range(parts)]


class TaskBatches(InputPartition):
    """The batches of one task, in queue order within each partition; Spark pickles them."""

    def __init__(self, batches: tuple[PartitionBatch, ...]) -> None:
        super().__init__(batches)
        self.batches = batches


class BatchSizes:
    """Stored sizes (bytes) and record counts of one queue's waiting batches.

    They are kept once known. Batches outside the data prefix count as average.
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
        """Return the stored bytes of each batch; list those that are unknown.

        A deleted batch counts as average.
        """
        self._measure(batches)
        return self._known(batches)

    def total(self, batches: Sequence[BatchDescriptor]) -> int | None:
        """Return the stored bytes of all batches; None if a size is unknown. Makes no request."""
        found = [self._sizes.get(each.location) for each in batches]
        known = [size for size in found if size is not None]
        return sum(known) if len(known) == len(found) else None

    def estimates(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Return sizes like :meth:`sizes`, but list only if that is cheap compared to reading."""
        unknown = sum(1 for each in batches if each.location not in self._sizes)
        # If the user asked for more tasks than there are batches, a listing is worth its cost: it
        # shows whether tasks can share a batch.
        tasks = max(self._options.cores or 0, self._options.min_partitions or 0)
        worth = 1 if len(batches) < tasks else WORTH_LISTING
        now = self._runtime.monotonic()
        if unknown >= worth and (
            self._listed_at is None or now - self._listed_at >= LIST_INTERVAL_S
        ):
            self._listed_at = now
            # Estimates can use the average instead, so do not end the query.
            with suppress(errors.TransientStorageError):
                self._measure(batches[:MOST_LISTED])
        return self._known(batches)

    def records(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Return the record count of each batch, from its footer: a listing does not show it."""
        unknown = [each for each in batches if each.sequence not in self._records]
        if unknown:
            self._measure(unknown)
            counts = self._fetched(self._footer, unknown)
            for each, count in zip(unknown, counts, strict=True):
                self._records[each.sequence] = count
        return [self._records[each.sequence] for each in batches]

    def missing(self, batches: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
        """Return the batches whose object does not exist; makes a request for each batch."""
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
        """List the sizes of the batches that are unknown."""
        self._asked.update((each.sequence, each.location) for each in batches)
        unknown: dict[str, list[str]] = {}
        prefix = self._options.queue.data_path_prefix
        root = f"{prefix}/"
        for each in batches:
            # A listing reads as well: a manifest must not lead us elsewhere (failure F23).
            if each.location not in self._sizes and is_confined(each.location, prefix):
                # List the data prefix, or one writer's folder in it.
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
        after = first[:-1]  # Sorts before `first`, after all objects before it.
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
        from opendata_buffer.consumer.fetch import fetch_many  # Takes 10 ms; rarely needed.

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
            return 0  # The task that reads the batch raises the error, with advice.
        try:
            got = self._store.get(batch.location, byte_range=(size - FOOTER_SIZE, size))
            return parse_footer(got.data).record_count if isinstance(got, Blob) else 0
        except (errors.ObjectNotFound, errors.CorruptBatch):
            return 0

    def _exists(self, batch: BatchDescriptor) -> bool:
        try:
            return exists(self._store, batch.location)
        except (errors.InvalidInput, errors.CorruptData):
            return True  # Foreign or damaged: the task that reads the batch raises the error.


def rate_limit(
    batches: Sequence[T],
    limits: ReadLimits,
    sizes: Callable[[Sequence[T]], Sequence[int]],
    records: Callable[[Sequence[T]], Sequence[int]],
    *,
    chunk: int = 64,
) -> int:
    """Decide how many of the waiting batches one trigger reads.

    Limits are soft: otherwise a first batch that is larger than a limit would stop the stream
    forever.

    Args:
        batches: The batches that wait, in order.
        limits: The limits of one trigger.
        sizes: Returns the stored bytes of batches. It makes requests, so it is called for ``chunk``
            batches at a time, and only for batches that the limits may admit.
        records: Returns the record counts of batches. Called like ``sizes``.
        chunk: Batches that are measured together.

    Returns:
        The number of batches, from the front.
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


def hold_at_least(
    batches: Sequence[T],
    least: int,
    records: Callable[[Sequence[T]], Sequence[int]],
    *,
    chunk: int = 64,
) -> bool:
    """Decide whether batches have enough records together.

    Args:
        batches: The batches, in order.
        least: The number of records that is enough.
        records: Returns the record counts of batches. It makes requests, so it is called for
            ``chunk`` batches at a time, and not for more batches than necessary.
        chunk: Batches that are measured together.

    Returns:
        Whether they have at least ``least`` records.
    """
    found = 0
    for begin in range(0, len(batches), chunk):
        found += sum(records(batches[begin : begin + chunk]))
        if found >= least:
            return True
    return False


def interleave(lengths: Sequence[int], backlogs: Sequence[int]) -> Iterator[int]:
    """Decide in which order a trigger takes batches from queues.

    After any number of steps, each queue has a share in proportion to its backlog, and every queue
    has at least one batch before any queue has two. Equal queues are taken in the given order.

    Args:
        lengths: Batches that may be taken from each queue.
        backlogs: Batches that wait in each queue, which may be more.

    Yields:
        The index of the queue that the next batch is taken from.
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

    A batch is shared if it is at least one and a half times the share of a task. For smaller
    batches, fetching the whole batch twice costs more than the other tasks save.
    """
    # Spark does not tell a source the size of the cluster.
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
    """Return the bytes of a task that fill whole rounds of tasks.

    With other sizes, some cores would wait during the last round.
    """
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
        sizes: The stored bytes of each batch.
        parallelism: Tasks that run at the same time.
        at_least: Make this many tasks, as long as there are batches for them.
        begins: Indices where a task must begin. They keep two parts of one batch out of the same
            task, which would fetch the batch twice.

    Returns:
        The batches of each task.
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
        # A batch goes to the task that contains its middle; every task gets at least one batch.
        past = (2 * spent + cost) * open_tasks >= 2 * left
        full = open_tasks > 1 and (past or len(batches) - index < open_tasks)
        if index > begin and (full or index in begins):
            packed.append(tuple(batches[begin:index]))
            left -= spent
            begin, spent, open_tasks = index, 0, open_tasks - 1
            if not full:  # The task ended before it reached its share.
                open_tasks = max(open_tasks, -(-left // share))
        spent += cost
    packed.append(tuple(batches[begin:]))
    return packed
