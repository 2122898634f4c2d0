from __future__ import annotations

import asyncio
import threading

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.producer.batching import DurabilityWatcher, Durable, WriteHandle
from opendata_buffer.runtime import SystemRuntime

DURABLE = Durable(7, "ingest/x.batch")


@pytest.fixture
def watcher() -> DurabilityWatcher:
    return DurabilityWatcher(SystemRuntime())


def test_pending_then_durable_and_the_first_outcome_stays(watcher: DurabilityWatcher) -> None:
    assert watcher.result() is None
    watcher.complete(DURABLE)
    watcher.complete(TransientStorageError("late"))
    assert watcher.result() == watcher.await_durable() == DURABLE


def test_a_failure_is_raised_by_each_way_to_ask(watcher: DurabilityWatcher) -> None:
    watcher.complete(TransientStorageError("slow down"))
    for ask in (watcher.result, watcher.await_durable, lambda: asyncio.run(_wait(watcher))):
        with pytest.raises(TransientStorageError, match="slow down"):
            ask()


def test_a_timeout_says_that_the_producer_goes_on(watcher: DurabilityWatcher) -> None:
    with pytest.raises(TimeoutError, match="wait again"):
        watcher.await_durable(timeout=0.01)


def test_a_callback_that_raises_stops_neither_the_others_nor_the_producer(
    watcher: DurabilityWatcher, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def broken() -> None:
        calls.append("broken")
        raise ValueError("a bug of the caller's")

    watcher.add_done_callback(broken)
    watcher.add_done_callback(lambda: calls.append("next"))
    watcher.complete(DURABLE)
    assert calls == ["broken", "next"]
    assert watcher.result() == DURABLE
    # Also when it is called at once because the outcome is known.
    watcher.add_done_callback(broken)
    assert calls == ["broken", "next", "broken"]
    assert caplog.text.count("ValueError: a bug of the caller's") == 2


def test_an_interrupt_during_a_callback_in_the_callers_own_thread_is_the_callers(
    watcher: DurabilityWatcher,
) -> None:
    watcher.complete(DURABLE)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watcher.add_done_callback(interrupted)


async def _wait(watcher: DurabilityWatcher) -> Durable:
    return await WriteHandle(watcher, 1_700)


def test_a_handle_is_awaited_from_asyncio_and_completed_from_a_thread(
    watcher: DurabilityWatcher,
) -> None:
    async def main() -> Durable:
        threading.Timer(0.01, watcher.complete, [DURABLE]).start()
        return await asyncio.wait_for(_wait(watcher), 20)

    assert asyncio.run(main()) == DURABLE


def test_a_closed_loop_is_left_alone(watcher: DurabilityWatcher) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_wait(watcher), 0.01)

    asyncio.run(give_up())
    watcher.complete(DURABLE)
    assert watcher.result() == DURABLE
