from __future__ import annotations

from typing import Any

import pytest

from buffer_source.measures import LIST_INTERVAL_S, UNKNOWN_SIZE, WORTH_LISTING, Measures
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.stores import Listing
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime


class Counted(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.lists = 0

    def list(self, prefix: str, **options: Any) -> Listing:
        self.lists += 1
        return super().list(prefix, **options)


@pytest.fixture
def store() -> Counted:
    return Counted()


@pytest.fixture
def measures(store: Counted, runtime: ManualRuntime) -> Measures:
    return Measures(store, "ingest", runtime=runtime, concurrency=4)


def put(store: MemoryStore, sequence: int, data: bytes) -> BatchDescriptor:
    location = f"ingest/{sequence:026d}.batch"
    store.put(location, data)
    return BatchDescriptor(sequence, location)


def test_sizes_take_one_listing(store: Counted, measures: Measures) -> None:
    batches = [put(store, index, b"x" * index) for index in range(5)]
    assert measures.sizes(batches) == [0, 1, 2, 3, 4]
    assert measures.sizes(batches[2:]) == [2, 3, 4]
    assert store.lists == 1
    assert measures.sizes([*batches, put(store, 9, b"xx")]) == [0, 1, 2, 3, 4, 2]
    assert store.lists == 2


def test_a_batch_no_listing_shows_counts_as_average(store: Counted, measures: Measures) -> None:
    assert measures.sizes([BatchDescriptor(0, "elsewhere/a.batch")]) == [UNKNOWN_SIZE]
    batches = [put(store, 0, b"x" * 10), put(store, 1, b"x" * 30)]
    assert measures.sizes([*batches, BatchDescriptor(2, "elsewhere/a.batch")]) == [10, 30, 20]


def test_estimates_list_only_when_it_pays(
    store: Counted, measures: Measures, runtime: ManualRuntime
) -> None:
    batches = [put(store, index, b"x" * 50) for index in range(2 * WORTH_LISTING)]
    few, many = batches[: WORTH_LISTING - 1], batches[:WORTH_LISTING]
    assert measures.estimates(few) == [UNKNOWN_SIZE] * len(few)
    assert store.lists == 0
    assert measures.estimates(many) == [50] * len(many)
    assert store.lists == 1
    newer = [put(store, 100 + index, b"x" * 70) for index in range(WORTH_LISTING)]
    assert measures.estimates(newer) == [50] * len(newer)
    assert store.lists == 1
    runtime.advance(LIST_INTERVAL_S)
    assert measures.estimates(newer) == [70] * len(newer)
    assert store.lists == 2


def test_records_come_from_the_footers_and_are_remembered(
    store: Counted, measures: Measures, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [put(store, index, encode_batch([b"r"] * index)) for index in range(6)]
    assert measures.records(batches) == [0, 1, 2, 3, 4, 5]
    store.delete_many([each.location for each in batches])
    assert measures.records(batches) == [0, 1, 2, 3, 4, 5]
    measures.forget_before(4)
    assert measures.records(batches) == [0, 0, 0, 0, 4, 5]


def test_a_batch_that_cannot_be_measured_is_left_to_the_task_that_reads_it(
    store: Counted, measures: Measures
) -> None:
    batches = [put(store, 0, b"short"), put(store, 1, b"not a footer"), BatchDescriptor(2, "gone")]
    assert measures.records(batches) == [0, 0, 0]
