"""Rows of the benchmark report, and the report as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

NOT_RUN = "not run"
"""The figure of a row that could not be measured on this machine."""

_MARKS = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row.

    Attributes:
        name: The thing that was measured, as the figures page calls it.
        measured: The figure with its unit, such as ``1.18 x`` or ``612 batches/s``.
        goal: The figure to reach, such as ``<= 1.3 x``. Empty if there is no goal.
        ok: Whether the goal was reached. ``None`` for a row that has no goal.
        detail: The raw figures from which ``measured`` was calculated.
    """

    name: str
    measured: str
    goal: str = ""
    ok: bool | None = None
    detail: str = ""


def not_run(name: str, reason: str) -> Row:
    """Make a row for a measurement that needs a tool which this machine does not have.

    Args:
        name: The thing that would have been measured.
        reason: The missing tool, and how to get it.

    Returns:
        The row.
    """
    return Row(name, NOT_RUN, detail=reason)


def line(row: Row) -> str:
    """Return the row as one line of text, to print as soon as it is measured."""
    mark = {True: "yes", False: "NO", None: ""}[row.ok]
    parts = [f"{row.name}: {row.measured}", row.goal and f"goal {row.goal}", mark, row.detail]
    return "  ·  ".join(filter(None, parts))


def show(rows: Sequence[Row], console: Console) -> None:
    """Print all rows as one table."""
    table = Table(title="opendata-buffer benchmarks", title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    table.add_column("reached", justify="center")
    table.add_column("detail", overflow="fold", style="dim")
    for row in rows:
        table.add_row(row.name, row.measured, row.goal, _MARKS[row.ok], row.detail)
    console.print(table)
