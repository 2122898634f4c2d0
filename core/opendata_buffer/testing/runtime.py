"""A runtime whose clock moves only when a test moves it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from opendata_buffer.arguments import checked
from opendata_buffer.runtime import Condition, SystemRuntime, Task, ulid_of

_LOOK_AGAIN_S = 0.02
"""Seconds of real time after which a waiting thread looks at the clock by itself."""


class ManualRuntime:
    """A runtime with a manual clock, seeded randomness, and real threads.

    ``sleep`` does not block; it moves the clock. A wait with a timeout blocks until it is notified,
    or until :meth:`advance` has moved the clock past the timeout. So a background thread that waits
    for its next cycle begins the cycle exactly when the test moves the clock that far.

    Args:
        now_ms: Wall clock at the start, in milliseconds since the Unix epoch. Default
            2026-01-01T00:00:00Z.
        seed: Seed of jitter and ULIDs.
    """

    @checked
    def __init__(self, now_ms: int = 1_767_225_600_000, seed: int = 0) -> None:
        self._system = SystemRuntime()
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._start_ms = now_ms
        self._elapsed_s = 0.0
        self._skew_ms = 0
        self._conditions: WeakSet[_ManualCondition] = WeakSet()
        self._waits = 0
        self._waited = self._system.condition()
        self.slept: list[float] = []
        """The seconds that each ``sleep`` asked for, in order."""

    def now_ms(self) -> int:
        """See :meth:`opendata_buffer.runtime.Runtime.now_ms`."""
        with self._lock:
            return self._start_ms + self._skew_ms + round(self._elapsed_s * 1000)

    def monotonic(self) -> float:
        """See :meth:`opendata_buffer.runtime.Runtime.monotonic`."""
        with self._lock:
            return self._elapsed_s

    def cpu_time(self) -> float:
        """Return 0. Computing takes no time on this clock."""
        return 0.0

    @checked
    def sleep(self, seconds: float) -> None:
        """Move the clock and return at once.

        Args:
            seconds: How far, in seconds.
        """
        self.slept.append(seconds)
        self.advance(seconds)

    def condition(self) -> Condition:
        """See :meth:`opendata_buffer.runtime.Runtime.condition`."""
        made = _ManualCondition(self)
        with self._lock:
            self._conditions.add(made)
        return made

    @checked
    def spawn(self, target: Callable[[], None], name: str) -> Task:
        """See :meth:`opendata_buffer.runtime.Runtime.spawn`."""
        return self._system.spawn(target, name)

    def random(self) -> float:
        """See :meth:`opendata_buffer.runtime.Runtime.random`."""
        with self._lock:
            return self._random.random()

    def ulid(self) -> str:
        """See :meth:`opendata_buffer.runtime.Runtime.ulid`."""
        return self.ulid_at(self.now_ms())

    @checked
    def ulid_at(self, timestamp_ms: int) -> str:
        """Return a new ULID with any time.

        Args:
            timestamp_ms: The time, in milliseconds since the Unix epoch.

        Returns:
            The ULID.
        """
        with self._lock:
            noise = self._random.randbytes(10)
        return ulid_of(timestamp_ms, noise)

    @checked
    def advance(self, seconds: float) -> None:
        """Move both clocks forward, and wake the threads that waited for that.

        Args:
            seconds: How far, in seconds.
        """
        with self._lock:
            self._elapsed_s += max(0.0, seconds)
            conditions = list(self._conditions)
        for condition in conditions:
            condition.wake()

    @checked
    def set_wall_clock(self, now_ms: int) -> None:
        """Let the wall clock jump, forward or back. The monotonic clock does not change.

        Args:
            now_ms: The new time, in milliseconds since the Unix epoch.
        """
        with self._lock:
            self._skew_ms = now_ms - self._start_ms - round(self._elapsed_s * 1000)

    @checked
    def await_waits(self, count: int, timeout: float = 30.0) -> None:
        """Block until ``count`` waits with a timeout have begun, over all threads.

        Args:
            count: The number of waits since the runtime was created.
            timeout: Seconds of real time to wait for them.

        Raises:
            TimeoutError: They did not begin within ``timeout`` seconds.
        """
        with self._waited:
            while self._waits < count:
                if not self._waited.wait(timeout):
                    raise TimeoutError(f"{self._waits} of {count} waits began in {timeout} s")

    def _wait_begins(self) -> None:
        with self._waited:
            self._waits += 1
            self._waited.notify_all()


class _ManualCondition:
    def __init__(self, runtime: ManualRuntime) -> None:
        self._runtime = runtime
        self._real = threading.Condition(threading.RLock())
        self._notified = 0

    def __enter__(self) -> bool:
        return self._real.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._real.__exit__(*raised)

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            return self._real.wait()
        seen = self._notified
        deadline = self._runtime.monotonic() + timeout
        # Count while the lock is held. When a test sees the count and moves the clock, this thread
        # is then surely waiting.
        self._runtime._wait_begins()
        while self._notified == seen and self._runtime.monotonic() < deadline:
            self._real.wait(_LOOK_AGAIN_S)
        return self._notified != seen

    def notify_all(self) -> None:
        self._notified += 1
        self._real.notify_all()

    def held(self) -> bool:
        lock: Any = self._real
        return bool(lock._is_owned())

    def wake(self) -> None:
        """Let waiting threads look at the clock, at once or after ``_LOOK_AGAIN_S``.

        Two threads may both sleep with a lock held, and each wakes all waiting threads. If they
        waited for each other's locks, they would wait forever.
        """
        if self._real.acquire(timeout=_LOOK_AGAIN_S):
            try:
                self._real.notify_all()
            finally:
                self._real.release()
