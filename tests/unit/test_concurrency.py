"""Calls in parallel, methods under a lock, and objects that a block closes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from opendata_buffer.concurrency import Closeable, in_parallel, locked, wait_for
from opendata_buffer.errors import FlushFailed
from opendata_buffer.runtime import SystemRuntime, Task, deadline, remaining
from tests.support.simulation import Simulation
from tests.unit.interrupts import interrupted

RUNTIME = SystemRuntime()


def test_results_come_in_the_order_of_the_items() -> None:
    assert in_parallel(RUNTIME, lambda each: each * 2, range(100), most=7) == list(range(0, 200, 2))
    assert in_parallel(RUNTIME, str, []) == []


def test_calls_run_at_the_same_time() -> None:
    met = threading.Barrier(8)  # breaks unless eight wait at once
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


def test_where_calls_are_over_at_once_few_threads_do_them_all() -> None:
    class AtOnce(SystemRuntime):
        spawned = 0

        def spawn(self, target: Callable[[], None], name: str) -> Task:
            self.spawned += 1
            task = super().spawn(target, name)
            task.join()
            return task

    runtime = AtOnce()
    assert in_parallel(runtime, str, range(20)) == [str(each) for each in range(20)]
    assert runtime.spawned == 1


@pytest.mark.parametrize("threads", [0, 2])
def test_where_no_more_threads_start_the_caller_does_what_is_left(threads: int) -> None:
    class FewThreads(SystemRuntime):
        left = threads

        def spawn(self, target: Callable[[], None], name: str) -> Task:
            if not self.left:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            return super().spawn(target, name)

    begun: set[str] = set()
    own = threading.current_thread()

    def call(number: int) -> int:
        begun.add(threading.current_thread().name)
        RUNTIME.sleep(0.002)
        return number

    assert in_parallel(FewThreads(), call, range(20)) == list(range(20))
    assert own.name in begun
    assert len(begun) <= threads + 1


def test_one_item_needs_no_thread() -> None:
    assert in_parallel(RUNTIME, lambda _: threading.current_thread(), [0]) == [
        threading.current_thread()
    ]


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

    def close(self, timeout: float | None = None) -> None:
        self.closed += 1
        raise FlushFailed(1, "the store is gone")


def test_a_close_that_fails_is_told() -> None:
    with pytest.raises(FlushFailed), Failing() as thing:
        assert thing.closed == 0
    assert thing.closed == 1


def test_a_close_that_fails_does_not_hide_the_error_that_ended_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thing = Failing()
    with pytest.raises(ZeroDivisionError), thing:
        raise ZeroDivisionError
    assert thing.closed == 1
    assert "closing the Failing failed" in caplog.text
    assert "the store is gone" in caplog.text


def test_a_wait_ends_when_it_is_true_or_when_its_time_is_over() -> None:
    condition = RUNTIME.condition()
    with condition:
        assert wait_for(RUNTIME, condition, lambda: True, None)
        until = RUNTIME.monotonic() + 0.05
        assert not wait_for(RUNTIME, condition, lambda: False, until)
        assert RUNTIME.monotonic() >= until


def test_errors_of_others_come_out() -> None:
    class Broken(Closeable):
        def close(self, timeout: float | None = None) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"), Broken():
        pass


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
        """Whether another thread gets the lock."""
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(self.add(0)), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        return bool(found)


@pytest.mark.parametrize("opcodes", [False, True], ids=["lines", "opcodes"])
def test_an_interrupt_at_any_step_leaves_the_lock_free(opcodes: bool) -> None:
    counter = Counter()
    step = 1
    while interrupted(counter.add, step, opcodes=opcodes):
        assert not counter._condition.held(), f"step {step}"
        step += 1
    assert counter.is_free()
    assert step > 20


def test_an_error_of_the_method_is_raised_and_the_lock_is_free() -> None:
    counter = Counter()
    with pytest.raises(TypeError):
        counter.add("one")  # type: ignore[arg-type]
    assert counter.is_free()


def test_a_call_in_the_middle_of_another_one_is_refused_and_does_no_harm() -> None:
    counter = Counter()
    with pytest.raises(RuntimeError, match=r"Counter.add was called in the middle of another"):
        counter.add_twice()
    assert counter.value == 0
    assert counter.is_free()


def test_simulated_locks_are_given_back_too() -> None:
    simulation = Simulation(seed=1)
    runtime = simulation.process("one")
    counter = Counter()
    counter._condition = runtime.condition()
    free: list[bool] = []

    def main() -> None:
        counter.add()
        free.append(not counter._condition.held())

    simulation.run(main)
    assert free == [True]
