from __future__ import annotations

import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from buffer_source.options import SourceOptions
from buffer_source.planner import PartitionBatch, tasks_of
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.formats import MIB
from opendata_buffer.formats.manifest import Metadata


def test_a_batch_takes_its_partition_into_the_task() -> None:
    batch = BatchDescriptor(7, "p-00003/a.batch", (Metadata(0, 5, b"m"),), 99)
    within = pickle.loads(pickle.dumps(PartitionBatch.within("p-00003", batch)))
    assert within.partition == "p-00003"
    for name in ("sequence", "location", "metadata", "size"):
        assert getattr(within, name) == getattr(batch, name)
    assert PartitionBatch(7, "a").partition == "0"


@given(st.integers(0, 1_000), st.integers(1, 50))
def test_each_row_is_in_one_part_and_the_parts_are_about_equal(count: int, parts: int) -> None:
    cuts = [part.rows(count) for part in PartitionBatch(0, "a").shared_by(parts)]
    assert [row for cut in cuts for row in cut] == list(range(count))
    assert max(map(len, cuts)) - min(map(len, cuts)) <= 1


def tasks(sizes: list[int], **options: Any) -> list[tuple[PartitionBatch, ...]]:
    batches = [PartitionBatch(number, f"{number}") for number in range(len(sizes))]
    settings = SourceOptions(queue=QueueConfig(store="/d"), **options)
    return tasks_of(batches, sizes, settings)


def test_one_very_large_batch_is_shared_by_the_tasks_of_the_cluster() -> None:
    made = tasks([256 * MIB], cores=8)
    assert [[(each.part, each.parts) for each in task] for task in made] == [
        [(part, 8)] for part in range(8)
    ]
    assert len(tasks([256 * MIB], cores=64)) == 16, "16 MiB each, whatever is idle"
    assert len(tasks([256 * MIB], cores=1)) == 2, "a task that is repeated repeats little"
    assert len(tasks([256 * MIB], cores=2, min_partitions=8)) == 8


def test_batches_that_keep_all_tasks_busy_are_not_shared() -> None:
    assert len(tasks([1 * MIB], cores=64)) == 1
    made = tasks([16 * MIB] * 100, cores=8)
    assert {each.parts for task in made for each in task} == {1}
    assert len(made) == 13


def test_as_many_tasks_as_the_cluster_has_cores_whatever_the_driver_has() -> None:
    assert len(tasks([4 * MIB] * 64, cores=64)) == 64
    assert len(tasks([4 * MIB] * 64, cores=3)) == 3


@given(st.lists(st.integers(0, 300 * MIB), max_size=20), st.integers(1, 64), st.integers(1, 64))
def test_every_row_of_every_batch_is_read_once_and_in_order(
    sizes: list[int], cores: int, at_least: int
) -> None:
    made = tasks(sizes, cores=cores, min_partitions=at_least)
    read = [(each.sequence, row) for task in made for each in task for row in each.rows(100)]
    assert read == [(number, row) for number in range(len(sizes)) for row in range(100)]
