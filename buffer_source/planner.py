"""What a trigger reads and which task reads which part of it. Pure.

Limits are soft, as everywhere in Spark: the first batch is always admitted, else a batch larger
than a limit would stop the stream for good.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from pyspark.sql.datasource import InputPartition

from buffer_source.offsets import ONLY
from buffer_source.options import SourceOptions
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.errors import CorruptBatch, CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.formats import MIB
from opendata_buffer.formats.codec import FOOTER_SIZE, parse_footer
from opendata_buffer.formats.keys import is_confined
from opendata_buffer.late import late_imports
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Blob, Get, List

__all__ = [
    "BatchPartition",
    "Limits",
    "MIN_PART_BYTES",
    "MeasuredStore",
    "Measures",
    "PartitionBatch",
    "admit",
    "interleave",
    "pack",
    "shares",
    "tasks_of",
]


# ---- Sizes and record counts of batches that wait, without a request for each where possible. ----


LIST_INTERVAL_S = 30.0
"""Least time between two listings that are made for estimates only."""

PAGE = 1000
"""Objects asked for in one listing: what S3 gives in one answer."""

KEEP = 50_000
"""Sizes remembered of objects that a listing showed and nobody has asked for yet."""

WORTH_LISTING = 16
"""Batches of unknown size that make a listing worth its price for packing tasks."""

UNKNOWN_SIZE = 1024 * 1024
"""What a batch is taken to weigh while nothing is known."""


class MeasuredStore(Get, List, Protocol):
    """What measuring needs of a store."""


class Measures:
    """Cache of stored sizes (bytes) and record counts of batches that wait.

    A size is listed once, from the first batch whose size is unknown to the last: what lies
    before and behind them, which may be much, costs nothing.

    Args:
        store: Where the batches are.
        prefix: The data prefix.
        runtime: Clock.
        concurrency: Footers read at once.
        allow_foreign: Measure batches outside the prefix, too; without it they are average.
    """

    def __init__(
        self,
        store: MeasuredStore,
        prefix: str,
        *,
        runtime: Runtime,
        concurrency: int | None,
        allow_foreign: bool = False,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._runtime = runtime
        self._concurrency = concurrency
        self._allow_foreign = allow_foreign
        self._sizes: dict[str, int | None] = {}  # By location; None: no listing shows it.
        self._asked: dict[int, str] = {}  # Locations, by sequence, that somebody asked for.
        self._records: dict[int, int] = {}
        self._listed_at: float | None = None
        self._average = UNKNOWN_SIZE

    def sizes(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Stored bytes of each; lists those that are unknown.

        A batch that no listing shows, because it was deleted, counts as average.
        """
        self._measure(batches)
        return self._known(batches)

    def total(self, batches: Sequence[BatchDescriptor]) -> int | None:
        """Stored bytes of all, where the size of each is known; makes no request."""
        total = 0
        for each in batches:
            size = self._sizes.get(each.location)
            if size is None:
                return None
            total += size
        return total

    def estimates(self, batches: Sequence[BatchDescriptor], tasks: int | None = None) -> list[int]:
        """As :meth:`sizes`, but lists only when that is cheap beside reading the batches.

        Args:
            batches: Which ones.
            tasks: That would be without work if there are fewer batches; then it is worth a
                listing to see whether one can be shared. None where nobody said how many.
        """
        unknown = sum(1 for each in batches if each.location not in self._sizes)
        worth = 1 if tasks is not None and len(batches) < tasks else WORTH_LISTING
        if unknown >= worth and (
            self._listed_at is None
            or self._runtime.monotonic() - self._listed_at >= LIST_INTERVAL_S
        ):
            self._listed_at = self._runtime.monotonic()
            self._measure(batches)
        return self._known(batches)

    def records(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Records of each, from the footers; the one thing no listing tells."""
        unknown = [each for each in batches if each.sequence not in self._records]
        if unknown:
            self.sizes(unknown)
            with late_imports():  # or each query's start would wait for what few need
                from opendata_buffer.consumer.read_ahead import fetch_many

            counts = fetch_many(
                self._footer,
                unknown,
                concurrency=self._concurrency,
                max_in_flight_bytes=UNKNOWN_SIZE,
                runtime=self._runtime,
            )
            for each, count in zip(unknown, counts, strict=True):
                self._records[each.sequence] = count
        return [self._records[each.sequence] for each in batches]

    def missing(self, batches: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
        """Those whose object does not exist, by a request for each."""
        with late_imports():
            from opendata_buffer.consumer.read_ahead import fetch_many

        there = fetch_many(
            self._exists,
            batches,
            concurrency=self._concurrency,
            max_in_flight_bytes=UNKNOWN_SIZE,
            runtime=self._runtime,
            size_of=lambda _: 1,
        )
        return [each for each, exists in zip(batches, there, strict=True) if not exists]

    def forget_before(self, sequence: int) -> None:
        """Drop what is known of batches that were read."""
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
        for each in batches:
            if each.location not in self._sizes:
                folder = self._folder(each.location)
                # Listing is reading: a manifest must not make us look elsewhere (failure F23).
                if folder is not None:
                    unknown.setdefault(folder, []).append(each.location)
        for folder, locations in unknown.items():
            self._list(folder, min(locations), max(locations))
            for location in locations:
                self._sizes.setdefault(location, None)
        if unknown:
            self._settle()

    def _folder(self, location: str) -> str | None:
        """What to list for a location: the data prefix, or one writer's folder below it."""
        root = f"{self._prefix}/"
        if is_confined(location, self._prefix):
            inner, slash, _ = location[len(root) :].partition("/")
            return f"{root}{inner}/" if slash else root
        return f"{location.rpartition('/')[0]}/" if self._allow_foreign else None

    def _list(self, folder: str, first: str, last: str) -> None:
        after = first[:-1]  # Sorts before `first`, and behind all that is before it.
        while True:
            listing = self._store.list(folder, start_after=after, limit=PAGE)
            self._sizes.update((each.key, each.size) for each in listing.objects)
            if not listing.truncated or listing.objects[-1].key >= last:
                return
            after = listing.objects[-1].key

    def _settle(self) -> None:
        """The average of what is known now; and no more of it than is worth its memory."""
        if len(self._sizes) > KEEP + len(self._asked):
            kept = {location: self._sizes.get(location) for location in self._asked.values()}
            self._sizes = kept
        sizes = [size for size in self._sizes.values() if size is not None]
        if sizes:
            self._average = sum(sizes) // len(sizes)

    def _footer(self, batch: BatchDescriptor) -> int:
        size = self._sizes.get(batch.location)
        if size is None or size < FOOTER_SIZE:
            return 0  # The task that reads it says what is wrong, and what to do about it.
        try:
            got = self._store.get(batch.location, byte_range=(size - FOOTER_SIZE, size))
            return parse_footer(got.data).record_count if isinstance(got, Blob) else 0
        except (ObjectNotFound, CorruptBatch):
            return 0

    def _exists(self, batch: BatchDescriptor) -> bool:
        try:
            self._store.get(batch.location, byte_range=(0, 1))
        except ObjectNotFound:
            return False
        except (InvalidInput, CorruptData):
            pass  # Foreign or damaged: the task that reads it says what is wrong.
        return True


OPEN_COST_BYTES = 256 * 1024
"""What opening one more batch costs a task, in bytes it could have read instead."""

MIN_TASK_BYTES = 1 * MIB
"""Below this a second task costs more than it saves."""

MAX_TASK_BYTES = 128 * MIB
"""Tasks larger than this are split, so that a retried task repeats little."""

MIN_PART_BYTES = 16 * MIB
"""A smaller part of a batch is not worth a task: each task that shares a batch fetches all of it,
and decodes what lies before its part."""

T = TypeVar("T")
Measure = Callable[[Sequence[T]], Sequence[int]]


class Sized(Protocol):
    """Anything with a length in bytes that may be unknown."""

    @property
    def size(self) -> int | None:
        """Bytes, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one trigger may read; None means no limit, and the lowest wins.

    Attributes:
        batches: Batches.
        bytes: Bytes as stored.
        records: Records.
    """

    batches: int | None = None
    bytes: int | None = None
    records: int | None = None


def admit(
    batches: Sequence[T],
    limits: Limits,
    sizes: Measure[T],
    records: Measure[T],
    *,
    chunk: int = 64,
) -> int:
    """How many of ``batches``, from the front, one trigger reads.

    Args:
        batches: All that wait, in order.
        limits: What one trigger may read.
        sizes: Stored bytes of some batches; only called when there is a limit in bytes.
        records: Records of some batches; only called when there is a limit in records.
        chunk: Batches that are measured together. Measuring costs requests, so no more are
            measured than the limits may admit.
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
    """The order in which a trigger takes batches from several queues, as indices of queues.

    Wherever it is cut, each queue has had a share in proportion to its backlog; and the first
    round takes one batch of each, so that a short queue is not kept waiting by long ones. Queues
    that are equal take turns in the order they are given: give those first that wait longest,
    for a limit may be smaller than the number of queues.

    Args:
        lengths: Batches of each queue that may be taken.
        backlogs: Batches that wait in each, which may be more.
    """
    turns = [(0.0, index, 0) for index, length in enumerate(lengths) if length]
    while turns:
        _, index, taken = turns[0]
        yield index
        taken += 1
        if taken < lengths[index]:
            heapq.heapreplace(turns, (taken / max(1, backlogs[index]), index, taken))
        else:
            heapq.heappop(turns)


def shares(sizes: Sequence[int], parallelism: int, at_least: int | None = None) -> list[int]:
    """How many tasks share each batch: 1 for all but very large ones.

    Args:
        sizes: Stored bytes of each; estimates will do.
        parallelism: Tasks that run at the same time, as far as is known.
        at_least: Tasks the user asked for.
    """
    total = sum(sizes)
    wanted = max(parallelism, at_least or 1)
    share = min(MAX_TASK_BYTES, max(MIN_PART_BYTES, -(-total // wanted)))
    return [max(1, size // share) for size in sizes]


def pack(
    batches: Sequence[T], sizes: Sequence[int], parallelism: int, at_least: int | None = None
) -> list[tuple[T, ...]]:
    """Deal batches to tasks: contiguous, in order, of about equal cost.

    Args:
        batches: What the trigger reads.
        sizes: Stored bytes of each; estimates will do.
        parallelism: Tasks that run at the same time, as far as is known.
        at_least: Tasks the user asked for; that many are made while there are batches.
    """
    if not batches:
        return []
    costs = [max(size, OPEN_COST_BYTES) for size in sizes]
    total = sum(costs)
    share = min(MAX_TASK_BYTES, max(MIN_TASK_BYTES, -(-total // parallelism)))
    tasks = min(len(batches), max(-(-total // share), at_least or 1))
    packed: list[tuple[T, ...]] = []
    begin = spent = 0
    for index, cost in enumerate(costs):
        left = len(batches) - index
        open_tasks = tasks - len(packed)
        # A batch belongs to the task its middle falls into; and every task gets one batch.
        past = (2 * spent + cost) * tasks >= 2 * total * (len(packed) + 1)
        if index > begin and open_tasks > 1 and (past or left < open_tasks):
            packed.append(tuple(batches[begin:index]))
            begin = index
        spent += cost
    packed.append(tuple(batches[begin:]))
    return packed


# ---- Batches that a micro-batch reads ----
#
# With the partition each is in, and the tasks that read them.


@dataclass(frozen=True, slots=True)
class PartitionBatch(BatchDescriptor):
    """A queued batch of one partition.

    Attributes:
        partition: The partition's name in offsets and in the column ``partition``.
        part: Of a batch that several tasks share, which part this is: from 0.
        parts: How many tasks share it.
    """

    partition: str = ONLY
    part: int = 0
    parts: int = 1

    @classmethod
    def within(cls, partition: str, batch: BatchDescriptor) -> PartitionBatch:
        """The batch as one of a partition."""
        return cls(batch.sequence, batch.location, batch.metadata, batch.size, partition)

    def rows(self, count: int) -> range:
        """The rows of this part, of ``count`` in the batch: each is in one part."""
        return range(count * self.part // self.parts, count * (self.part + 1) // self.parts)

    def shared_by(self, parts: int) -> list[PartitionBatch]:
        """The batch for several tasks, in the order of its rows."""
        if parts == 1:
            return [self]
        return [replace(self, part=part, parts=parts) for part in range(parts)]


def tasks_of(
    batches: Sequence[PartitionBatch], sizes: Sequence[int], options: SourceOptions
) -> list[tuple[PartitionBatch, ...]]:
    """The batches of a plan, dealt to tasks; very large ones are shared by several.

    Args:
        batches: In the order they are read.
        sizes: Stored bytes of each; estimates will do.
        options: How many tasks there are to be.
    """
    parts = shares(sizes, options.parallelism, options.min_partitions)
    return pack(
        [
            part
            for batch, count in zip(batches, parts, strict=True)
            for part in batch.shared_by(count)
        ],
        [size // count for size, count in zip(sizes, parts, strict=True) for _ in range(count)],
        options.parallelism,
        options.min_partitions,
    )


# ---- The batches of one task, as the driver plans them and Spark sends them to an executor. ----


class BatchPartition(InputPartition):
    """Batches of one task, of each partition in queue order; pickled into the task."""

    def __init__(self, descriptors: tuple[PartitionBatch, ...]) -> None:
        super().__init__(descriptors)
        self.descriptors = descriptors

    def __repr__(self) -> str:
        if not self.descriptors:
            return "BatchPartition()"
        first, last = (_name(each) for each in (self.descriptors[0], self.descriptors[-1]))
        return f"BatchPartition({len(self.descriptors)} batches, {first} to {last})"


def _name(batch: PartitionBatch) -> str:
    part = f" (part {batch.part + 1} of {batch.parts})" if batch.parts > 1 else ""
    where = "" if batch.partition == ONLY else f"{batch.partition}:"
    return f"{where}{batch.sequence}{part}"
