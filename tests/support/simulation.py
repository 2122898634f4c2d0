"""A deterministic simulation: real code in real threads, on virtual time.

Exactly one simulated thread runs at any moment; the others wait for the baton. At every point
where a thread could lose the processor (a lock, a wait, a sleep, a store call), the seeded random
number generator chooses the thread that continues. If no thread can run, virtual time jumps to the
next timer. A run therefore spends no real time waiting, and the same seed gives the same history,
races included::

    simulation = Simulation(seed=7)
    runtime = simulation.process("producer", clock_skew_ms=-900_000)

    def main() -> None:
        producer = Producer(config, store=store, runtime=runtime)
        ...
        simulation.kill(runtime)                   # kill -9
        simulation.pause(other, seconds=3600)      # a frozen virtual machine

    simulation.run(main)
"""

from __future__ import annotations

import gc
import math
import os
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from opendata_buffer.runtime import SystemRuntime, ulid_of


@contextmanager
def no_collections() -> Iterator[None]:
    """Switch off Python's search for cycles of garbage.

    Python searches whenever a thread creates an object, and runs finalizers at once. A finalizer
    that takes a lock, as the one of unfinished results does, would hand the baton over at any line.
    Two threads of a simulation would then run at the same time, and finally none. In tests that
    interrupt a call at a chosen step, the step could lie in such a finalizer and test nothing.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on the current processor.

    Only one thread of a simulation runs at a time. On several processors, each of its many thousand
    switches would first wake an idle processor, which takes as long as the step itself.

    Do nothing on systems that cannot do this or do not allow it.
    """
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_here()})
    except (AttributeError, OSError):  # not on Linux
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _here() -> int:
    """Return the processor that runs this thread."""
    with open("/proc/thread-self/stat") as stat:
        # Field 39. The second field, a name in brackets, may contain blanks.
        return int(stat.read().rpartition(")")[2].split()[36])


# With rounding errors, the time left until a deadline can be so short that adding it does not move
# the clock, and a loop that waits for the deadline never ends.
TICK_S = 2**-20
"""All simulated times are whole ticks, so their sums and differences are exact."""


def up_to_tick(seconds: float) -> float:
    """Return the time, rounded up to a tick."""
    return math.ceil(seconds / TICK_S) * TICK_S


def later(now: float, seconds: float) -> float:
    """Return ``now + seconds``, but at least one tick after ``now`` if ``seconds`` is not 0.

    Adding less than a tick may not change ``now`` at all. A thread that waits for such a moment
    would wait for ever, although a real clock would go on.
    """
    return max(now + seconds, now + TICK_S) if seconds > 0 else now


PREEMPTION = 0.1
"""Chance that a thread loses the processor at a free lock, where it would not have to wait."""


def baton() -> threading.Lock:
    """Return an acquired lock that is released to let its thread run. No thread owns it."""
    baton = threading.Lock()
    baton.acquire()
    return baton


class SimTask:
    """A simulated thread; a :class:`~opendata_buffer.runtime.Task`."""

    def __init__(self, simulation: Simulation, process: SimRuntime, name: str) -> None:
        self._simulation = simulation
        self.process = process
        self.name = name
        self.baton = baton()
        self.done = False
        self.doomed = False
        self._wake_at: float | None = None
        self.waits_for = ""
        self._joiners: list[SimTask] = []

    @property
    def wake_at(self) -> float | None:
        """When it may continue; None while it waits for another thread to set this."""
        return self._wake_at

    @wake_at.setter
    def wake_at(self, at: float | None) -> None:
        self._wake_at = at
        # Most threads of a large simulation wait for others, so the scheduler only looks at the
        # rest.
        if at is None:
            self._simulation.timed.pop(self, None)
        elif not self.done:
            self._simulation.timed[self] = at

    def join(self, timeout: float | None = None) -> None:
        simulation = self._simulation
        deadline = None if timeout is None else simulation.now + timeout
        while not self.done:
            if deadline is not None and simulation.now >= deadline:
                return
            self._joiners.append(simulation.current)
            try:
                simulation.block(deadline, f"the end of {self.name}")
            finally:
                # A joiner that gave up now waits for something else. The end of this task must not
                # interrupt that wait.
                self._joiners.remove(simulation.current)

    def is_alive(self) -> bool:
        return not self.done

    def end(self) -> None:
        """Mark it as ended, and wake the threads that join it."""
        self.done = True
        self.wake_at = None
        for joiner in self._joiners:
            joiner.wake_at = self._simulation.now


class SimCondition:
    """A reentrant condition on virtual time."""

    def __init__(self, simulation: Simulation) -> None:
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
        """Release the lock until notified. Return False if the timeout came first."""
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
            if not task.doomed:
                self._acquire(depth)
        return notified

    def notify(self, n: int = 1) -> None:
        self._owned_by_current()
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for task in woken:
            self._notified.add(task)
            task.wake_at = self._simulation.now

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def held(self) -> bool:
        """Return whether the running thread holds the lock."""
        return self._owner is self._simulation.current

    def _owned_by_current(self) -> SimTask:
        task = self._simulation.current
        if self._owner is not task:
            # threading.Condition raises the same error: such code is also broken outside a
            # simulation.
            raise RuntimeError(f"{task.name} uses a condition without holding its lock")
        return task

    def _acquire(self, depth: int) -> None:
        task = self._simulation.current
        while self._owner is not None and self._owner is not task:
            self._queued.append(task)
            held = f"a lock held by {self._owner.name}"
            try:
                self._simulation.block(None, held)
            finally:
                # A killed thread no longer waits, and must not be woken for the lock.
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
    """One simulated process with its threads and its wall clock: a :class:`~.runtime.Runtime`.

    Attributes:
        name: Shown in the history.
        clock_skew_ms: Error of its wall clock. It may change while the process runs, as with
            ``date -s``.
        alive: False once the process was killed.
    """

    def __init__(self, simulation: Simulation, name: str, clock_skew_ms: int) -> None:
        self._simulation = simulation
        self.name = name
        self.clock_skew_ms = clock_skew_ms
        self.alive = True
        self.resume_at = 0.0
        self.suspended_s = 0.0
        self._spawned = 0

    def now_ms(self) -> int:
        """Return the virtual wall clock, including its error."""
        return self._simulation.now_ms() + self.clock_skew_ms

    def monotonic(self) -> float:
        """Return virtual seconds, which pass while a process is paused but not while suspended."""
        return self._simulation.now - self.suspended_s

    def cpu_time(self) -> float:
        """Return 0, because computing takes no virtual time."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        self._simulation.block(later(self._simulation.now, seconds), "a sleep to end")

    def condition(self) -> SimCondition:
        return SimCondition(self._simulation)

    def spawn(self, target: Callable[[], None], name: str) -> SimTask:
        self._spawned += 1
        return self._simulation.start(self, target, f"{self.name}/{name}.{self._spawned}")

    def random(self) -> float:
        return self._simulation.random.random()

    def ulid(self) -> str:
        """Return a ULID made from the virtual wall clock and the simulation's seed."""
        entropy = self._simulation.random.randbytes(10)
        return ulid_of(self.now_ms(), entropy)


START_MS = 1_767_225_600_000
"""Wall clock at virtual time 0: 2026-01-01T00:00:00Z."""


class SimulationFailed(AssertionError):
    """The run broke a rule, made no progress, or a simulated thread died of an error."""


class _Killed(BaseException):
    """Unwinds the threads of a killed process. No ``except Exception`` can stop it."""


class Simulation:
    """The scheduler, the clock, the random numbers, and the history.

    Args:
        seed: The seed of all random choices.
        max_steps: Scheduling decisions after which a run counts as endless.
        shown: How many of the newest events the history keeps; None keeps all.

    Attributes:
        seed: The argument.
        random: The only source of randomness.
        now: Virtual seconds since the start.
        steps: Scheduling decisions made.
        current: The simulated thread that runs.
        timed: When each thread that waits for a time may continue, in an order that is the same in
            every run.
    """

    def __init__(self, seed: int, *, max_steps: int = 1_000_000, shown: int | None = 400) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.current: SimTask
        self.timed: dict[SimTask, float] = {}
        self._max_steps = max_steps
        self._tasks: list[SimTask] = []
        self._main_baton = baton()
        self._main: SimTask | None = None
        self._failure: BaseException | None = None
        self._ended = False
        self._history: deque[str] = deque(maxlen=shown)
        self._digest = 0
        self._system = SystemRuntime()

    def process(self, name: str, *, clock_skew_ms: int = 0) -> SimRuntime:
        return SimRuntime(self, name, clock_skew_ms)

    def now_ms(self) -> int:
        """Return the true wall clock, in milliseconds since the epoch."""
        return START_MS + int(self.now * 1000)

    def run(self, main: Callable[[], None]) -> None:
        """Run ``main`` and all threads that it starts until it returns, then kill the rest.

        Raises:
            SimulationFailed: :meth:`fail` was called, ``main`` or another thread died of an
                error, all threads wait for ever, or ``max_steps`` were made.
        """
        if self._main is not None:
            raise RuntimeError("a simulation runs only once; create another one with the same seed")
        with on_one_processor(), no_collections():
            self._main = self.start(self.process("main"), main, "main")
            self.current = self._main
            self._main.baton.release()
            self._main_baton.acquire()
            self._reap()
        if self._failure is not None:
            raise SimulationFailed(
                f"seed {self.seed}, after {self.now:.3f} virtual seconds: {self._failure}"
            ) from self._failure

    def kill(self, process: SimRuntime) -> None:
        """End a process as kill -9 does: it sends nothing to the store any more."""
        process.alive = False
        process.resume_at = 0.0
        self.log(f"kill {process.name}")
        for task in self._tasks:
            if task.process is process:
                task.doomed = True
                task.wake_at = self.now
        if self.current.doomed:
            self.checkpoint()

    def pause(self, process: SimRuntime, seconds: float, *, suspend: bool = False) -> None:
        """Freeze a process: none of its threads runs, but clocks go on.

        Args:
            process: The process.
            seconds: How long, from now on.
            suspend: Stop its monotonic clock too, as Linux does when the machine sleeps.
        """
        before = max(process.resume_at, self.now)
        process.resume_at = max(process.resume_at, up_to_tick(self.now + seconds))
        if suspend:
            process.suspended_s += process.resume_at - before
        self.log(f"{'suspend' if suspend else 'pause'} {process.name} for {seconds:.1f} s")
        if self.current.process is process:
            self.checkpoint()

    def fail(self, reason: str | BaseException) -> None:
        """Fail the run, even if the calling code would handle an error."""
        if self._failure is None:
            self._failure = reason if isinstance(reason, BaseException) else AssertionError(reason)
            self.log(f"FAILED {reason}")
        self._ended = True
        self.current.doomed = True
        raise _Killed

    def log(self, event: str) -> None:
        line = f"{self.now:10.3f} {event}"
        self._history.append(line)
        self._digest = zlib.crc32(line.encode(), self._digest)

    @property
    def history(self) -> list[str]:
        return list(self._history)

    @property
    def digest(self) -> str:
        """A checksum of the whole history: two equal runs have the same one."""
        return f"{self._digest:08x}-{self.steps}"

    def checkpoint(self) -> None:
        """Let another thread run, and let a kill or a pause take effect."""
        self.block(self.now, "its turn")

    def start(self, process: SimRuntime, target: Callable[[], None], name: str) -> SimTask:
        if self._main is not None and self.current.doomed:
            raise _Killed
        task = SimTask(self, process, name)
        task.wake_at = self.now
        self._tasks.append(task)

        def body() -> None:
            task.baton.acquire()
            try:
                if not task.doomed:
                    target()
            except _Killed:
                pass
            except BaseException as error:
                if not task.doomed and self._failure is None:
                    self._failure = error
                    self.log(f"FAILED {task.name} died: {error!r}")
                    self._ended = True
            task.end()
            self._tasks.remove(task)
            if task is self._main:
                self._ended = True
            self._hand_over(None)

        self._system.spawn(body, name)
        return task

    def block(self, wake_at: float | None, waits_for: str) -> None:
        """Let others run until ``wake_at``, or until one of them changes ``wake_at``."""
        task = self.current
        if task.doomed:
            raise _Killed
        task.wake_at = None if wake_at is None else up_to_tick(wake_at)
        task.waits_for = waits_for
        self._hand_over(task)
        if task.doomed:
            raise _Killed

    def wake(self, task: SimTask, at: float) -> None:
        """Let a task that waits in :meth:`block` continue at ``at`` at the latest."""
        at = up_to_tick(at)
        if task.wake_at is None or task.wake_at > at:
            task.wake_at = at

    def _hand_over(self, task: SimTask | None) -> None:
        """Let the next task run, and wait for this task's next turn unless it has ended."""
        chosen = None if self._ended else self._choose()
        if chosen is None:
            self._main_baton.release()
        elif chosen is not task:
            self.current = chosen
            chosen.baton.release()
        if task is not None and chosen is not task:
            task.baton.acquire()

    def _choose(self) -> SimTask | None:
        self.steps += 1
        if self.steps > self._max_steps:
            self._stuck(f"no end after {self._max_steps} steps")
            return None
        now, earliest = self.now, math.inf
        ready, sleepers = [], []
        for task, at in self.timed.items():
            if task.process.resume_at > at:
                at = task.process.resume_at
            if at <= now:
                ready.append(task)
            elif at < earliest:
                earliest = at
                sleepers = [task]
            elif at == earliest:
                sleepers.append(task)
        if not ready:
            if not sleepers:
                self._stuck("all threads wait for ever")
                return None
            self.now = earliest
            ready = sleepers
        chosen = ready[0] if len(ready) == 1 else ready[self.random.randrange(len(ready))]
        # It cannot be chosen again before it blocks with a new time.
        chosen.wake_at = None
        return chosen

    def _stuck(self, why: str) -> None:
        waiting = "; ".join(f"{task.name} waits for {task.waits_for}" for task in self._tasks)
        self._failure = AssertionError(f"{why}: {waiting}")
        self.log(f"FAILED {why}")
        self._ended = True

    def _reap(self) -> None:
        """Unwind every remaining thread, so that none outlives the run."""
        while self._tasks:
            task = self._tasks[0]
            task.doomed = True
            self.current = task
            task.baton.release()
            self._main_baton.acquire()


class SeededChoices:
    """The random choices of a scenario, which follow from the seed of its simulation."""

    simulation: Simulation

    def chance(self, probability: float) -> bool:
        return self.simulation.random.random() < probability

    def draw(self, below: int) -> int:
        return self.simulation.random.randrange(below)

    def uniform(self, low: float, high: float) -> float:
        return self.simulation.random.uniform(low, high)
