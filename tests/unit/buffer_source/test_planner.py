"""The batches that a trigger reads, and how they are divided into tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_source.options import SourceOptions
from buffer_source.planner import (
    LIST_INTERVAL_S,
    MAX_TASK_BYTES,
    UNKNOWN_SIZE,
    WORTH_LISTING,
    BatchSizes,
    PartitionBatch,
    ReadLimits,
    interleave,
    pack,
    plan_tasks,
    rate_limit,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats import MIB
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.source_queue import WatchedStore


class Batches:
    """Batches with sizes and record counts, which records the measured ones."""

    def __init__(self, sizes: list[int], records: list[int] | None = None) -> None:
        self._sizes = sizes
        self._records = records if records is not None else [1] * len(sizes)
        self.measured: list[int] = []

    def sizes(self, part: Sequence[int]) -> list[int]:
        self.measured.extend(part)
        return [self._sizes[each] for each in part]

    def records(self, part: Sequence[int]) -> list[int]:
        self.measured.extend(part)
        return [self._records[each] for each in part]

    def rate_limit(self, limits: ReadLimits, chunk: int = 2) -> int:
        return rate_limit(range(len(self._sizes)), limits, self.sizes, self.records, chunk=chunk)


def test_without_limits_everything_is_admitted_and_nothing_is_measured() -> None:
    batches = Batches([1] * 5)
    assert batches.rate_limit(ReadLimits()) == 5
    assert batches.rate_limit(ReadLimits(batches=3)) == 3
    assert batches.measured == []


def test_a_batch_larger_than_the_limit_is_read_alone() -> None:
    assert Batches([100, 1]).rate_limit(ReadLimits(bytes=5)) == 1
    assert Batches([1, 100]).rate_limit(ReadLimits(bytes=5)) == 1
    assert Batches([1, 1], records=[900, 1]).rate_limit(ReadLimits(records=10)) == 1


def test_the_lowest_limit_applies() -> None:
    batches = Batches([10] * 6, records=[100] * 6)
    assert batches.rate_limit(ReadLimits(batches=4, bytes=30, records=500)) == 3
    assert batches.rate_limit(ReadLimits(batches=2, bytes=30, records=500)) == 2
    assert batches.rate_limit(ReadLimits(batches=4, bytes=1000, records=100)) == 1


def test_only_batches_that_the_limit_may_admit_are_measured() -> None:
    batches = Batches([10] * 100)
    assert batches.rate_limit(ReadLimits(bytes=25), chunk=4) == 2
    assert batches.measured == [0, 1, 2, 3]
    assert Batches([]).rate_limit(ReadLimits(bytes=25)) == 0


@pytest.mark.parametrize(
    ("mib", "cores", "tasks"),
    [(320, 2, 2), (640, 2, 4), (640, 3, 3), (640, 4, 4), (2_304, 8, 16), (8, 2, 2)],
)
def test_tasks_fill_whole_rounds_of_the_cores(mib: int, cores: int, tasks: int) -> None:
    sizes = [4 * MIB] * (mib // 4)
    packed = [sum(sizes[each] for each in task) for task in pack(range(len(sizes)), sizes, cores)]
    assert len(packed) == tasks
    assert max(packed) - min(packed) <= 4 * MIB


@given(
    st.lists(st.integers(0, 2 * MAX_TASK_BYTES), max_size=60),
    st.integers(1, 64),
    st.none() | st.integers(1, 64),
)
def test_packing_neither_loses_nor_repeats_nor_reorders_batches(
    sizes: list[int], parallelism: int, at_least: int | None
) -> None:
    tasks = pack(range(len(sizes)), sizes, parallelism, at_least)
    assert [each for task in tasks for each in task] == list(range(len(sizes)))
    assert all(tasks)
    if at_least is not None:
        assert len(tasks) >= min(at_least, len(sizes))
    for task in tasks:
        # A task exceeds its share by less than the first and the last of its batches.
        assert sum(sizes[each] for each in task[1:-1]) <= MAX_TASK_BYTES


def test_queues_share_a_limit_in_proportion_to_their_backlogs() -> None:
    order = list(interleave([100, 100, 100], [600, 300, 100]))
    for most in (10, 30, 100):
        taken = [order[:most].count(queue) for queue in range(3)]
        assert taken[0] == pytest.approx(most * 0.6, abs=2)
        assert taken[1] == pytest.approx(most * 0.3, abs=2)
        assert taken[2] >= 1


def test_a_short_queue_does_not_wait_for_longer_ones() -> None:
    order = list(interleave([0, 1000, 1], [0, 1_000_000, 1]))
    assert order[:2] == [1, 2]


def test_equal_queues_alternate_in_the_order_they_are_given() -> None:
    assert list(interleave([3, 3], [3, 3])) == [0, 1, 0, 1, 0, 1]
    assert list(interleave([], [])) == []


def tasks(sizes: list[int], **options: Any) -> list[tuple[PartitionBatch, ...]]:
    """Return the batches of each task."""
    batches = [PartitionBatch(number, f"{number}") for number in range(len(sizes))]
    settings = SourceOptions(queue=QueueConfig(store="/d"), **options)
    return [each.batches for each in plan_tasks(batches, sizes, settings)]


def test_the_number_of_cores_in_the_cluster_has_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    batches = [2 * MIB] * 100
    assert len(tasks(batches, cores=48)) == 48
    assert len(tasks(batches, cores=16, min_partitions=20)) == 20
    assert len(tasks(batches, min_partitions=30)) == 30
    assert len(tasks(batches)) == 4


@pytest.mark.parametrize("cores", [2, 12])
@pytest.mark.parametrize("place", [0, 2500, 5000])
def test_one_large_batch_among_tiny_ones_is_shared_by_tasks_and_read_once(
    place: int, cores: int
) -> None:
    sizes = [1000] * place + [200 * MIB] + [1000] * (5000 - place)
    found = [
        (task, [each for each in task if each.parts > 1]) for task in tasks(sizes, cores=cores)
    ]
    shared = [each for _, parts in found for each in parts]
    assert [each.part for each in shared] == list(range(shared[0].parts))
    assert max(len(parts) for _, parts in found) == 1
    assert 200 * MIB / len(shared) <= max(16 * MIB, 1.5 * 200 * MIB / cores)
    assert {each.sequence for task, _ in found for each in task} == set(range(5001))
    # The tasks before, after, and next to it have their share of the tiny batches.
    assert max(len(task) for task, _ in found) <= 1.5 * 5000 / min(10, cores)


def test_batches_that_keep_all_tasks_busy_are_not_shared() -> None:
    assert len(tasks([1 * MIB], cores=64)) == 1
    assert len(tasks([70 * MIB, 30 * MIB], cores=2)) == 2
    made = tasks([32 * MIB] * 100, cores=8)
    assert {each.parts for task in made for each in task} == {1}
    assert len(made) == 16  # two rounds of 8


@given(st.lists(st.integers(0, 300 * MIB), max_size=20), st.integers(1, 64), st.integers(1, 64))
def test_every_row_of_every_batch_is_read_once_and_in_order(
    sizes: list[int], cores: int, at_least: int
) -> None:
    made = tasks(sizes, cores=cores, min_partitions=at_least)
    read = [(each.sequence, row) for task in made for each in task for row in each.rows(100)]
    assert read == [(number, row) for number in range(len(sizes)) for row in range(100)]


# Sizes and records of batches.


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


def sizes_of(store: MemoryStore, runtime: ManualRuntime, **options: str) -> BatchSizes:
    given = SourceOptions.from_spark({"path": "/q", **options})
    return BatchSizes(store, given, runtime, given.queue.retries(runtime))


@pytest.fixture
def batch_sizes(store: WatchedStore, runtime: ManualRuntime) -> BatchSizes:
    return sizes_of(store, runtime)


def put(store: MemoryStore, sequence: int, data: bytes) -> BatchDescriptor:
    location = f"ingest/{sequence:026d}.batch"
    store.put(location, data)
    return BatchDescriptor(sequence, location)


def test_sizes_take_one_listing(store: WatchedStore, batch_sizes: BatchSizes) -> None:
    batches = [put(store, index, b"x" * index) for index in range(5)]
    assert batch_sizes.sizes(batches) == [0, 1, 2, 3, 4]
    assert batch_sizes.sizes(batches[2:]) == [2, 3, 4]
    assert len(store.lists) == 1
    assert batch_sizes.sizes([*batches, put(store, 9, b"xx")]) == [0, 1, 2, 3, 4, 2]
    assert len(store.lists) == 2


def test_a_batch_that_is_not_listed_counts_as_average(
    store: WatchedStore, batch_sizes: BatchSizes
) -> None:
    assert batch_sizes.sizes([BatchDescriptor(0, "elsewhere/a.batch")]) == [UNKNOWN_SIZE]
    batches = [put(store, 0, b"x" * 10), put(store, 1, b"x" * 30)]
    assert batch_sizes.sizes([*batches, BatchDescriptor(2, "elsewhere/a.batch")]) == [10, 30, 20]


@pytest.mark.parametrize("folder", ["ingest/app=a/batch=7", "ingest/01JZ0000000000000000000000"])
def test_folders_of_single_writers_are_listed(
    store: WatchedStore, batch_sizes: BatchSizes, folder: str
) -> None:
    for index in range(100):
        put(store, index, b"x")
    batches = []
    for index in range(3):
        location = f"{folder}/{index:016x}"
        store.put(location, b"x" * (10 + index))
        batches.append(BatchDescriptor(200 + index, location))
    assert batch_sizes.sizes(batches) == [10, 11, 12]
    assert (len(store.lists), store.listed) == (1, 3)


def test_sizes_that_are_not_requested_are_forgotten(
    store: WatchedStore, batch_sizes: BatchSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer_source.planner.KEEP", 10)
    batches = [put(store, index, b"x") for index in range(100)]
    batch_sizes.sizes(batches[:3])
    assert len(batch_sizes._sizes) == 3
    assert batch_sizes.sizes(batches[:3]) == [1, 1, 1]
    assert len(store.lists) == 1


def test_estimates_list_only_when_it_pays(
    store: WatchedStore, batch_sizes: BatchSizes, runtime: ManualRuntime
) -> None:
    batches = [put(store, index, b"x" * 50) for index in range(2 * WORTH_LISTING)]
    few, many = batches[: WORTH_LISTING - 1], batches[:WORTH_LISTING]
    assert batch_sizes.estimates(few) == [UNKNOWN_SIZE] * len(few)
    assert batch_sizes.estimates(many) == [50] * len(many)
    assert len(store.lists) == 1
    newer = [put(store, 100 + index, b"x" * 70) for index in range(WORTH_LISTING)]
    assert batch_sizes.estimates(newer) == [50] * len(newer)
    runtime.advance(LIST_INTERVAL_S)
    assert batch_sizes.estimates(newer) == [70] * len(newer)
    assert len(store.lists) == 2
    # A listing that fails leaves the average.
    runtime.advance(LIST_INTERVAL_S)
    store.fail("list", 1_000_000)
    last = [put(store, 200 + index, b"x") for index in range(WORTH_LISTING)]
    assert batch_sizes.estimates(last) == [56] * len(last)


def test_a_few_batches_are_measured_if_tasks_would_be_idle_otherwise(
    store: WatchedStore, runtime: ManualRuntime
) -> None:
    batch_sizes = sizes_of(store, runtime, minPartitions="2")
    first = put(store, 0, b"x" * 50)
    assert sizes_of(store, runtime, minPartitions="1").estimates([first]) == [UNKNOWN_SIZE]
    assert batch_sizes.estimates([first]) == [50]
    second = put(store, 1, b"x" * 90)
    assert batch_sizes.estimates([second]) == [50], "the average is used until the next listing"
    runtime.advance(LIST_INTERVAL_S)
    assert batch_sizes.estimates([second]) == batch_sizes.estimates([second]) == [90]
    assert len(store.lists) == 2


def test_record_counts_are_read_from_the_footers_and_remembered(
    store: WatchedStore, batch_sizes: BatchSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [put(store, index, encode_batch([b"r"] * index)) for index in range(6)]
    assert batch_sizes.records(batches) == [0, 1, 2, 3, 4, 5]
    store.delete_many([each.location for each in batches])
    assert batch_sizes.records(batches) == [0, 1, 2, 3, 4, 5]
    batch_sizes.forget_before(4)
    assert batch_sizes.records(batches) == [0, 0, 0, 0, 4, 5]


def test_a_batch_that_cannot_be_measured_is_planned_and_fails_in_its_task(
    store: WatchedStore, batch_sizes: BatchSizes
) -> None:
    batches = [put(store, 0, b"short"), put(store, 1, b"not a footer"), BatchDescriptor(2, "gone")]
    assert batch_sizes.records(batches) == [0, 0, 0]
