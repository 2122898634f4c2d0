"""Run the steps of a command in two lanes, which keep two cores busy.

Tests often wait for sockets, processes, leases, and for JVMs to start. While a step waits in one
lane, a step of the other lane computes. Both lanes take the next step from one list. The steps of
the first lane print directly. The output of a step in the second lane is printed after it ended,
between two steps of the first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from tools.project import ROOT
from tools.project.console import say

PATIENCE_S = 30.0
"""Seconds that a step has to end after Ctrl-C, before it is killed."""


@dataclass(frozen=True)
class Step:
    """A process to run, whose exit code says whether it succeeded.

    Attributes:
        name: Its name in the summary.
        command: The command and its arguments.
        variables: Its environment variables.
    """

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)


@dataclass(frozen=True)
class Ended:
    """A step that has run."""

    name: str
    seconds: float
    code: int


class Lanes:
    """Runs steps, and remembers which failed."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.ended: list[Ended] = []
        self._waiting = deque(steps)
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._printed: list[bytes] = []  # outputs of the second lane
        self._is_starting = False  # a process, in the first lane
        self._late: int | None = None  # a signal that came meanwhile

    def run(self) -> list[Ended]:
        """Run all steps. A failure does not stop the later ones.

        A signal that ends this process also ends the running steps.

        Returns:
            The steps in the order in which they ended.
        """
        first = self._next()
        second = threading.Thread(target=self._second_lane, args=(first,))
        before = {
            number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            second.start()
            while (step := self._next()) is not None:
                self._run(step, None)
                self._print()
            second.join()
            self._print()
        except BaseException:
            self._stop()
            second.join()
            self._print()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.ended

    def _next(self) -> Step | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _second_lane(self, step: Step | None) -> None:
        while step is not None:
            with tempfile.TemporaryFile() as output:
                self._run(step, output)
                output.seek(0)
                text = output.read()
            with self._lock:
                self._printed.append(text)
            step = self._next()

    def _run(self, step: Step, output: IO[bytes] | None) -> None:
        began = time.monotonic()
        code = self._call(step, output)
        seconds = time.monotonic() - began
        with self._lock:
            self.ended.append(Ended(step.name, seconds, code))
        message = f"{step.name} {'took' if code == 0 else 'failed after'} {seconds:.0f} s"
        if output is None:
            say(message)
        else:
            output.write(f"run: {message}\n".encode())

    def _call(self, step: Step, output: IO[bytes] | None) -> int:
        """Run the process of a step, and return its exit code: 127 if it cannot be started."""
        if output is None:
            self._is_starting = True
        try:
            with self._lock:
                process = subprocess.Popen(
                    step.command, cwd=ROOT, env=dict(step.variables), stdout=output, stderr=output
                )
                self._running.append(process)
        except OSError as error:
            say(str(error))
            return 127
        finally:
            if output is None:
                self._is_starting = False
                if self._late is not None:
                    self._end(self._late, None)
        code = process.wait()
        with self._lock:
            self._running.remove(process)
        return code

    def _print(self) -> None:
        with self._lock:
            printed, self._printed = self._printed, []
        for text in printed:
            sys.stdout.flush()
            sys.stdout.buffer.write(text)
            sys.stdout.flush()

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the first lane: end this process, but not while it starts another.

        Otherwise nothing would know the new process, and it would go on.
        """
        if self._is_starting:
            self._late = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    def _stop(self) -> None:
        """End the running steps. A terminal has sent them the same signal as this process."""
        with self._lock:
            self._waiting.clear()
            running = list(self._running)
        for process in running:
            process.terminate()
        end = time.monotonic() + PATIENCE_S
        for process in running:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def summary(ended: Sequence[Ended], seconds: float) -> str:
    """Return one line with the seconds of each step, and of all together."""
    times = ", ".join(f"{step.name} {step.seconds:.0f} s" for step in ended)
    return f"seconds: {times}; together {seconds:.0f} s"
