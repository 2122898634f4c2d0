"""One line of the benchmark report, and the report as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line.

    Attributes:
        name: What was measured, as the README calls it.
        measured: The figure with its unit, such as ``1.18 x`` or ``612 batches/s``.
        bar: The figure to reach, such as ``<= 1.3 x``; empty when there is none.
        ok: Whether the bar was reached; ``None`` for a line that is only for orientation.
        detail: The raw figures behind ``measured``.
    """

    name: str
    measured: str
    bar: str = ""
    ok: bool | None = None
    detail: str = ""


def line(row: Row) -> str:
    """The row as text, to be printed as soon as it is measured."""
    mark = {True: "yes", False: "NO", None: ""}[row.ok]
    parts = [f"{row.name}: {row.measured}", row.bar and f"goal {row.bar}", mark, row.detail]
    return "  ·  ".join(filter(None, parts))


_MARKS = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}


def show(rows: Sequence[Row], console: Console) -> None:
    """Print all lines as one table."""
    table = Table(title="opendata-buffer benchmarks", title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("bar", no_wrap=True)
    table.add_column("reached", justify="center")
    table.add_column("detail", overflow="fold", style="dim")
    for row in rows:
        table.add_row(row.name, row.measured, row.bar, _MARKS[row.ok], row.detail)
    console.print(table)
