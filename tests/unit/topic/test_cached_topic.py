"""Producers and consumers use a cached description, and read it again in time."""

from __future__ import annotations

import threading

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import Task
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.cached_topic import CachedTopic
from opendata_buffer.topic.topic import Topic
from tests.unit.topic.in_memory import URL, WAIT_S, Faulty, topic_in


class Joined(ManualRuntime):
    """Records its threads, so that a test can wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Task] = []
        self.refuses = False

    def spawn(self, target: object, name: str) -> Task:
        if self.refuses:
            raise RuntimeError("can't start new thread")
        task = super().spawn(target, name)  # type: ignore[arg-type]
        self.tasks.append(task)
        return task


def cached(store: MemoryStore, runtime: ManualRuntime) -> CachedTopic:
    return CachedTopic(Topic.open(URL, store=store, runtime=runtime), runtime, 2.0)


def test_a_fresh_description_needs_no_request_and_an_old_one_is_read_in_the_background() -> None:
    store, runtime, gate = Faulty(), Joined(), threading.Event()
    topic = topic_in(store, 2)
    known = cached(store, runtime)
    topic.expand(3)
    reads: list[bool] = []
    store.before = lambda operation, key: reads.append(gate.wait(WAIT_S))
    runtime.advance(1.9)
    assert len(known.get().names) == 2
    assert (reads, runtime.tasks) == ([], [])
    runtime.advance(0.2)
    assert len(known.get().names) == 2  # without waiting
    assert len(known.get().names) == 2
    gate.set()
    (task,) = runtime.tasks  # one read for all calls
    task.join(WAIT_S)
    assert len(known.get().names) == 3
    assert reads == [True]
    topic.expand(4)
    runtime.advance(2.1)
    runtime.refuses = True
    assert len(known.get().names) == 4


def test_after_a_long_pause_the_caller_waits_for_a_read() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    topic = topic_in(store, 2)
    known = cached(store, runtime)
    topic.expand(5)
    assert not known.is_outdated
    runtime.advance(3_600)
    assert known.is_outdated
    assert len(known.get().names) == 5
    assert not known.is_outdated


def test_the_cached_description_is_used_while_the_store_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, runtime = Faulty(), ManualRuntime()
    topic_in(store, 2)
    known = cached(store, runtime)
    store.fail("get", "", TransientStorageError("down"))
    runtime.advance(3_600)
    assert len(known.get().names) == 2
    assert caplog.text.count("could not be read") == 1
    assert len(known.get().names) == 2
    assert caplog.text.count("could not be read") == 1  # not at every call
