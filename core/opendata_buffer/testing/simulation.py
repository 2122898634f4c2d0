"""A deterministic world: real code in real threads, on virtual time, one seed, one history.

Exactly one simulated thread runs at any moment; the others wait for the baton. At every point
where a thread could lose the processor (a lock, a wait, a sleep, a store call) the seeded random
number generator chooses who goes on. When nobody can, virtual time jumps to the next timer. So a
run takes no real time to wait, and the same seed gives the same history, races included::

    simulation = Simulation(seed=7)
    runtime = simulation.process("producer", clock_skew_ms=-900_000)

    def main() -> None:
        producer = Producer(config, store=store, runtime=runtime)
        ...
        simulation.kill(runtime)                   # kill -9
        simulation.pause(other, seconds=3600)      # a frozen virtual machine
        simulation.interrupt(task)                 # Ctrl-C, wherever the thread waits

    simulation.run(main)
"""

from __future__ import annotations

import math
import random
import zlib
from collections import deque
from collections.abc import Callable

from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.testing.garbage import no_collections
from opendata_buffer.testing.processor import on_one_processor
from opendata_buffer.testing.sim_runtime import SimRuntime, SimTask, baton
from opendata_buffer.testing.ticks import up_to_tick

__all__ = ["SimRuntime", "SimTask", "Simulation", "SimulationFailed"]

START_MS = 1_767_225_600_000
"""Wall clock at virtual time 0: 2026-01-01T00:00:00Z."""


class SimulationFailed(AssertionError):
    """The run broke a rule, stood still, or a simulated thread died of an error."""


class _Killed(BaseException):
    """Unwinds the threads of a killed process; no ``except Exception`` may stop it."""


class Simulation:
    """The scheduler, the clock, the random numbers and the history.

    Args:
        seed: Of everything that is left to chance.
        max_steps: Scheduling decisions after which a run counts as endless.

    Attributes:
        seed: As given.
        random: The only source of randomness.
        now: Virtual seconds since the start.
        steps: Scheduling decisions made.
        current: The simulated thread that runs.
        timed: When each of those may go on that may at some time, in an order that is the same in
            each run.
    """

    def __init__(self, seed: int, *, max_steps: int = 1_000_000) -> None:
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
        self._history: deque[str] = deque(maxlen=400)
        self._digest = 0
        self._system = SystemRuntime()

    def process(self, name: str, *, clock_skew_ms: int = 0) -> SimRuntime:
        """A new process."""
        return SimRuntime(self, name, clock_skew_ms)

    def now_ms(self) -> int:
        """The true wall clock, milliseconds since the epoch."""
        return START_MS + int(self.now * 1000)

    def run(self, main: Callable[[], None]) -> None:
        """Run ``main`` and all it starts until ``main`` returns; then kill what still runs.

        Raises:
            SimulationFailed: :meth:`fail` was called, ``main`` or another thread died of an
                error, everybody waits for ever, or ``max_steps`` were made.
        """
        if self._main is not None:
            raise RuntimeError("a simulation runs once: make a new one of the same seed")
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
        """End a process as kill -9 does: nothing of it reaches the store any more."""
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
        """Freeze a process: none of its threads runs, clocks go on.

        Args:
            process: Which.
            seconds: From now on.
            suspend: Stop its monotonic clock too, as Linux does when the machine sleeps.
        """
        before = max(process.resume_at, self.now)
        process.resume_at = max(process.resume_at, up_to_tick(self.now + seconds))
        if suspend:
            process.suspended_s += process.resume_at - before
        self.log(f"{'suspend' if suspend else 'pause'} {process.name} for {seconds:.1f} s")
        if self.current.process is process:
            self.checkpoint()

    def interrupt(
        self, task: SimTask, error: BaseException | None = None, *, after: int = 0
    ) -> None:
        """Raise an error inside another thread, as a signal's handler does.

        It comes out of whatever the thread waits for: a sleep, a notification, a lock, the
        store. A thread that has ended is left alone.

        Args:
            task: Which thread.
            error: Default: ``KeyboardInterrupt``.
            after: Let so many waits end as usual first. Default: break off the present one.
        """
        if task.done:
            return
        task.interruption = KeyboardInterrupt() if error is None else error
        task.interrupt_after = after
        self.log(f"interrupt {task.name} after {after} waits")
        if after == 0:
            task.wake_at = self.now

    def fail(self, reason: str | BaseException) -> None:
        """End the run as failed, whatever the calling code would do with an error."""
        if self._failure is None:
            self._failure = reason if isinstance(reason, BaseException) else AssertionError(reason)
            self.log(f"FAILED {reason}")
        self._ended = True
        self.current.doomed = True
        raise _Killed

    def log(self, event: str) -> None:
        """Add a line to the history."""
        line = f"{self.now:10.3f} {event}"
        self._history.append(line)
        self._digest = zlib.crc32(line.encode(), self._digest)

    @property
    def history(self) -> list[str]:
        """The last lines of the history."""
        return list(self._history)

    @property
    def digest(self) -> str:
        """Of the whole history: equal for equal runs."""
        return f"{self._digest:08x}-{self.steps}"

    def checkpoint(self) -> None:
        """A point where another thread may go on, and where a kill or a pause takes effect."""
        self.block(self.now, "its turn")

    # What follows is for processes, threads and locks: the rest of their Scheduler.

    def start(self, process: SimRuntime, target: Callable[[], None], name: str) -> SimTask:
        """Start a simulated thread."""
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

    def block(self, wake_at: float | None, waits_for: str, *, interruptible: bool = True) -> None:
        """Let others run until ``wake_at``, or until somebody sets this task's ``wake_at``."""
        task = self.current
        if task.doomed:
            raise _Killed
        task.wake_at = None if wake_at is None else up_to_tick(wake_at)
        task.waits_for = waits_for
        self._hand_over(task)
        if task.doomed:
            raise _Killed
        if task.interruption is not None and interruptible:
            if task.interrupt_after > 0:
                task.interrupt_after -= 1
                return
            error, task.interruption = task.interruption, None
            raise error

    def wake(self, task: SimTask, at: float) -> None:
        """Let a task that waits in :meth:`block` go on at ``at``, if not earlier."""
        at = up_to_tick(at)
        if task.wake_at is None or task.wake_at > at:
            task.wake_at = at

    def _hand_over(self, task: SimTask | None) -> None:
        """Choose who runs next and wait for the own next turn; a task that ended does not."""
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
                self._stuck("everybody waits for ever")
                return None
            self.now = earliest
            ready = sleepers
        chosen = ready[0] if len(ready) == 1 else ready[self.random.randrange(len(ready))]
        # Not runnable again before it blocks and says until when.
        chosen.wake_at = None
        return chosen

    def _stuck(self, why: str) -> None:
        waiting = "; ".join(f"{task.name} waits for {task.waits_for}" for task in self._tasks)
        self._failure = AssertionError(f"{why}: {waiting}")
        self.log(f"FAILED {why}")
        self._ended = True

    def _reap(self) -> None:
        """Unwind every thread that is left, so that none outlives the run."""
        while self._tasks:
            task = self._tasks[0]
            task.doomed = True
            self.current = task
            task.baton.release()
            self._main_baton.acquire()
