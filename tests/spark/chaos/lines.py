"""Text files that a driver writes into a buffer while a consumer empties it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tests.spark.chaos.processes import Stream
from tests.spark.queues import Written, drain, filtered

LINES = 40
AHEAD = 3
"""The number of files that may wait for their own micro-batch."""


class Lines:
    """A thread that feeds a stream of kind ``lines`` and empties its buffer, until closed."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._files = 0
        self._taken: list[Written] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            while self._files <= self._stream.planned() + AHEAD:
                self._feed()
            if self._files % 2:  # otherwise the queue grows for a while
                self._taken += drain(self._stream.out)

    def _feed(self) -> None:
        text = "".join(f"{self._files}.{line}\n" for line in range(LINES))
        # Write it completely, with its own time, before Spark can see it.
        path = Path(self._stream.store, f".{self._files:05}.txt")
        path.write_text(text)
        os.utime(path, (1_700_000_000 + self._files,) * 2)
        path.rename(path.with_name(path.name.removeprefix(".")))
        self._files += 1

    def close(self) -> None:
        """Stop feeding and consuming."""
        self._over.set()
        self._thread.join()

    def check(self) -> None:
        """Check that all rows arrived once, in the consumed and the queued batches together."""
        self._taken += drain(self._stream.out)
        wanted = {
            f"{number}.{line}".encode() for number in range(self._files) for line in range(LINES)
        }
        read = filtered(self._taken)
        assert set(read) == wanted
        assert len(read) == len(wanted)
