"""The progress of a run: counted in one place, shown live, kept for the report."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

WINDOW_S = 5.0
"""Seconds over which rows per second are averaged."""

LEGEND = (
    "backlog: rows in the buffer that are not in Parquet yet; lag: for how long the oldest of "
    "them has been in the buffer"
)


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


class Mark(NamedTuple):
    """An event of the run.

    Attributes:
        seconds: When it happened, since the run began.
        name: Two or three words for the charts.
        text: The meaning, to continue after "at 3 s,".
    """

    seconds: float
    name: str
    text: str


class MicroBatch(NamedTuple):
    """Spark's measurements of one micro-batch.

    Attributes:
        start: The number of the query's start in this run.
        id: The number of the micro-batch.
        plan_ms: How long the source took to find new records; None for a micro-batch that a stopped
            query had planned.
        total_ms: The duration of the whole micro-batch.
    """

    start: int
    id: int
    plan_ms: int | None
    total_ms: int


def micro_batches(start: int, progress: Sequence[Any]) -> list[MicroBatch]:
    """Return the micro-batches in a query's progress; skip polls that found nothing."""
    return [
        MicroBatch(start, each.batchId, took.get("latestOffset"), took["triggerExecution"])
        for each in progress
        if "addBatch" in (took := each.durationMs)
    ]


@dataclass
class Counters:
    """Durable rows in the buffer by producer, and rows in Parquet by micro-batch."""

    total: int
    durable: dict[str, int]
    batches: dict[int, int]
    """Rows of each micro-batch. One that is repeated after a stop counts once, as in Parquet."""
    samples: list[Sample] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    heard: set[str] = field(default_factory=set)
    """Producers that have reported durable rows in this run."""
    has_batch: bool = False
    """Whether a micro-batch has reached Parquet since the last start of the query."""
    durable_ms: list[int] = field(default_factory=list)
    """Milliseconds from produce to durable, of each call in this run."""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    """Spark's measurements of the micro-batches of this run."""
    _started: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    @property
    def written(self) -> int:
        """Rows in Parquet."""
        return sum(self.batches.values())

    def on_durable(self, airport: str, rows: int, took_ms: Sequence[int] = ()) -> None:
        """Note a producer's report: ``rows`` are durable now, after ``took_ms`` per call."""
        with self._lock:
            self.durable[airport] = rows
            self.durable_ms += took_ms
            self.heard.add(airport)

    def on_batch(self, batch_id: int, rows: int) -> None:
        """Note that a micro-batch with ``rows`` rows is in Parquet."""
        with self._lock:
            self.batches[batch_id] = rows
            self.has_batch = True

    def sample(self) -> Sample:
        """Record the current values of the counters."""
        now = self.seconds
        with self._lock:
            durable, written = sum(self.durable.values()), self.written
        # The oldest waiting row became durable when `durable` first exceeded `written`.
        since = bisect_right(self.samples, written, key=lambda each: each.durable)
        waits = durable > written
        began = self.samples[since].seconds if since < len(self.samples) else now
        self.samples.append(Sample(now, durable, written, now - began if waits else 0.0))
        return self.samples[-1]

    def mark(self, name: str, text: str) -> Mark:
        """Note what happened now."""
        self.marks.append(Mark(self.seconds, name, text))
        return self.marks[-1]

    def rate(self) -> float:
        """Return recent rows per second into Parquet."""
        last = self.samples[-1]
        first = next(each for each in self.samples if each.seconds >= last.seconds - WINDOW_S)
        return (last.written - first.written) / max(last.seconds - first.seconds, 0.001)


class _OutOf(ProgressColumn):
    def render(self, task: Task) -> Text:
        width = len(f"{task.total:,.0f}")
        return Text(f"{task.completed:>{width},.0f} of {task.total:,.0f}", "progress.download")


class Screen:
    """The live view; plain lines if standard output is not a terminal."""

    def __init__(self, counters: Counters, console: Console) -> None:
        self._counters = counters
        self._console = console
        self._progress = Progress(TextColumn("{task.description:<18}"), BarColumn(40), _OutOf())
        self._tasks = {
            name: self._progress.add_task(name, total=counters.total)
            for name in ("durable in buffer", "in Parquet")
        }
        self._live = Live(console=console, refresh_per_second=5, transient=False)
        self._next_line = 0.0

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        else:
            print(LEGEND, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def mark(self, name: str, text: str) -> None:
        """Note an event that happens now, and print it."""
        made = self._counters.mark(name, text)
        line = f"[bold]{made.seconds:5.1f} s[/]  {name}: {text}"
        self._console.print(line, highlight=False, soft_wrap=True)

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
            self._live.update(Group(self._progress, Text(line), Text(LEGEND, "dim")))
        elif now.seconds >= self._next_line:
            self._next_line = now.seconds + 2
            print(f"{now.durable:>8,} durable  {now.written:>8,} in Parquet  {line}", flush=True)
