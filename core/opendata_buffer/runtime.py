"""Time, threads and randomness: all that is not deterministic, besides the store.

This is the only module that may read a clock, sleep, start a thread or draw a random number
(ruff's banned-api list enforces it). Everything else takes a :class:`Runtime`, so that the
simulation can run the same code on virtual time with seeded randomness.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's digits, which ULIDs are written in: 26 of them hold 128 bits."""


def ulid_of(timestamp_ms: int, randomness: bytes) -> str:
    """A ULID of a time and 10 random bytes. See the decision about ULIDs and python-ulid."""
    bits = timestamp_ms << 80 | int.from_bytes(randomness, "big")
    return "".join([_BASE32[bits >> shift & 31] for shift in range(125, -1, -5)])


class Condition(Protocol):
    """``threading.Condition``, which also tells whether the calling thread holds it."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...
    def held(self) -> bool:
        """Whether the calling thread holds the lock."""
        ...


class Task(Protocol):
    """A started thread."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Runtime(Protocol):
    """Where time, threads and randomness come from."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the Unix epoch. May jump; never used for waiting."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back. For intervals, ages and deadlines."""
        ...

    def cpu_time(self) -> float:
        """Seconds of processor time the calling thread has used, without waiting."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        ...

    def condition(self) -> Condition:
        """A new condition with its lock."""
        ...

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        """Start a daemon thread that runs ``target``."""
        ...

    def random(self) -> float:
        """A number in [0, 1). For jitter only."""
        ...

    def ulid(self) -> str:
        """A new ULID of the current wall clock, 26 characters."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time by both clocks of one machine.

    Both, because each fails in its own way: the wall clock may be set back, and the monotonic
    one stands still while the machine is suspended and starts anew with it.

    Attributes:
        wall_ms: Milliseconds since the Unix epoch.
        monotonic: Seconds of the monotonic clock.
    """

    wall_ms: int
    monotonic: float

    @classmethod
    def now(cls, runtime: Runtime) -> Moment:
        """The present moment."""
        return cls(runtime.now_ms(), runtime.monotonic())

    def precedes(self, now: Moment) -> bool:
        """Whether neither clock went backwards until ``now``."""
        return self.wall_ms <= now.wall_ms and self.monotonic <= now.monotonic

    def age_ms(self, now: Moment) -> float:
        """Milliseconds until ``now``, by the clock that says more.

        The collector does not wait for a machine that sleeps (failure F5): what may be old is
        taken to be old.
        """
        return max(float(now.wall_ms - self.wall_ms), (now.monotonic - self.monotonic) * 1000)


_deadline: ContextVar[tuple[Runtime, float] | None] = ContextVar("_deadline", default=None)


@contextmanager
def deadline(runtime: Runtime, seconds: float) -> Iterator[None]:
    """Let everything inside the block end within so many seconds, or by a nearer deadline around.

    ::

        with deadline(runtime, 5.0):
            store.get(...)  # TransientStorageError after 5 s of silence

    It is part of the context and no argument, because retries and protocols lie between the
    public call that promises a time and the request that could take longer. It holds for the
    calling thread; a thread that is started inside begins without one. Code that waits asks
    :func:`remaining`; a block that only computes is not interrupted.
    """
    left = remaining()
    if left is not None and left < seconds:
        yield
        return
    token = _deadline.set((runtime, runtime.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def remaining() -> float | None:
    """Seconds until the deadline, not above zero when it has passed; None without one."""
    found = _deadline.get()
    if found is None:
        return None
    runtime, at = found
    return at - runtime.monotonic()


class _SystemCondition(threading.Condition):
    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        # The lock's own function, not a method around it: produce() asks on every call.
        self.held: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]


class SystemRuntime:
    """The real clock, real threads, real randomness."""

    # The clock's own function, not a method around it: produce() asks on every call.
    monotonic = staticmethod(time.monotonic)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def cpu_time(self) -> float:
        return time.thread_time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def condition(self) -> Condition:
        return _SystemCondition()

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        # Daemon: a service that exits without close() must not hang in interpreter shutdown.
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def random(self) -> float:
        return random.random()

    def ulid(self) -> str:
        # Random bits from the operating system, not from `random`: forked workers share the
        # state of the latter, and two equal ULIDs would overwrite each other's batch.
        return ulid_of(self.now_ms(), secrets.token_bytes(10))
