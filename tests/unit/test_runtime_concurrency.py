"""Parallel calls, methods under a lock, and objects that a with block closes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from opendata_buffer.errors import FlushFailed
from opendata_buffer.runtime import (
    Closeable,
    SystemRuntime,
    Task,
    deadline,
    in_parallel,
    locked,
    remaining,
)
from tests.unit.interrupts import each_step

RUNTIME = SystemRuntime()


def test_results_come_in_the_order_of_the_items() -> None:
    assert in_parallel(RUNTIME, lambda each: each * 2, range(100), most=7) == list(range(0, 200, 2))
    assert in_parallel(RUNTIME, str, []) == []
    thread = threading.current_thread()
    assert in_parallel(RUNTIME, lambda _: threading.current_thread(), [0]) == [thread]


def test_calls_run_at_the_same_time() -> None:
    met = threading.Barrier(8)  # raises an error unless eight threads wait at once
    assert in_parallel(RUNTIME, lambda _: met.wait(timeout=30) >= 0, range(8)) == [True] * 8


def test_no_more_run_at_once_than_allowed() -> None:
    lock, now, highest = threading.Lock(), 0, 0

    def call(_: int) -> None:
        nonlocal now, highest
        with lock:
            now += 1
            highest = max(highest, now)
        with lock:
            now -= 1

    in_parallel(RUNTIME, call, range(200), most=3)
    assert 1 <= highest <= 3


class Threads(SystemRuntime):
    """Starts a limited number of threads. With ``at_once``, each thread ends when it is started."""

    def __init__(self, most: int, *, at_once: bool = False) -> None:
        self.started = 0
        self._most = most
        self._at_once = at_once

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        if self.started == self._most:
            raise RuntimeError("can't start new thread")
        self.started += 1
        task = super().spawn(target, name)
        if self._at_once:
            task.join()
        return task


def test_few_threads_make_all_calls_if_the_calls_end_at_once() -> None:
    runtime = Threads(20, at_once=True)
    assert in_parallel(runtime, str, range(20)) == [str(each) for each in range(20)]
    assert runtime.started == 1


@pytest.mark.parametrize("threads", [0, 2])
def test_the_caller_makes_the_remaining_calls_if_no_thread_can_start(threads: int) -> None:
    used: set[str] = set()

    def call(number: int) -> int:
        used.add(threading.current_thread().name)
        RUNTIME.sleep(0.002)
        return number

    assert in_parallel(Threads(threads), call, range(20)) == list(range(20))
    assert threading.current_thread().name in used
    assert len(used) <= threads + 1


def test_an_error_is_raised_once_all_others_have_ended() -> None:
    done = []

    def call(number: int) -> None:
        if number in (3, 5):
            raise ValueError(number)
        done.append(number)

    with pytest.raises(ValueError, match="3"):
        in_parallel(RUNTIME, call, range(10), most=4)
    assert sorted(done) == [0, 1, 2, 4, 6, 7, 8, 9]


def test_calls_see_the_deadline_of_their_caller() -> None:
    with deadline(RUNTIME, 60.0):
        found = in_parallel(RUNTIME, lambda _: remaining(), range(4))
    assert all(left is not None and 0 < left <= 60.0 for left in found)


class Failing(Closeable):
    closed = 0

    def close(self) -> None:
        self.closed += 1
        raise FlushFailed(1, "the store is gone")


def test_a_failing_close_does_not_hide_the_error_of_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(FlushFailed), Failing() as thing:
        assert thing.closed == 0
    assert thing.closed == 1
    with pytest.raises(ZeroDivisionError), thing:
        raise ZeroDivisionError
    assert thing.closed == 2
    assert "closing the Failing after an error failed" in caplog.text
    assert "the store is gone" in caplog.text


WAIT_S = 60.0


class Counter:
    def __init__(self) -> None:
        self._condition = SystemRuntime().condition()
        self.value = 0

    @locked
    def add(self, amount: int = 1) -> int:
        assert self._condition.held()
        self.value += amount
        self._condition.wait(0.001)
        return self.value

    @locked
    def add_twice(self) -> None:
        self.add()

    def is_free(self) -> bool:
        """Return whether another thread can take the lock."""
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(self.add(0)), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        return bool(found)


@pytest.mark.full
def test_an_interrupt_at_any_instruction_releases_the_lock() -> None:
    counter = Counter()
    for interrupt in each_step(least=20, opcodes=True):
        interrupt(counter.add)
        assert not counter._condition.held()
    assert counter.is_free()


def test_errors_and_nested_calls_release_the_lock() -> None:
    counter = Counter()
    with pytest.raises(TypeError):
        counter.add("one")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"Counter.add was called in the middle of another"):
        counter.add_twice()
    assert counter.value == 0
    assert counter.is_free()
