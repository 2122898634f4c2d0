"""Many calls at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from opendata_buffer.concurrency import together
from opendata_buffer.runtime import SystemRuntime, Task, deadline, remaining

RUNTIME = SystemRuntime()


def test_results_come_in_the_order_of_the_items() -> None:
    assert together(RUNTIME, lambda each: each * 2, range(100), most=7) == list(range(0, 200, 2))
    assert together(RUNTIME, str, []) == []


def test_calls_run_at_the_same_time() -> None:
    met = threading.Barrier(8)  # breaks unless eight wait at once
    assert together(RUNTIME, lambda _: met.wait(timeout=30) >= 0, range(8)) == [True] * 8


def test_no_more_run_at_once_than_allowed() -> None:
    lock, now, highest = threading.Lock(), 0, 0

    def call(_: int) -> None:
        nonlocal now, highest
        with lock:
            now += 1
            highest = max(highest, now)
        with lock:
            now -= 1

    together(RUNTIME, call, range(200), most=3)
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
    assert together(runtime, str, range(20)) == [str(each) for each in range(20)]
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

    assert together(FewThreads(), call, range(20)) == list(range(20))
    assert own.name in begun
    assert len(begun) <= threads + 1


def test_one_item_needs_no_thread() -> None:
    assert together(RUNTIME, lambda _: threading.current_thread(), [0]) == [
        threading.current_thread()
    ]


def test_an_error_is_raised_once_all_others_have_ended() -> None:
    done = []

    def call(number: int) -> None:
        if number in (3, 5):
            raise ValueError(number)
        done.append(number)

    with pytest.raises(ValueError, match="3"):
        together(RUNTIME, call, range(10), most=4)
    assert sorted(done) == [0, 1, 2, 4, 6, 7, 8, 9]


def test_calls_see_the_deadline_of_their_caller() -> None:
    with deadline(RUNTIME, 60.0):
        found = together(RUNTIME, lambda _: remaining(), range(4))
    assert all(left is not None and 0 < left <= 60.0 for left in found)
