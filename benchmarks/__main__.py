"""``python -m benchmarks [--tiny] [SUITE ...]``: measure, and print one table.

Ratios are taken within one run, so they also hold on a busy machine. The absolute figures in the
last column do not.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator

import click
from rich.console import Console

from benchmarks.measuring import TINY
from benchmarks.suites import DEFAULT, NAMES, rows_of
from benchmarks.tables import Row, line, show


def measure(suite: str, progress: Console, failures: list[str]) -> Iterator[Row]:
    """Run a suite and print each row as soon as it is measured.

    A suite that raises an error gives one more row, which did not reach its goal.

    Args:
        suite: Name of the suite.
        progress: The console that gets the rows.
        failures: Gets the name of the suite if it raises an error.

    Yields:
        The rows of the suite.
    """
    try:
        with progress.status(f"{suite} ..."):
            for row in rows_of(suite):
                progress.print(line(row), highlight=False, markup=False, soft_wrap=True)
                yield row
    except Exception as error:
        failures.append(suite)
        progress.print(traceback.format_exc(), highlight=False, markup=False)
        yield Row(suite, "failed", "runs", False, f"{type(error).__name__}: {error}")


@click.command()
@click.option("--tiny", is_flag=True, help="Only run the code. The figures mean nothing.")
@click.argument("suites", nargs=-1, type=click.Choice(NAMES))
def main(suites: tuple[str, ...], tiny: bool) -> None:
    """Measure SUITES. The default is all suites that need no downloads.

    The exit status is 1 if a goal was missed. With --tiny it is 1 if a suite failed.
    """
    if tiny:
        os.environ[TINY] = "1"  # before any suite is imported
    progress = Console(stderr=True)
    failures: list[str] = []
    rows = [row for suite in suites or DEFAULT for row in measure(suite, progress, failures)]
    # A pipe gets the whole width: folded cells are hard to read in a log.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    show(rows, console)
    sys.exit(bool(failures) if tiny else any(row.ok is False for row in rows))


if __name__ == "__main__":
    main()
