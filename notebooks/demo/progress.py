"""What happens during a run: counted in one place, shown live, kept for the plot."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

WINDOW_S = 5.0
"""Over which rows per second are averaged."""


class Sample(NamedTuple):
    """The counters at one moment."""

    seconds: float
    durable: int
    written: int
    lag_s: float
    """How long the oldest row that is not in Parquet has been durable."""

    @property
    def backlog(self) -> int:
        """Rows in the buffer that are not in Parquet yet."""
        return max(0, self.durable - self.written)


@dataclass
class Counters:
    """Rows durable in the buffer, by producer, and rows in Parquet."""

    total: int
    durable: dict[str, int]
    written: int
    samples: list[Sample] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_durable(self, airport: str, rows: int) -> None:
        """A producer's word."""
        with self._lock:
            self.durable[airport] = rows

    def on_batch(self, rows: int) -> None:
        """So many more rows are in Parquet."""
        with self._lock:
            self.written += rows

    def sample(self) -> Sample:
        """Take the counters down."""
        now = time.monotonic() - self._started
        with self._lock:
            durable, written = sum(self.durable.values()), self.written
        # The oldest row that waits became durable when durable first exceeded written.
        since = bisect_right(self.samples, written, key=lambda each: each.durable)
        waits = durable > written
        began = self.samples[since].seconds if since < len(self.samples) else now
        self.samples.append(Sample(now, durable, written, now - began if waits else 0.0))
        return self.samples[-1]

    def rate(self) -> float:
        """Rows per second into Parquet, lately."""
        last = self.samples[-1]
        first = next(each for each in self.samples if each.seconds >= last.seconds - WINDOW_S)
        return (last.written - first.written) / max(last.seconds - first.seconds, 0.001)


class Screen:
    """The live view; plain lines when standard output is no terminal."""

    def __init__(self, counters: Counters, console: Console) -> None:
        self._counters = counters
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<18}"), BarColumn(40), MofNCompleteColumn()
        )
        self._tasks = {
            name: self._progress.add_task(name, total=counters.total)
            for name in ("durable in buffer", "in Parquet")
        }
        self._live = Live(console=console, refresh_per_second=5, transient=False)
        self._next_line = 0.0

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, status: str) -> None:
        """Sample the counters and show them."""
        now = self._counters.sample()
        line = (
            f"backlog {now.backlog:>7,} rows   lag {now.lag_s:4.1f} s   "
            f"{self._counters.rate():>7,.0f} rows/s   {status}"
        )
        if self._console.is_terminal:
            for name, rows in zip(self._tasks, (now.durable, now.written), strict=True):
                self._progress.update(self._tasks[name], completed=rows)
            self._live.update(Group(self._progress, Text(line)))
        elif now.seconds >= self._next_line:
            self._next_line = now.seconds + 2
            print(f"{now.durable:>8,} durable  {now.written:>8,} in Parquet  {line}", flush=True)
