"""The three producer processes, as the demo controls them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from notebooks.demo.places import Places
from notebooks.demo.progress import Counters

STOP_S = 20.0
"""Seconds that producers may take to make their last chunk durable."""


class Failed(Exception):
    """A part of the demo ended with an error; the text says where to look."""


class Producers:
    """The running producers, one for each airport."""

    def __init__(
        self, places: Places, first: dict[str, int], seconds: float, lock: int, counters: Counters
    ) -> None:
        self._places = places
        self._counters = counters
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._listeners: list[threading.Thread] = []
        for airport, chunk in first.items():
            arguments = [places.store, airport, str(chunk), str(seconds)]
            with places.log(f"producer-{airport}").open("w") as log:
                self._running[airport] = subprocess.Popen(
                    [sys.executable, "-m", "notebooks.demo.replay", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    pass_fds=[lock],
                    process_group=0,  # Ctrl-C is for the demo, which stops them.
                )
            listener = threading.Thread(target=self._listen, args=(airport,))
            listener.start()
            self._listeners.append(listener)

    def _listen(self, airport: str) -> None:
        for line in self._running[airport].stdout or ():
            rows, *took_ms = map(int, line.split())
            self._counters.on_durable(airport, rows, took_ms)

    def go(self) -> None:
        """Let the producers replay the rest after their first chunk."""
        for process in self._running.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # It may have ended already.
                process.stdin.write("go\n")
                process.stdin.flush()

    def check(self) -> None:
        """Raise Failed if a producer ended with an error."""
        for airport, process in self._running.items():
            if process.poll():
                log = self._places.log(f"producer-{airport}")
                raise Failed(f"producer {airport} failed:\n{log.read_text()[-2000:]}")

    def have_begun(self) -> bool:
        """Return whether each producer has its first chunk in the buffer, or nothing to produce."""
        return all(
            airport in self._counters.heard or process.poll() == 0
            for airport, process in self._running.items()
        )

    def have_ended(self) -> bool:
        """Return whether the producers have ended and all of their reports were read."""
        ended = all(process.poll() == 0 for process in self._running.values())
        return ended and not any(each.is_alive() for each in self._listeners)

    def stop(self) -> None:
        """Let the producers finish their current chunks, and end."""
        for process in self._running.values():
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        deadline = time.monotonic() + STOP_S
        for process in self._running.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for listener in self._listeners:
            listener.join()


@contextmanager
def producers(
    places: Places, first: dict[str, int], seconds: float, lock: int, counters: Counters
) -> Iterator[Producers]:
    """Run one producer for each airport, starting at its first chunk.

    Args:
        places: The buffer and the logs.
        first: The first chunk of each airport.
        seconds: Time to replay the whole year in.
        lock: File descriptor of the demo's lock, which they hold until they have ended.
        counters: Receive the progress of the producers.
    """
    running = Producers(places, first, seconds, lock, counters)
    try:
        yield running
    finally:
        running.stop()
