"""Sizes and record counts of batches, and the requests they cost."""

from __future__ import annotations

import pytest

from buffer_source.options import SourceOptions
from buffer_source.planner import LIST_INTERVAL_S, PAGE, UNKNOWN_SIZE, WORTH_LISTING, BatchSizes
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.runtime import queue_retry
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.world import WatchedStore


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


def sizes_of(store: MemoryStore, runtime: ManualRuntime, **options: str) -> BatchSizes:
    given = SourceOptions.from_spark({"path": "/q", **options})
    return BatchSizes(store, given, runtime, queue_retry(runtime, given.queue))


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


def test_a_batch_no_listing_shows_counts_as_average(
    store: WatchedStore, batch_sizes: BatchSizes
) -> None:
    assert batch_sizes.sizes([BatchDescriptor(0, "elsewhere/a.batch")]) == [UNKNOWN_SIZE]
    batches = [put(store, 0, b"x" * 10), put(store, 1, b"x" * 30)]
    assert batch_sizes.sizes([*batches, BatchDescriptor(2, "elsewhere/a.batch")]) == [10, 30, 20]


def test_what_is_before_and_behind_the_batches_is_not_listed(
    store: WatchedStore, batch_sizes: BatchSizes
) -> None:
    batches = [put(store, index, b"x" * index) for index in range(5 * PAGE)]
    assert batch_sizes.sizes(batches[2100:2110]) == list(range(2100, 2110))
    assert (len(store.lists), store.listed) == (1, PAGE)
    # Once listed it is known, also when it was not asked for.
    assert batch_sizes.sizes(batches[2110:3100]) == list(range(2110, 3100))
    assert len(store.lists) == 1


def test_a_batch_that_is_gone_is_listed_once(store: WatchedStore, batch_sizes: BatchSizes) -> None:
    batches = [put(store, index, b"xy") for index in range(3)]
    store.delete_many([batches[1].location])
    for _ in range(3):
        assert batch_sizes.sizes(batches) == [2, 2, 2]
    assert len(store.lists) == 1


@pytest.mark.parametrize("folder", ["ingest/app=a/batch=7", "ingest/01JZ0000000000000000000000"])
def test_writers_with_folders_of_their_own_are_listed_there(
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


def test_a_foreign_batch_is_not_measured(store: WatchedStore, batch_sizes: BatchSizes) -> None:
    store.put("elsewhere/a", encode_batch([b"r"] * 3))
    foreign = [BatchDescriptor(0, "elsewhere/a")]
    assert batch_sizes.sizes(foreign) == [UNKNOWN_SIZE]
    assert (batch_sizes.records(foreign), len(store.lists)) == ([0], 0)


def test_sizes_that_are_not_asked_for_are_not_kept_for_ever(
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


def test_a_few_batches_are_measured_where_tasks_would_be_idle(
    store: WatchedStore, runtime: ManualRuntime
) -> None:
    batch_sizes = sizes_of(store, runtime, minPartitions="2")
    first = put(store, 0, b"x" * 50)
    assert sizes_of(store, runtime, minPartitions="1").estimates([first]) == [UNKNOWN_SIZE]
    assert batch_sizes.estimates([first]) == [50]
    second = put(store, 1, b"x" * 90)
    assert batch_sizes.estimates([second]) == [50], "the average, until it is time again"
    runtime.advance(LIST_INTERVAL_S)
    assert batch_sizes.estimates([second]) == batch_sizes.estimates([second]) == [90]
    assert len(store.lists) == 2


def test_records_come_from_the_footers_and_are_remembered(
    store: WatchedStore, batch_sizes: BatchSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [put(store, index, encode_batch([b"r"] * index)) for index in range(6)]
    assert batch_sizes.records(batches) == [0, 1, 2, 3, 4, 5]
    store.delete_many([each.location for each in batches])
    assert batch_sizes.records(batches) == [0, 1, 2, 3, 4, 5]
    batch_sizes.forget_before(4)
    assert batch_sizes.records(batches) == [0, 0, 0, 0, 4, 5]


def test_a_batch_that_cannot_be_measured_is_left_to_the_task_that_reads_it(
    store: WatchedStore, batch_sizes: BatchSizes
) -> None:
    batches = [put(store, 0, b"short"), put(store, 1, b"not a footer"), BatchDescriptor(2, "gone")]
    assert batch_sizes.records(batches) == [0, 0, 0]
