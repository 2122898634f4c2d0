"""One handle for parts in several partitions."""

from __future__ import annotations

import asyncio

import pytest

from opendata_buffer.errors import Drained, TransientStorageError
from opendata_buffer.producer.handle import DurabilityWatcher, Durable, WriteHandle
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.producer import TopicHandle, TopicWatcher

ONE, TWO = Durable(1, "p-00000/a.batch"), Durable(2, "p-00001/b.batch")


class Parts:
    def __init__(self) -> None:
        runtime = SystemRuntime()
        self.one, self.two = DurabilityWatcher(runtime), DurabilityWatcher(runtime)
        parts = {
            "p-00000": WriteHandle(self.one, 7),
            "p-00001": WriteHandle(self.two, 8),
        }
        self.watcher = TopicWatcher(parts, runtime)
        self.handle = TopicHandle(self.watcher, 7)


def test_it_is_durable_when_all_parts_are() -> None:
    parts = Parts()
    told: list[int] = []
    parts.watcher.add_done_callback(lambda: told.append(1))
    assert parts.watcher.result() is None
    parts.two.complete(TWO)
    assert parts.watcher.result() is None
    assert told == []
    parts.one.complete(ONE)
    assert parts.watcher.result() == {"p-00000": ONE, "p-00001": TWO}
    assert parts.watcher.await_durable(0) == {"p-00000": ONE, "p-00001": TWO}
    assert told == [1]
    parts.watcher.add_done_callback(lambda: told.append(2))
    assert told == [1, 2]


def test_a_failed_part_fails_it_once_all_have_ended() -> None:
    parts = Parts()
    parts.one.complete(Drained("p-00000/manifest"))
    assert parts.watcher.result() is None  # the other one may still land
    parts.two.complete(TWO)
    for call in (parts.watcher.result, parts.watcher.await_durable):
        with pytest.raises(Drained):
            call()
    assert parts.watcher.parts["p-00001"].watcher.result() == TWO


def test_the_first_failure_is_raised() -> None:
    parts = Parts()
    parts.two.complete(Drained("p-00001/manifest"))
    parts.one.complete(TransientStorageError("down"))
    for call in (parts.watcher.result, parts.watcher.await_durable):
        with pytest.raises(TransientStorageError):
            call()


def test_the_timeout_is_for_all_parts_together() -> None:
    parts = Parts()
    parts.one.complete(ONE)
    with pytest.raises(TimeoutError):
        parts.watcher.await_durable(0)


def test_it_is_awaited_in_asyncio() -> None:
    parts = Parts()

    async def settle_later() -> dict[str, Durable]:
        loop = asyncio.get_running_loop()
        loop.call_soon(parts.two.complete, TWO)
        loop.call_soon(parts.one.complete, ONE)
        return await parts.handle

    assert asyncio.run(settle_later()) == {"p-00000": ONE, "p-00001": TWO}

    failed = Parts()
    failed.one.complete(ONE)
    failed.two.complete(Drained("p-00001/manifest"))

    async def wait() -> None:
        await failed.handle

    with pytest.raises(Drained):
        asyncio.run(wait())


def test_a_call_of_nothing_is_durable_at_once() -> None:
    watcher = TopicWatcher({}, ManualRuntime())
    told: list[int] = []
    watcher.add_done_callback(lambda: told.append(1))
    assert (watcher.result(), watcher.await_durable(0), told) == ({}, {}, [1])
