"""The report: one self-contained HTML file for everyone who did not watch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from notebooks.demo.findings import Carrier, Delay, Proof, weeks
from notebooks.demo.plot import AGAIN, CAUGHT_UP, PALETTE, READY, STOPPED, delays_svg, run_svg
from notebooks.demo.progress import Mark, MicroBatch, Sample

__all__ = ["Interruption", "Run", "Tile", "interruption", "render", "tiles"]

WIDE, NARROW = (9.6, 3.5), (4.6, 3.3)
WIDE_RUN, NARROW_RUN = (9.6, 5.6), (4.6, 5.6)
"""Inches of 72 units: on a small screen text must not shrink with the chart."""


@dataclass(frozen=True)
class Run:
    """One run of the demo.

    Attributes:
        buffer: A short description of the buffer.
        command: The command that repeats the run.
        samples: The counters over time.
        marks: The events of the run.
        rows: The rows of each micro-batch, including those of earlier runs.
        durable_ms: Milliseconds from produce to durable, of each call.
        micro_batches: Spark's measurements of the micro-batches of this run.
    """

    buffer: str
    command: str
    samples: Sequence[Sample]
    marks: Sequence[Mark]
    rows: Mapping[int, int]
    durable_ms: Sequence[int]
    micro_batches: Sequence[MicroBatch]

    @property
    def ready(self) -> float:
        """When the query had its first batch in Parquet, in seconds since the start."""
        return self.time_of(READY) or 0.0

    def time_of(self, name: str) -> float | None:
        """Return when an event happened, in seconds since the start; None if it did not happen."""
        return next((each.seconds for each in self.marks if each.name == name), None)


class Tile(NamedTuple):
    """A figure at the top of the page."""

    name: str
    value: str
    meaning: str


class Interruption(NamedTuple):
    """A stop and restart of the query in the middle of the run.

    Attributes:
        stopped: When it was stopped, in seconds since the start of the run.
        again: When it was started again.
        first: When its next micro-batch was in Parquet.
        caught_up: When all rows that waited at the restart were in Parquet.
        produced: Rows that became durable while it was stopped.
        waiting: Rows that were in the buffer at the restart, but not in Parquet.
        rate: Rows per second of the micro-batches that caught up; 0 if Spark reported none.
    """

    stopped: float
    again: float
    first: float
    caught_up: float
    produced: int
    waiting: int
    rate: float


def interruption(run: Run) -> Interruption | None:
    """Return the effects of the stop in the middle; None if there was no stop."""
    times = [run.time_of(name) for name in (STOPPED, AGAIN, CAUGHT_UP)]
    stopped, again, caught_up = times
    if stopped is None or again is None or caught_up is None:
        return None
    before = [each for each in run.samples if each.seconds <= stopped][-1]
    at = [each for each in run.samples if each.seconds <= again][-1]
    later = (
        each.seconds for each in run.samples if each.seconds > again and each.written > at.written
    )
    first = next(later, caught_up)
    rows = took_ms = 0
    for each in run.micro_batches:
        if each.start == run.micro_batches[-1].start and rows < at.backlog:
            rows += run.rows[each.id]
            took_ms += each.total_ms
    rate = 1000 * rows / took_ms if took_ms else 0.0
    produced = at.durable - before.durable
    return Interruption(stopped, again, first, caught_up, produced, at.backlog, rate)


def tiles(run: Run) -> list[Tile]:
    """Return the run in a few figures."""
    found = []
    if run.durable_ms:
        found.append(
            Tile(
                "durable after",
                f"{median(run.durable_ms):.0f} ms",
                f"from produce() to durable: the median of {len(run.durable_ms):,} calls. "
                "A batch is sealed after at most 100 ms",
            )
        )
    plans = [each.plan_ms for each in run.micro_batches if each.plan_ms is not None]
    if plans:
        found.append(
            Tile(
                "planning",
                f"{median(plans):.0f} ms",
                f"for Spark to learn what is new: the median of {len(plans)} micro-batches",
            )
        )
    stop = interruption(run)
    if stop is not None:
        found += [
            Tile(
                "catching up",
                f"{stop.rate:,.0f} rows/s",
                "after the restart, with the parsing of JSON and two writes of Parquet. The "
                "source alone reads 2.7 million rows/s",
            ),
            Tile(
                "outage",
                f"{stop.again - stop.stopped:.0f} s",
                f"without Spark: {stop.waiting:,} rows waited in the buffer",
            ),
        ]
    last = run.samples[-1]
    return [
        *found,
        Tile("micro-batches", f"{len(run.rows):,}", "each written once, whatever was killed"),
        Tile("time", f"{last.seconds:.0f} s", f"{run.ready:.0f} s of it until Spark was ready"),
    ]


def render(
    run: Run, days: Sequence[Delay], carriers: Sequence[Carrier], proof: Proof, version: str
) -> str:
    """Return the page.

    Args:
        run: The measurements of the run.
        days: The delay of each day.
        carriers: The delay of each airline.
        proof: The comparison of the output with the input.
        version: The version of this library.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        run=run,
        tiles=tiles(run),
        interruption=interruption(run),
        weeks=weeks(days),
        carriers=carriers,
        proof=proof,
        version=version,
        palette=PALETTE,
        delays=[Markup(delays_svg(days, size)) for size in (WIDE, NARROW)],
        course=[Markup(run_svg(run.samples, run.marks, size)) for size in (WIDE_RUN, NARROW_RUN)],
    )
