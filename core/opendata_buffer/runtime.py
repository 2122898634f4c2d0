"""Time, threads, randomness, and retries: everything nondeterministic except the store.

Only this module may read a clock, sleep, start a thread, or draw a random number (ruff's banned-api
list enforces this). All other code takes a :class:`Runtime`, so the simulation can run the same
code on virtual time with seeded randomness.
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


def ulid_of(timestamp_ms: int, randomness: bytes) -> str:
    """Make the ULID of a time and 10 random bytes.

    Args:
        timestamp_ms: Milliseconds since the Unix epoch, 0 to 2^48 - 1.
        randomness: Exactly 10 bytes.

    Returns:
        26 characters.

    Raises:
        OverflowError: The time does not fit.
        ValueError: There are more or fewer than 10 random bytes.
    """
    # Imported with the first ULID: the package asks for its own version, and reading that loads
    # half of `email`. A command or a Spark worker that names no batch does not pay for it.
    from ulid import ULID

    return str(ULID(timestamp_ms.to_bytes(6, "big") + randomness))


class Condition(AbstractContextManager[bool], Protocol):
    """A ``threading.Condition`` that also knows whether the calling thread holds it."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...
    def held(self) -> bool:
        """Return whether the calling thread holds the lock."""


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
    """Run a method with its object's lock held, and release the lock however the method ends.

    A ``with`` statement leaves its lock locked if Ctrl-C raises ``KeyboardInterrupt`` between
    taking the lock and entering the block, or between leaving the block and releasing the lock.
    This decorator releases the lock in those cases too. It does not undo half of a change, so a
    locked method changes its object's state in single steps, each of which leaves the state valid.

    Locks need no order. A locked method takes no other lock, and calls no store, no function of the
    caller, and no other locked method of its object. It returns values, and its caller acts on them
    without the lock. Four locks are held while a store or a connection answers: those of
    :class:`.Consumer`, :class:`.Publisher`, :class:`.Broker`, and :class:`.Discovery`. The code
    they call has at most one lock of its own and calls nothing back.

    Args:
        method: A method of an object that has a ``_condition``.

    Returns:
        The method with the lock.

    Raises:
        RuntimeError: By a call of the result, if the thread already holds the lock, because a
            signal handler interrupted it in the middle of a change and called the same object.
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
            # The lock is still held here if the error arrived while the lines above released it.
            if condition.held():
                condition.__exit__(None, None, None)

    return run


class Task(Protocol):
    """A started thread."""

    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Runtime(Protocol):
    """The source of time, threads, and randomness."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch by the wall clock, which may jump."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back, for intervals, ages, and deadlines."""

    def cpu_time(self) -> float:
        """Return the seconds of CPU time that the calling thread has used."""

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""

    def condition(self) -> Condition:
        """Return a new condition with its own lock."""

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        """Start a daemon thread that runs ``target``."""

    def random(self) -> float:
        """Return a number in [0, 1). Use it for jitter only."""

    def ulid(self) -> str:
        """Return a new ULID of the current wall clock, 26 characters."""


class _SystemCondition(threading.Condition):
    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        # The lock's own function instead of a method, because produce() calls it every time.
        self.held: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]


class SystemRuntime:
    """The real clock, real threads, real randomness."""

    # The clock's own function instead of a method, because produce() calls it every time.
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
        # The operating system's random bits instead of `random`'s: forked workers share the state
        # of `random`, and a worker would overwrite the batch of another that has the same ULID.
        return ulid_of(self.now_ms(), secrets.token_bytes(10))


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time by both clocks of one machine.

    Someone may set the wall clock back. The monotonic clock stops while the machine is suspended
    and starts at another value after a reboot.
    """

    wall_ms: int  # since the Unix epoch
    monotonic: float  # seconds

    @classmethod
    def now(cls, runtime: Runtime) -> Moment:
        """Return the present moment."""
        return cls(runtime.now_ms(), runtime.monotonic())

    def precedes(self, now: Moment) -> bool:
        """Return whether neither clock went backwards between this moment and ``now``."""
        return self.wall_ms <= now.wall_ms and self.monotonic <= now.monotonic

    def age_ms(self, now: Moment) -> float:
        """Return the milliseconds until ``now``, by the clock that shows more.

        A collector on another machine continues while this machine is suspended (failure F5).
        """
        return max(float(now.wall_ms - self.wall_ms), (now.monotonic - self.monotonic) * 1000)


class Interval:
    """Limits an action, such as a warning, to once per interval. Not thread-safe.

    Args:
        runtime: Its monotonic clock is used.
        seconds: Length of the interval, in seconds.
    """

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime = runtime
        self._seconds = seconds
        self._next_at = float("-inf")

    def is_due(self) -> bool:
        """Return whether the interval is over; if so, start the next one."""
        now = self._runtime.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + self._seconds
        return True


_deadline: ContextVar[tuple[Runtime, float] | None] = ContextVar("_deadline", default=None)


@contextmanager
def deadline(runtime: Runtime, seconds: float) -> Iterator[None]:
    """Make everything inside the block end within some seconds, or by an earlier outer deadline.

    ::

        with deadline(runtime, 5.0):
            store.get(...)  # raises TransientStorageError after 5 s of silence

    The deadline applies to the calling thread. A thread that is started inside the block has none.
    Code that waits asks :func:`remaining`; code that only computes is not interrupted.
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
    """Return the seconds until the deadline, at most 0 once it has passed; None without one."""
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
    """Wait, with the lock held, until ``is_met()`` returns a true value.

    Args:
        runtime: Its monotonic clock is used.
        condition: Held by the caller; notified when ``is_met`` may have changed.
        is_met: Called once at the start and after each notification.
        seconds: Longest wait, in seconds; None to use ``until``.
        until: A time of the monotonic clock. Without ``seconds`` and ``until``, wait forever.

    Returns:
        Whether ``is_met()`` became true in time.
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
    """A context manager that closes itself and does not hide the error that ended the block."""

    @abstractmethod
    def close(self) -> None:
        """Write everything that is pending, and end. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        try:
            self.close()
        except OpenDataBufferError as error:
            if exc is None:
                raise
            # The caller's own error matters more, and it is often the cause of this one.
            name = type(self).__name__
            log.warning("closing the %s after an error failed, too: %s", name, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        import asyncio  # only programs that use asyncio should pay for this import

        await asyncio.to_thread(self.__exit__, *raised)


def in_parallel(
    runtime: Runtime,
    call: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = 32,  # a quarter of the connections that a store keeps by default
) -> list[Result]:
    """Call a function for each item in threads that share the caller's deadline.

    Args:
        runtime: Starts the threads.
        call: Called once per item.
        items: A single item is handled in the calling thread.
        most: Largest number of threads.

    Returns:
        The results, in the order of the items.

    Raises:
        BaseException: The error of the first item whose call failed, after all calls have ended.
    """
    wanted = tuple(items)
    if len(wanted) <= 1:
        return [call(item) for item in wanted]  # a thread would only add cost
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
                break  # a fast store has answered every call already
        context = copy_context()  # two threads cannot enter the same context
        try:
            runtime.spawn(lambda context=context: context.run(work), "opendata-buffer-together")  # type: ignore[misc]
        except RuntimeError:
            # The system cannot start a thread. Raising here would abandon the running calls.
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
    """A retry policy: exponential backoff with full jitter, within a deadline.

    Call it with a function and its arguments. It is thread-safe. After attempt ``n`` it sleeps for
    a random time in [0, min(max_ms, base_ms * 2**(n-1))). Without full jitter, writers that lost a
    CAS race at the same time would meet again in the next one (failure F14).

    No attempt begins later than ``deadline_ms`` after the first one. The last sleep is cut short,
    so that one attempt is made close to the deadline. A sleep that would reach the caller's
    :func:`~.runtime.deadline` ends the retries.

    Attributes:
        runtime: Clock, sleep, and jitter.
        base_ms: First step of the backoff, in milliseconds.
        max_ms: Largest step of the backoff, in milliseconds.
        deadline_ms: Time for all attempts together, in milliseconds.
        retry_on: Errors that are retried. All others are raised at once, and so is the last of
            these.
        pause: Returns the seconds to sleep after an error; None, or a result of None, means
            backoff.
        before_pause: Called before each sleep.
        max_attempts: Largest number of attempts; None for no limit.
    """

    runtime: Runtime
    _: KW_ONLY
    base_ms: int
    max_ms: int
    deadline_ms: int
    retry_on: tuple[type[Exception], ...]
    pause: Callable[[BaseException], float | None] | None = None
    before_pause: Callable[[], None] | None = None
    max_attempts: int | None = None

    def __call__(
        self,
        call: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Call the function until it returns, raises an error that is not retried, or time is up.

        Args:
            call: The function.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The function's result.

        Raises:
            Exception: The function's error, of the last attempt.
        """
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
                # No time is left before the caller's deadline. The last error says more than a
                # timeout would.
                around = remaining()
                if left <= 0 or (around is not None and pause >= around):
                    raise
            if self.before_pause is not None:
                self.before_pause()
            self.runtime.sleep(pause)

    def _pause_after(self, failures: int, error: BaseException) -> float:
        if self.pause is not None and (pause := self.pause(error)) is not None:
            return pause
        # Cap the exponent: 2.0**1024 would overflow after a few hours of retries.
        step_ms = min(self.max_ms, self.base_ms * 2.0 ** min(failures - 1, 64))
        return self.runtime.random() * step_ms / 1000


def _clear_locals(error: BaseException) -> None:
    """Release the local variables of the frames that an error passed through; its traceback stays.

    Handles keep errors, and each error would keep a copy of a manifest of up to 64 MiB (failure
    F35).
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:  # a chain may be a circle
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
