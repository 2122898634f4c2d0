"""Uploads beside encoding: a few at once, in bounded memory, first failure wins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from opendata_buffer.runtime import Runtime, Task

__all__ = ["UploadWindow"]


class UploadWindow:
    """Runs jobs on at most ``concurrency`` threads; ``submit`` blocks while all are busy.

    A context manager: leaving it by an error waits for the running jobs and drops the others.

    Args:
        concurrency: Jobs at once. One more may wait, so that a thread never idles.
        runtime: Where threads come from.
    """

    def __init__(self, concurrency: int, runtime: Runtime) -> None:
        self._concurrency = concurrency
        self._runtime = runtime
        self._changed = runtime.condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0
        self._threads: list[Task] = []
        self._closed = False
        self._failure: BaseException | None = None

    def __enter__(self) -> UploadWindow:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            if exc is not None:
                self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if exc is None:
            self._check()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job soon; returns once it runs or is the only one that waits.

        Raises:
            BaseException: What the first job that failed raised.
        """
        with self._changed:
            while self._waiting and self._failure is None:
                self._changed.wait()
            self._check()
            self._waiting.append(job)
            if self._running == len(self._threads) < self._concurrency:
                self._threads.append(self._runtime.spawn(self._work, "buffer-sink-upload"))
            self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting or self._failure is not None:
                    return
                job = self._waiting.popleft()
                self._running += 1
                self._changed.notify_all()
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._failure = self._failure or error
            finally:
                # The job holds a batch's bytes; keeping it until the next one comes would keep
                # one batch more in memory.
                del job
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()
