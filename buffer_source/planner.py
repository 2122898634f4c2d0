"""What a trigger reads and which task reads which part of it. Pure.

Limits are soft, as everywhere in Spark: the first batch is always admitted, otherwise a batch
larger than a limit would stop the stream for good.

"Partition" is a partition of a topic here. Spark's ``InputPartition`` is a task's input,
:class:`TaskBatches`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pyspark.sql.datasource import InputPartition

from buffer_source.offsets import ONLY
from buffer_source.options import SourceOptions
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.formats import MIB

OPEN_COST_BYTES = 256 * 1024
"""Cost of opening one more batch in a task, in bytes it could have read instead."""

MIN_TASK_BYTES = 1 * MIB
"""Below this a second task costs more than it saves."""

MAX_TASK_BYTES = 128 * MIB
"""Tasks larger than this are split, so that a retried task repeats little."""

MIN_PART_BYTES = 16 * MIB
"""A smaller part of a batch is not worth a task: each task that shares a batch fetches all of it,
and decodes what lies before its part."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How much one trigger may read; None means no limit, and the lowest wins.

    Attributes:
        batches: Batches.
        bytes: Bytes as stored.
        records: Records.
    """

    batches: int | None = None
    bytes: int | None = None
    records: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionBatch(BatchDescriptor):
    """A queued batch of one partition, or the part of it that one task reads.

    Attributes:
        partition: The partition's name in offsets and in the column ``partition``.
        part: Of a batch that several tasks share, the number of this part: from 0.
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

    def __str__(self) -> str:
        part = f" (part {self.part + 1} of {self.parts})" if self.parts > 1 else ""
        partition = "" if self.partition == ONLY else f"{self.partition}:"
        return f"{partition}{self.sequence}{part}"


class TaskBatches(InputPartition):
    """The batches of one task, of each partition in queue order; Spark pickles them to it."""

    def __init__(self, batches: tuple[PartitionBatch, ...]) -> None:
        super().__init__(batches)
        self.batches = batches

    def __repr__(self) -> str:
        if not self.batches:
            return "TaskBatches()"
        first, last = self.batches[0], self.batches[-1]
        return f"TaskBatches({len(self.batches)} batches, {first} to {last})"


def rate_limit(
    batches: Sequence[T],
    limits: ReadLimits,
    sizes: Callable[[Sequence[T]], Sequence[int]],
    records: Callable[[Sequence[T]], Sequence[int]],
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
    round takes one batch of each, so that long queues do not keep a short one waiting. Equal
    queues are taken in the order they are given: give those first that wait longest, for a limit
    may be smaller than the number of queues.

    Args:
        lengths: Batches of each queue that may be taken.
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
    """Divide the batches of a plan among tasks; very large ones are shared by several.

    Args:
        batches: In the order they are read.
        sizes: Stored bytes of each; estimates will do.
        options: How many tasks there are to be.
    """
    shares = tasks_per_batch(sizes, options.parallelism, options.min_partitions)
    packed = pack(
        [
            part
            for batch, count in zip(batches, shares, strict=True)
            for part in batch.shared_by(count)
        ],
        [size // count for size, count in zip(sizes, shares, strict=True) for _ in range(count)],
        options.parallelism,
        options.min_partitions,
    )
    return [TaskBatches(each) for each in packed]


def tasks_per_batch(
    sizes: Sequence[int], parallelism: int, at_least: int | None = None
) -> list[int]:
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
    """Divide batches among tasks: contiguous, in order, of about equal cost.

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
