"""The manual clock of :mod:`opendata_buffer.testing.runtime`."""

from __future__ import annotations

import threading

from opendata_buffer.runtime import Condition
from opendata_buffer.testing.runtime import ManualRuntime


def test_two_threads_that_sleep_with_locks_held_do_not_wait_for_each_other() -> None:
    runtime = ManualRuntime()
    conditions = [runtime.condition() for _ in range(4)]
    all_hold_their_lock = threading.Barrier(len(conditions))

    def sleep(condition: Condition) -> None:
        with condition:
            all_hold_their_lock.wait(30)
            runtime.sleep(1)

    threads = [threading.Thread(target=sleep, args=[each], daemon=True) for each in conditions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [thread.is_alive() for thread in threads] == [False] * 4
    assert runtime.monotonic() == 4


def test_a_wait_ends_when_the_clock_is_moved_past_its_timeout() -> None:
    runtime = ManualRuntime()
    condition = runtime.condition()
    notified: list[bool] = []

    def wait() -> None:
        with condition:
            notified.append(condition.wait(10))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    runtime.await_waits(1)
    runtime.advance(9)
    thread.join(0.1)
    assert thread.is_alive()
    runtime.advance(1)
    thread.join(30)
    assert notified == [False]
