"""How much waits."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.backlog import Backlog, read_backlog
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

RUNTIME = ManualRuntime()


def queue(store: MemoryStore, prefix: str, *ages_s: int) -> QueueConfig:
    now_ms = RUNTIME.now_ms()
    entries = [
        NewEntry(f"{prefix}/{n}", (Metadata(0, now_ms - age * 1000),))
        for n, age in enumerate(ages_s)
    ]
    store.put(f"{prefix}/manifest", Manifest.empty().append(entries).raw)
    return QueueConfig(store="memory://x", data_path_prefix=prefix)


def test_of_several_queues_the_batches_are_added_and_the_oldest_counts() -> None:
    store = MemoryStore()
    configs = [queue(store, "a", 3, 1), queue(store, "b"), queue(store, "c", 7, 9)]
    assert read_backlog(store, configs, RUNTIME) == Backlog(4, 7.0)


def test_a_producer_whose_clock_is_ahead_makes_no_age_below_zero() -> None:
    store = MemoryStore()
    assert read_backlog(store, [queue(store, "a", -5)], RUNTIME) == Backlog(1, 0.0)


def test_a_queue_must_be_there_and_a_partition_need_not() -> None:
    config = QueueConfig(store="memory://x")
    with pytest.raises(InvalidInput, match="there is no queue"):
        read_backlog(MemoryStore(), [config], RUNTIME)
    assert read_backlog(MemoryStore(), [config], RUNTIME, topic=True) == Backlog(0, 0.0)


def test_what_is_too_much_is_told_and_a_bound_itself_is_not() -> None:
    backlog = Backlog(10, 5.0)
    assert backlog.excess(5.0, 10) == []
    assert backlog.excess(None, None) == []
    assert backlog.excess(4.5, 9) == [
        "the oldest waits 5.0 s, more than 4.5", "10 wait, more than 9",
    ]  # fmt: skip
