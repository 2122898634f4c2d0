"""The report: one HTML file that needs nothing else, for who did not watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from notebooks.demo.findings import Carrier, Delay, Proof, weeks
from notebooks.demo.plot import PALETTE, READY, delays_svg, run_svg
from notebooks.demo.progress import Mark, Sample

__all__ = ["Run", "Tile", "render", "tiles"]

WIDE, NARROW = (9.6, 3.5), (4.6, 3.3)
WIDE_RUN, NARROW_RUN = (9.6, 5.6), (4.6, 5.6)
"""Inches of 72 units: on a small screen text must not shrink with the chart."""


@dataclass(frozen=True)
class Run:
    """One run of the demo.

    Attributes:
        buffer: What the buffer was, in a few words.
        command: What repeats it.
        samples: Its counters through time.
        marks: What happened.
        batches: Micro-batches of the query, those of earlier runs included.
    """

    buffer: str
    command: str
    samples: Sequence[Sample]
    marks: Sequence[Mark]
    batches: int

    @property
    def ready(self) -> float:
        """When the query had its first batch in Parquet, in seconds since the start."""
        return next((each.seconds for each in self.marks if each.name == READY), 0.0)


class Tile(NamedTuple):
    """A figure to be seen first."""

    name: str
    value: str
    meaning: str


def tiles(run: Run) -> list[Tile]:
    """The run in six figures."""
    measured = [each for each in run.samples if each.seconds >= run.ready] or list(run.samples)
    first, last = measured[0], measured[-1]
    rows, seconds = last.written - first.written, last.seconds - first.seconds
    lags = sorted(each.lag_s for each in measured)
    return [
        Tile("time", f"{last.seconds:.0f} s", f"{run.ready:.0f} s of it until Spark was ready"),
        Tile(
            "throughput",
            f"{rows / max(seconds, 0.001):,.0f} rows/s",
            "from the buffer into Parquet, since Spark was ready",
        ),
        Tile(
            "largest backlog",
            f"{max(each.backlog for each in measured):,} rows",
            "in the buffer at once, not in Parquet yet",
        ),
        Tile("usual lag", f"{lags[len(lags) // 2]:.1f} s", "half of the time it was less"),
        Tile("largest lag", f"{lags[-1]:.1f} s", "no row waited longer, once Spark was ready"),
        Tile("micro-batches", f"{run.batches:,}", "each written once, whatever was stopped"),
    ]


def render(
    run: Run, days: Sequence[Delay], carriers: Sequence[Carrier], proof: Proof, version: str
) -> str:
    """The page.

    Args:
        run: What was measured while it ran.
        days: The delay of each day.
        carriers: The delay of each airline.
        proof: What came out against what went in.
        version: Of this library.
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
        weeks=weeks(days),
        carriers=carriers,
        proof=proof,
        version=version,
        palette=PALETTE,
        delays=[Markup(delays_svg(days, size)) for size in (WIDE, NARROW)],
        course=[Markup(run_svg(run.samples, run.marks, size)) for size in (WIDE_RUN, NARROW_RUN)],
    )
