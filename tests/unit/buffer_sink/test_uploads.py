from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from buffer_sink.uploads import UploadWindow
from opendata_buffer.runtime import SystemRuntime


def window(concurrency: int) -> UploadWindow:
    return UploadWindow(concurrency, SystemRuntime())


def upload_threads() -> int:
    """Other threads of this process, of tests before, may end at any time."""
    return sum(each.name == "buffer-sink-upload" for each in threading.enumerate())


class Gate:
    """Jobs that say when they begin, and end when they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.done: list[int] = []

    def job(self, number: int) -> Callable[[], None]:
        def run() -> None:
            self.begun.release()
            assert self.go.acquire(timeout=30)
            self.done.append(number)

        return run


def test_all_jobs_are_done_when_the_window_is_left() -> None:
    done: list[int] = []
    with window(3) as made:
        for number in range(20):
            made.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert sorted(done) == list(range(20))


def test_no_job_no_thread() -> None:
    with window(4):
        assert upload_threads() == 0


def test_submit_blocks_while_all_threads_are_busy_and_one_job_waits() -> None:
    gate = Gate()
    fourth = threading.Event()
    with window(2) as made:
        for number in range(2):
            made.submit(gate.job(number))
        assert gate.begun.acquire(timeout=30)
        assert gate.begun.acquire(timeout=30)
        made.submit(gate.job(2))  # waits for a thread

        def more() -> None:
            made.submit(gate.job(3))
            fourth.set()

        submitter = threading.Thread(target=more)
        submitter.start()
        # Nothing may free the window but the end of a job.
        assert not fourth.wait(0.05)
        gate.go.release()
        assert fourth.wait(30)
        for _ in range(3):
            gate.go.release()
        submitter.join()
    assert sorted(gate.done) == [0, 1, 2, 3]


def test_the_first_failure_reaches_the_next_submit() -> None:
    def fail() -> None:
        raise OSError("disk full")

    submitted: list[int] = []

    def use() -> None:
        with window(1) as made:
            for number in range(100):
                made.submit(fail)
                submitted.append(number)

    with pytest.raises(OSError, match="disk full"):
        use()
    assert len(submitted) <= 2


def test_the_failure_of_the_last_job_is_not_lost() -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), window(4) as made:
        made.submit(fail)


def test_an_error_of_the_caller_drops_what_waits_and_ends_the_threads() -> None:
    gate = Gate()

    def use() -> None:
        with window(1) as made:
            made.submit(gate.job(0))
            assert gate.begun.acquire(timeout=30)
            made.submit(gate.job(1))
            gate.go.release()
            raise KeyError("caller")

    with pytest.raises(KeyError, match="caller"):
        use()
    assert 1 not in gate.done or gate.done == [0, 1]
    assert upload_threads() == 0
