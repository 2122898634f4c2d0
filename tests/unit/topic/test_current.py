"""A topic's partitions, not older than some seconds."""

from __future__ import annotations

import logging
import threading

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import Task
from opendata_buffer.stores.base import Blob, NotModified
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import CurrentTopic, Topic
from tests.unit.topic.world import URL, WAIT_S, topic_in


class Joined(ManualRuntime):
    """Remembers its threads, so that a test can wait for their end."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Task] = []

    def spawn(self, target: object, name: str) -> Task:
        task = super().spawn(target, name)  # type: ignore[arg-type]
        self.tasks.append(task)
        return task


class Counting(MemoryStore):
    looks = 0
    down = False
    gate: threading.Event | None = None

    def get(self, key: str, **options: object) -> Blob | NotModified:
        self.looks += 1
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        if self.down:
            raise TransientStorageError("down")
        return super().get(key, **options)  # type: ignore[arg-type]


def current(store: MemoryStore, runtime: ManualRuntime) -> CurrentTopic:
    return CurrentTopic(Topic.open(URL, store=store, runtime=runtime), runtime, 2.0)


def test_a_fresh_answer_costs_nothing_and_an_old_one_is_renewed_behind_the_caller() -> None:
    store, runtime = Counting(), Joined()
    topic = topic_in(store, 2)
    known = current(store, runtime)
    topic.expand(3)
    store.looks = 0
    runtime.advance(1.9)
    assert len(known.get().names) == 2
    assert (store.looks, runtime.tasks) == (0, [])
    runtime.advance(0.2)
    store.gate = threading.Event()
    assert len(known.get().names) == 2  # does not wait
    assert len(known.get().names) == 2
    store.gate.set()
    (task,) = runtime.tasks  # one look, whoever asks meanwhile
    task.join(WAIT_S)
    assert len(known.get().names) == 3
    assert store.looks == 1


def test_after_a_long_silence_the_caller_waits_for_a_look() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    topic = topic_in(store, 2)
    known = current(store, runtime)
    topic.expand(5)
    assert not known.is_outdated
    runtime.advance(3_600)
    assert known.is_outdated
    assert len(known.get().names) == 5
    assert not known.is_outdated


def test_a_store_that_is_down_leaves_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    store, runtime = Counting(), ManualRuntime()
    topic_in(store, 2)
    known = current(store, runtime)
    store.down = True
    runtime.advance(3_600)
    with caplog.at_level(logging.WARNING):
        assert len(known.get().names) == 2
    assert "could not be looked at" in caplog.text
    looks = store.looks
    assert len(known.get().names) == 2
    assert store.looks == looks  # not at every call
