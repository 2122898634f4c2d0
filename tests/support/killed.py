"""Worker programs that are killed and restarted, and the numbers that they print."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from opendata_buffer.stores.local import RESERVED

KILLS = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16"))
FOREVER = 10**9
PATIENCE_S = 600.0
"""Seconds after which a test fails because an event never happened."""


class Worker:
    """A program that is killed and restarted."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._module = module
        self.printed: list[int] = []
        self.start(*arguments)

    def start(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module, *map(str, arguments)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,))
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as out:
            for line in out:
                if line.endswith("\n"):  # kill -9 may cut the last line short
                    self.printed.append(int(line))

    def ended(self) -> bool:
        return self.process.poll() is not None

    def await_printed(self, count: int) -> None:
        """Wait until this process has printed ``count`` more numbers or has ended."""
        enough, until = len(self.printed) + count, time.monotonic() + PATIENCE_S
        while len(self.printed) < enough and not self.ended():
            assert time.monotonic() < until, f"{len(self.printed)} of {enough} numbers arrived"
            time.sleep(0.002)

    def kill(self, *arguments: object) -> None:
        """Kill it with SIGKILL, and start it again."""
        self.close()
        self.start(*arguments)

    def wait(self) -> None:
        """Wait until it has done its work."""
        assert self.process.wait(PATIENCE_S) == 0
        self._reader.join()

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self._reader.join()


class Writer(Worker):
    """Writes numbered transactions; those that were not seen durable are written again.

    Args:
        app: Name of the application in the transactions.
        stores: URLs of the stores that it writes to.
        module: Module of the program: ``worker_produce``, or another one with the same arguments.
        grace_ms: Grace period of the collectors.
        pause_s: Seconds to wait after each transaction.
        backlog: Queued batches in a store from which on it waits longer.
    """

    def __init__(
        self,
        app: str,
        *stores: str,
        module: str = "tests.support.worker_produce",
        grace_ms: int = 10_000,
        pause_s: float = 0,
        backlog: int = FOREVER,
    ) -> None:
        self._app, self._stores = app, stores
        self._rest = grace_ms, pause_s
        self._backlog = backlog
        self.kills = 0
        super().__init__(module, *self._arguments(0, FOREVER))

    def _arguments(self, first: int, end: int) -> list[object]:
        # The last process finishes even if no one reads any more.
        backlog = self._backlog if end == FOREVER else FOREVER
        return [self._app, first, end, *self._rest, backlog, *self._stores]

    def _next(self) -> int:
        return self.printed[-1] + 1 if self.printed else 0

    def kill_again(self) -> None:
        """Kill it with SIGKILL while it writes, and start it again."""
        assert not self.ended(), "the writer ended before it was killed"
        self.close()
        self.kills += 1
        self.start(*self._arguments(self._next(), FOREVER))

    def kill_last(self, more: int) -> int:
        """Kill it a last time, and let it end after ``more`` transactions, including open ones.

        Returns:
            The number of all its transactions.
        """
        self.close()
        end = self._next() + more
        self.start(*self._arguments(self._next(), end))
        return end


@contextmanager
def nobody_writes(store: str) -> Iterator[None]:
    """Hold the locks of a local store, so that no process can hold one.

    A process that is stopped while it holds a lock keeps it and blocks all others. A server has no
    locks.
    """
    with ExitStack() as held:
        for path in Path(store).rglob(f"{RESERVED}/*"):
            if path.is_file():
                fcntl.flock(held.enter_context(path.open("rb")), fcntl.LOCK_EX)
        yield


@contextmanager
def seeded(name: str) -> Iterator[random.Random]:
    """Yield a random generator. A failure shows its seed, to repeat the same choices."""
    seed = int(os.environ.get(name, random.randrange(10**6)))
    try:
        yield random.Random(seed)
    except BaseException as error:
        error.add_note(f"To repeat the same choices: {name}={seed}")
        print(f"{name}={seed}")
        raise
