from __future__ import annotations

import asyncio
import threading

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.producer.handle import Completion, DurabilityWatcher, Durable, WriteHandle
from opendata_buffer.runtime import SystemRuntime

DURABLE = Durable(7, "ingest/x.batch")


def completion() -> Completion:
    return Completion(SystemRuntime())


def test_pending_then_durable() -> None:
    pending = completion()
    watcher = DurabilityWatcher(pending)
    assert watcher.result() is None
    pending.set(DURABLE)
    assert watcher.result() == DURABLE
    assert watcher.await_durable() == DURABLE


def test_a_failure_is_raised_to_everybody_who_asks() -> None:
    failed = completion()
    failed.set(TransientStorageError("slow down"))
    watcher = DurabilityWatcher(failed)
    for ask in (watcher.result, watcher.await_durable):
        with pytest.raises(TransientStorageError, match="slow down"):
            ask()


def test_the_first_outcome_stays() -> None:
    settled = completion()
    settled.set(DURABLE)
    settled.set(TransientStorageError("late"))
    assert settled.result() == DURABLE


def test_a_timeout_says_that_the_producer_goes_on() -> None:
    with pytest.raises(TimeoutError, match="wait again"):
        DurabilityWatcher(completion()).await_durable(timeout=0.01)


def test_many_threads_wait_for_one_outcome() -> None:
    pending = completion()
    got: list[Durable] = []
    threads = [
        threading.Thread(target=lambda: got.append(DurabilityWatcher(pending).await_durable(20)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    pending.set(DURABLE)
    for thread in threads:
        thread.join()
    assert got == [DURABLE] * 8


def test_callbacks_run_once_also_when_added_late() -> None:
    pending = completion()
    calls: list[str] = []
    pending.add_callback(lambda: calls.append("early"))
    assert calls == []
    pending.set(DURABLE)
    pending.add_callback(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_a_callback_that_raises_stops_neither_the_others_nor_the_committer() -> None:
    pending = completion()
    calls: list[str] = []

    def broken() -> None:
        calls.append("broken")
        raise ValueError("a bug of the caller's")

    pending.add_callback(broken)
    pending.add_callback(lambda: calls.append("next"))
    pending.set(DURABLE)
    assert calls == ["broken", "next"]
    assert pending.result() == DURABLE


def test_a_callback_that_raises_is_logged_also_when_it_is_called_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pending = completion()
    pending.set(DURABLE)

    def broken() -> None:
        raise ValueError("a bug of the caller's")

    pending.add_callback(broken)
    assert "a bug of the caller's" in caplog.text


def test_an_interrupt_during_a_callback_in_the_callers_own_thread_is_the_callers() -> None:
    pending = completion()
    pending.set(DURABLE)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pending.add_callback(interrupted)


def test_a_handle_is_awaited_from_asyncio_and_settled_from_a_thread() -> None:
    pending = completion()
    handle = WriteHandle(DurabilityWatcher(pending), 1_700)

    async def main() -> Durable:
        threading.Timer(0.01, pending.set, [DURABLE]).start()
        return await asyncio.wait_for(_wait(handle), 20)

    async def _wait(waited: WriteHandle) -> Durable:
        return await waited

    assert asyncio.run(main()) == DURABLE


def test_a_failure_reaches_the_awaiting_task() -> None:
    pending = completion()
    handle = WriteHandle(DurabilityWatcher(pending), 1_700)
    pending.set(TransientStorageError("slow down"))

    async def main() -> Durable:
        return await handle

    with pytest.raises(TransientStorageError):
        asyncio.run(main())


def test_a_closed_loop_is_left_alone() -> None:
    pending = completion()
    handle = WriteHandle(DurabilityWatcher(pending), 1_700)

    async def give_up() -> None:
        async def wait() -> Durable:
            return await handle

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(give_up())
    pending.set(DURABLE)
    assert handle.watcher.result() == DURABLE
