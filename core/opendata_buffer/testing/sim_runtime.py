"""What code sees of a simulation: a process with its clock, its threads and its locks.

Every class here hands the processor over where a real one could lose it, and tells the scheduler
until when it waits; who goes on is chosen there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from ulid import ULID

from opendata_buffer.testing.ticks import later

__all__ = ["Scheduler", "SimCondition", "SimRuntime", "SimTask", "baton"]

PREEMPTION = 0.1
"""Chance that a thread loses the processor where it would not have to: at a free lock."""


class Scheduler(Protocol):
    """What processes, threads and locks need of a simulation: :class:`.Simulation`."""

    random: random.Random
    """The only source of randomness."""
    now: float
    """Virtual seconds since the start."""
    current: SimTask
    """The thread that runs."""
    timed: dict[SimTask, float]
    """When each of those may go on that may at some time."""

    def now_ms(self) -> int:
        """The true wall clock, milliseconds since the Unix epoch."""
        ...

    def checkpoint(self) -> None:
        """A point where another thread may go on, and where a kill or a pause takes effect."""
        ...

    def block(self, wake_at: float | None, waits_for: str, *, interruptible: bool = True) -> None:
        """Let others run until ``wake_at``, or until somebody sets the running task's."""
        ...

    def start(self, process: SimRuntime, target: Callable[[], None], name: str) -> SimTask:
        """Start a thread."""
        ...


def baton() -> threading.Lock:
    """A lock that is released to whoever may run; nobody holds it in the ordinary sense."""
    baton = threading.Lock()
    baton.acquire()
    return baton


class SimTask:
    """A simulated thread; a :class:`~opendata_buffer.runtime.Task`."""

    def __init__(self, simulation: Scheduler, process: SimRuntime, name: str) -> None:
        self._simulation = simulation
        self.process = process
        self.name = name
        self.baton = baton()
        self.done = False
        self.doomed = False
        self._wake_at: float | None = None
        self.waits_for = ""
        self.interruption: BaseException | None = None
        self.interrupt_after = 0
        self._joiners: list[SimTask] = []

    @property
    def wake_at(self) -> float | None:
        """When it may go on; None while it waits for somebody to set this."""
        return self._wake_at

    @wake_at.setter
    def wake_at(self, at: float | None) -> None:
        self._wake_at = at
        # Most threads of a large simulation wait for others: who chooses looks at the rest only.
        if at is None:
            self._simulation.timed.pop(self, None)
        elif not self.done:
            self._simulation.timed[self] = at

    def join(self, timeout: float | None = None) -> None:
        """Wait until it ended."""
        simulation = self._simulation
        deadline = None if timeout is None else simulation.now + timeout
        while not self.done:
            if deadline is not None and simulation.now >= deadline:
                return
            self._joiners.append(simulation.current)
            try:
                simulation.block(deadline, f"the end of {self.name}")
            finally:
                # A joiner that gave up waits for something else by now, which the end of this task
                # must not cut short.
                self._joiners.remove(simulation.current)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.done

    def end(self) -> None:
        """It ended: wake who waits for it."""
        self.done = True
        self.wake_at = None
        for joiner in self._joiners:
            joiner.wake_at = self._simulation.now


class SimCondition:
    """A reentrant lock with a waiting room, on virtual time."""

    def __init__(self, simulation: Scheduler) -> None:
        self._simulation = simulation
        self._owner: SimTask | None = None
        self._depth = 0
        self._queued: list[SimTask] = []
        self._waiting: list[SimTask] = []
        self._notified: set[SimTask] = set()

    def __enter__(self) -> bool:
        simulation = self._simulation
        if simulation.current.doomed or simulation.random.random() < PREEMPTION:
            simulation.checkpoint()
        self._acquire(1)
        return True

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # No scheduling point: a killed thread unwinds through here.
        if self._owner is self._simulation.current:
            self._depth -= 1
            if self._depth == 0:
                self._release()

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock away until notified; False when the time was up first."""
        task = self._owned_by_current()
        depth, self._depth = self._depth, 0
        self._waiting.append(task)
        self._release()
        deadline = None if timeout is None else later(self._simulation.now, timeout)
        try:
            self._simulation.block(deadline, "a notification")
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
            notified = task in self._notified
            self._notified.discard(task)
            # As threading.Condition: an interrupted wait has its lock back before it raises.
            if not task.doomed:
                self._acquire(depth, interruptible=False)
        return notified

    def notify(self, n: int = 1) -> None:
        """Wake ``n`` that wait."""
        self._owned_by_current()
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for task in woken:
            self._notified.add(task)
            task.wake_at = self._simulation.now

    def notify_all(self) -> None:
        """Wake all that wait."""
        self.notify(len(self._waiting))

    def held(self) -> bool:
        """Whether the running thread holds the lock."""
        return self._owner is self._simulation.current

    def _owned_by_current(self) -> SimTask:
        task = self._simulation.current
        if self._owner is not task:
            # threading.Condition says the same: such code is broken outside the simulation too.
            raise RuntimeError(f"{task.name} uses a condition without holding its lock")
        return task

    def _acquire(self, depth: int, *, interruptible: bool = True) -> None:
        task = self._simulation.current
        while self._owner is not None and self._owner is not task:
            self._queued.append(task)
            held = f"a lock held by {self._owner.name}"
            try:
                self._simulation.block(None, held, interruptible=interruptible)
            finally:
                # An interrupted thread waits for the lock no more and must not be woken for it.
                if task in self._queued:
                    self._queued.remove(task)
        self._owner = task
        self._depth += depth

    def _release(self) -> None:
        self._owner = None
        queued, self._queued = self._queued, []
        for task in queued:
            task.wake_at = self._simulation.now


class SimRuntime:
    """One simulated process: its threads, its wall clock; a :class:`~.runtime.Runtime`.

    Attributes:
        name: Shown in the history.
        clock_skew_ms: How far its wall clock is off; may be changed while it runs, as an
            operator's ``date -s`` would.
        alive: False once killed.
    """

    def __init__(self, simulation: Scheduler, name: str, clock_skew_ms: int) -> None:
        self._simulation = simulation
        self.name = name
        self.clock_skew_ms = clock_skew_ms
        self.alive = True
        self.resume_at = 0.0
        self.suspended_s = 0.0
        self._spawned = 0

    def now_ms(self) -> int:
        """Virtual wall clock, off by the skew."""
        return self._simulation.now_ms() + self.clock_skew_ms

    def monotonic(self) -> float:
        """Virtual seconds; they go on while a process is paused, not while it is suspended."""
        return self._simulation.now - self.suspended_s

    def cpu_time(self) -> float:
        """Nothing: computing takes no time on this clock."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._simulation.block(later(self._simulation.now, seconds), "a sleep to end")

    def condition(self) -> SimCondition:
        """A simulated lock with a waiting room."""
        return SimCondition(self._simulation)

    def spawn(self, target: Callable[[], None], name: str) -> SimTask:
        """A new simulated thread of this process."""
        self._spawned += 1
        return self._simulation.start(self, target, f"{self.name}/{name}.{self._spawned}")

    def random(self) -> float:
        """From the simulation's seed."""
        return self._simulation.random.random()

    def ulid(self) -> str:
        """Of the virtual wall clock and the simulation's seed."""
        entropy = self._simulation.random.randbytes(10)
        return str(ULID.from_bytes(self.now_ms().to_bytes(6, "big") + entropy))
