"""Time, threads, randomness and retries: all that is not deterministic, besides the store.

Only this module may read a clock, sleep, start a thread or draw a random number (ruff's banned-api
list). Everything else takes a :class:`Runtime`, so that the simulation can run the same code on
virtual time with seeded randomness.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from opendata_buffer.errors import OpenDataBufferError

log = logging.getLogger(__name__)

_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's digits, which ULIDs are written in: 26 of them hold 128 bits."""


def ulid_of(timestamp_ms: int, randomness: bytes) -> str:
    """A ULID of a time and 10 random bytes. See the decision about ULIDs and python-ulid."""
    bits = timestamp_ms << 80 | int.from_bytes(randomness, "big")
    return "".join([_BASE32[bits >> shift & 31] for shift in range(125, -1, -5)])


class Condition(AbstractContextManager[bool], Protocol):
    """``threading.Condition``, which also knows whether the calling thread holds it."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...
    def held(self) -> bool:
        """Whether the calling thread holds the lock."""


class Lockable(Protocol):
    """An object with one lock."""

    _condition: Condition


Owner = TypeVar("Owner", bound=Lockable)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Item = TypeVar("Item")


def locked(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Run a method with its object's lock held, and release the lock however it ends.

    A ``with`` statement leaves its lock locked when Ctrl-C raises ``KeyboardInterrupt`` between
    taking it and entering the block, or between leaving the block and releasing it. This function
    releases it there too. Half of a change is not undone, so the methods change their object's
    state in single steps, each of which leaves it valid.

    Locks are taken in no order, because a locked method takes no other lock, and calls no store, no
    caller's function and no other locked method of its object: it returns values, and its caller
    acts on them unlocked. Four locks are held while a store or a connection answers, those of
    :class:`.Consumer`, :class:`.Publisher`, :class:`.Broker` and :class:`.Discovery`. What they
    call has at most one lock of its own, and calls nothing back.

    RuntimeError where the thread holds the lock already: a signal handler interrupted it in the
    middle of a change and calls the same object.
    """

    @wraps(method)
    def run(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        condition = self._condition
        if condition.held():
            raise RuntimeError(
                f"{method.__qualname__.lstrip('_')} was called in the middle of another call of "
                "the same object, by a signal handler: raise an exception in the handler, and "
                "call it where that is caught"
            )
        try:
            try:
                condition.__enter__()
                return method(self, *args, **kwargs)
            finally:
                if condition.held():
                    condition.__exit__(None, None, None)
        finally:
            # Reached with the lock held when the error came while the inner lines released it.
            if condition.held():
                condition.__exit__(None, None, None)

    return run


class Task(Protocol):
    """A started thread."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Runtime(Protocol):
    """Where time, threads and randomness come from."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the Unix epoch. May jump; never used for waiting."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back. For intervals, ages and deadlines."""

    def cpu_time(self) -> float:
        """Seconds of processor time the calling thread has used, without waiting."""

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""

    def condition(self) -> Condition:
        """A new condition with its lock."""

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        """Start a daemon thread that runs ``target``."""

    def random(self) -> float:
        """A number in [0, 1). For jitter only."""

    def ulid(self) -> str:
        """A new ULID of the current wall clock, 26 characters."""


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


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time by both clocks of one machine: the wall clock may be set back, and the
    monotonic one stops while the machine is suspended and starts anew when it boots."""

    wall_ms: int  # since the Unix epoch
    monotonic: float  # seconds

    @classmethod
    def now(cls, runtime: Runtime) -> Moment:
        """The present moment."""
        return cls(runtime.now_ms(), runtime.monotonic())

    def precedes(self, now: Moment) -> bool:
        """Whether neither clock went backwards until ``now``."""
        return self.wall_ms <= now.wall_ms and self.monotonic <= now.monotonic

    def age_ms(self, now: Moment) -> float:
        """Milliseconds until ``now``, by the clock with the larger difference.

        A collector elsewhere goes on while this machine is suspended (failure F5).
        """
        return max(float(now.wall_ms - self.wall_ms), (now.monotonic - self.monotonic) * 1000)


class Interval:
    """For what is done at most once in so many seconds, such as a warning. Not thread-safe."""

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._next_at = float("-inf")

    def is_due(self) -> bool:
        """Whether the time has come; then the next interval begins."""
        now = self._runtime.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + self._seconds
        return True


_deadline: ContextVar[tuple[Runtime, float] | None] = ContextVar("_deadline", default=None)


@contextmanager
def deadline(runtime: Runtime, seconds: float) -> Iterator[None]:
    """Let everything inside the block end within so many seconds, or by a nearer deadline around.

    ::

        with deadline(runtime, 5.0):
            store.get(...)  # TransientStorageError after 5 s of silence

    It holds for the calling thread; a thread that is started inside begins without one. Code that
    waits asks :func:`remaining`; a block that only computes is not interrupted.
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


def wait_for(
    runtime: Runtime,
    condition: Condition,
    is_met: Callable[[], object],
    seconds: float | None = None,
    *,
    until: float | None = None,
) -> bool:
    """Wait, with the lock held, until ``is_met()``; False where that took too long.

    ``is_met`` is called after each notification. The limit is ``seconds``, or ``until``, a time of
    the monotonic clock; without either it waits for ever.
    """
    if seconds is not None:
        until = runtime.monotonic() + seconds
    while not is_met():
        left = None if until is None else until - runtime.monotonic()
        if left is not None and left <= 0:
            return False
        condition.wait(left)
    return True


class Closeable(ABC):
    """A context manager that closes itself, and does not hide the error that ended the block."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is pending and end; free to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        try:
            self.close()
        except OpenDataBufferError as error:
            if exc is None:
                raise
            # The caller's own error matters more, and often is the cause of this one.
            name = type(self).__name__
            log.warning("closing the %s after an error failed, too: %s", name, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        import asyncio  # not for those that do not use it

        await asyncio.to_thread(self.__exit__, *raised)


def in_parallel(
    runtime: Runtime,
    call: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = 32,  # a quarter of the connections that a store keeps by default
) -> list[Result]:
    """The results of ``call`` of each item, from threads that have the caller's deadline. Raises
    the error of the first item whose call failed, after all calls have ended."""
    wanted = tuple(items)
    if len(wanted) <= 1:
        return [call(each) for each in wanted]  # a thread would only add cost
    changed = runtime.condition()
    waiting = list(enumerate(wanted))[::-1]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            with changed:
                if not waiting:
                    return
                index, item = waiting.pop()
            try:
                results[index] = call(item)
            except BaseException as error:  # raised again in the caller's thread
                errors[index] = error
            with changed:
                changed.notify_all()

    for _ in range(min(most, len(wanted))):
        with changed:
            if not waiting:
                break  # a fast store has answered all calls before every thread was started
        context = copy_context()  # one context cannot be entered twice at once
        try:
            runtime.spawn(lambda context=context: context.run(work), "opendata-buffer-together")  # type: ignore[misc]
        except RuntimeError:
            # No thread can be started. The error would leave calls under way without a waiter.
            work()
            break
    with changed:
        while len(results) + len(errors) < len(wanted):
            changed.wait()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(wanted))]


@dataclass(frozen=True)
class Retries:
    """A retry policy with full-jitter exponential backoff within a deadline.

    Call it with a function and its arguments; several threads may. Attempt ``n`` is followed by a
    sleep drawn from [0, min(max_ms, base_ms * 2**(n-1))). Full jitter, because writers that lost
    one CAS race together would otherwise meet again in the next one (failure F14).

    No attempt begins later than ``deadline_ms`` after the first one. The last sleep is cut short,
    so that an attempt is made about then. A sleep that would reach the caller's
    :func:`~.runtime.deadline` ends the retries.
    """

    runtime: Runtime
    _: KW_ONLY
    base_ms: int  # the first step of the backoff
    max_ms: int  # the largest step
    deadline_ms: int
    retry_on: tuple[type[Exception], ...]  # all others, and the last of these, are raised
    pause: Callable[[BaseException], float | None] | None = None  # seconds; None: the backoff
    before_pause: Callable[[], None] | None = None  # called before each sleep
    max_attempts: int | None = None  # at most; None: until the deadline

    def __call__(
        self,
        call: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """What the function returns or, at once or in the last attempt, raises."""
        until = self.runtime.monotonic() + self.deadline_ms / 1000
        failures = 0
        while True:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                _clear_locals(error)
                failures += 1
                if not isinstance(error, self.retry_on) or failures == self.max_attempts:
                    raise
                left = until - self.runtime.monotonic()
                pause = min(self._pause_after(failures, error), max(0.0, left))
                # At the caller's deadline nothing can be tried any more, and the error of the last
                # attempt has more in it than that time is up.
                around = remaining()
                if left <= 0 or (around is not None and pause >= around):
                    raise
            if self.before_pause is not None:
                self.before_pause()
            self.runtime.sleep(pause)

    def _pause_after(self, failures: int, error: BaseException) -> float:
        if self.pause is not None and (pause := self.pause(error)) is not None:
            return pause
        # The exponent is capped: 2.0**1024 overflows after some hours of retries.
        step_ms = min(self.max_ms, self.base_ms * 2.0 ** min(failures - 1, 64))
        return self.runtime.random() * step_ms / 1000


def _clear_locals(error: BaseException) -> None:
    """Let go of the values of the frames that an error has passed; its traceback stays. Handles
    keep errors: the copies of a manifest of 64 MiB would stay with each one (failure F35)."""
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:  # a chain may be a circle
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
