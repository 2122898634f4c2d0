"""``python -m benchmarks [suite ...]``: measure, and print one table.

Ratios are taken within one run, so they hold on a busy machine too; the absolute figures in the
last column do not.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable, Iterator

import click
from rich.console import Console

from benchmarks.table import Row, line, show

SUITES = (
    "codec", "producers", "pace", "topics", "broker", "consumer", "log", "oncall", "s3", "cost",
    "spark",
)  # fmt: skip
ALONE = (
    "peers", "workloads", "growth", "spark_cores",
    "spark/source", "spark/typed", "spark/once", "spark/start", "spark/drain", "spark/sink",
)  # fmt: skip
"""Those that run only when they are named: peers and workloads get what others make, and take half
an hour, as growth does; the others are parts of a suite."""


def measure(suite: str, progress: Console) -> Iterator[Row]:
    """The rows of one suite, as they come; one that breaks is a row that did not reach its bar."""
    try:
        name, *part = suite.split("/")
        rows: Iterable[Row] = importlib.import_module(f"benchmarks.{name}").run(*part)
        with progress.status(f"{suite} ..."):
            for row in rows:
                progress.print(line(row), highlight=False, markup=False, soft_wrap=True)
                yield row
    except Exception as error:
        progress.print(traceback.format_exc(), highlight=False, markup=False)
        yield Row(suite, "failed", "runs", False, f"{type(error).__name__}: {error}")


@click.command()
@click.argument("suites", nargs=-1, type=click.Choice(SUITES + ALONE))
def main(suites: tuple[str, ...]) -> None:
    """Measure SUITES (by default all; peers only by name). Exits 1 when a bar was missed."""
    progress = Console(stderr=True)
    rows = [row for suite in suites or SUITES for row in measure(suite, progress)]
    # A pipe gets the whole width: folded cells are hard to read in a log.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    show(rows, console)
    sys.exit(any(row.ok is False for row in rows))


if __name__ == "__main__":
    main()
