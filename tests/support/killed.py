"""Programs that are killed and started again, and the numbers that they print."""

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
"""Until something that never happens fails a test; far from anything that is expected."""


class Worker:
    """A program over its lives."""

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
                if line.endswith("\n"):  # kill -9 may cut the last one short
                    self.printed.append(int(line))

    def ended(self) -> bool:
        return self.process.poll() is not None

    def await_printed(self, count: int) -> None:
        """Wait until this life has printed so many numbers more, or has ended."""
        enough, until = len(self.printed) + count, time.monotonic() + PATIENCE_S
        while len(self.printed) < enough and not self.ended():
            assert time.monotonic() < until, f"{len(self.printed)} of {enough} numbers came"
            time.sleep(0.002)

    def kill(self, *arguments: object) -> None:
        """kill -9, and start it again."""
        self.close()
        self.start(*arguments)

    def wait(self) -> None:
        """Until it has done its work."""
        assert self.process.wait(PATIENCE_S) == 0
        self._reader.join()

    def close(self) -> None:
        """Leave no process behind."""
        self.process.kill()
        self.process.wait()
        self._reader.join()


class Writer(Worker):
    """Writes numbered transactions; those that were not seen durable are written again.

    Args:
        app: Whose transactions they are.
        stores: What it writes into.
        module: Of the program: ``worker_produce``, or another one with the same arguments.
        grace_ms: Grace period of the collectors beside it.
        pause_s: Rest after each transaction.
        backlog: Batches that wait in a store before it takes a longer rest.
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
        # The last one finishes, also where nobody reads any more.
        backlog = self._backlog if end == FOREVER else FOREVER
        return [self._app, first, end, *self._rest, backlog, *self._stores]

    def _next(self) -> int:
        return self.printed[-1] + 1 if self.printed else 0

    def kill_again(self) -> None:
        """kill -9 of one that writes, and start it again."""
        assert not self.ended(), "the writer ended by itself"
        self.close()
        self.kills += 1
        self.start(*self._arguments(self._next(), FOREVER))

    def kill_last(self, more: int) -> int:
        """Kill it a last time, and let it end after so many transactions, the open ones among them.

        Returns:
            How many there are then.
        """
        self.close()
        end = self._next() + more
        self.start(*self._arguments(self._next(), end))
        return end


@contextmanager
def nobody_writes(store: str) -> Iterator[None]:
    """No process holds a lock of this local store meanwhile: one that is stopped with a lock keeps
    it, and all others out. A server has no locks."""
    with ExitStack() as held:
        for path in Path(store).rglob(f"{RESERVED}/*"):
            if path.is_file():
                fcntl.flock(held.enter_context(path.open("rb")), fcntl.LOCK_EX)
        yield


@contextmanager
def seeded(name: str) -> Iterator[random.Random]:
    """Randomness that a failure can be repeated with, as far as processes repeat themselves."""
    seed = int(os.environ.get(name, random.randrange(10**6)))
    try:
        yield random.Random(seed)
    except BaseException as error:
        error.add_note(f"Again with the same choices: {name}={seed}")
        print(f"{name}={seed}")
        raise
