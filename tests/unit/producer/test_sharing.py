"""The sharing of a committer by the producers of a process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.producer.group_commit import GroupCommitter
from opendata_buffer.producer.sharing import shared_committer
from opendata_buffer.runtime import SystemRuntime, in_parallel
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.producer.in_memory import WAIT_S

CONFIG = QueueConfig(store="memory://unused")


def test_one_committer_per_store_and_manifest() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    other = QueueConfig(store="memory://unused", manifest_path="other/manifest")
    first = shared_committer(store, CONFIG, runtime)

    def joins(*key: Any) -> bool:
        committer = shared_committer(*key)
        committer.close()
        return committer is first

    assert joins(store, CONFIG, runtime)
    assert not joins(store, other, runtime)
    assert not joins(MemoryStore(), CONFIG, runtime)
    first.close()
    assert not first.join(), "its last producer has closed it"
    assert not joins(store, CONFIG, runtime)


@pytest.mark.parametrize("count", [2, 8])
def test_concurrent_threads_get_the_same_committer(count: int) -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    for _ in range(50):
        together = threading.Barrier(count)

        def ask(_: int, together: threading.Barrier = together) -> GroupCommitter:
            together.wait(WAIT_S)
            return shared_committer(store, CONFIG, runtime)

        found = in_parallel(runtime, ask, range(count))
        assert len(set(map(id, found))) == 1
        for committer in found:
            committer.close()
