"""Batches of several partitions that are fetched ahead and taken in turn."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from opendata_buffer.consumer.fetch import AdaptiveConcurrency, BatchDescriptor, ConsumedBatch
from opendata_buffer.errors import BatchMissing
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.consumer import Group

STORE = MemoryStore()


class Reader:
    """A partition whose batches wait; some of them are missing."""

    def __init__(self, name: str, count: int, missing: int | None = None) -> None:
        self.ready = deque(BatchDescriptor(n, f"{name}/{n}") for n in range(count))
        self.missing = missing

    def read(self, descriptor: BatchDescriptor) -> BatchDescriptor:
        if descriptor.sequence == self.missing:
            raise BatchMissing(descriptor.sequence, descriptor.location, "gone")
        return descriptor

    def decode(self, stored: BatchDescriptor, *, arrow: bool) -> ConsumedBatch:
        return ConsumedBatch([], stored.sequence, stored.location, ())


def group(readers: dict[str, Any], *names: str) -> Group:
    taken = {name: iter(list(reader.ready)) for name, reader in readers.items()}
    batches = [(name, next(taken[name])) for name in names]
    runtime = SystemRuntime()
    return Group(batches, readers, arrow=False, runtime=runtime, pace=AdaptiveConcurrency.of(STORE))


def test_batches_come_in_the_order_that_was_asked_for_and_wait_no_more() -> None:
    readers = {"a": Reader("a", 3), "b": Reader("b", 1)}
    made = group(readers, "a", "b", "a")
    found = []
    while not made.is_over:
        partition = made.partition
        batch = made.take()
        assert batch.location.startswith(f"{partition}/")
        found.append(batch.location)
    made.close()
    assert found == ["a/0", "b/0", "a/1"]
    assert [each.sequence for each in readers["a"].ready] == [2]
    assert not readers["b"].ready


def test_what_cannot_be_fetched_and_what_was_not_taken_still_waits() -> None:
    readers = {"a": Reader("a", 2, missing=0), "b": Reader("b", 1)}
    made = group(readers, "b", "a", "a")
    made.take()
    with pytest.raises(BatchMissing, match="gone"):
        made.take()
    assert made.partition == "a"
    made.close()
    made.close()
    assert [each.sequence for each in readers["a"].ready] == [0, 1]
