"""The end of the demo in a terminal: a table of delays, and the proof."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from notebooks.demo.findings import NAMES, Carrier, Figure, Proof


def show_carriers(found: Sequence[Carrier], console: Console) -> None:
    """Print the mean departure delay of each carrier, and its worst hour of the day."""
    table = _table("departure delay, 2013")
    for column in ("carrier", "departed", "mean delay", "worst hour", "mean then"):
        table.add_column(column, justify="left" if column == "carrier" else "right")
    for each in found:
        table.add_row(
            each.name,
            f"{each.departed:,}",
            f"{each.minutes:.1f} min",
            f"{each.worst_hour:02d}:00",
            f"{each.worst_minutes:.1f} min",
        )
    console.print(table)


def show_proof(proof: Proof, console: Console) -> None:
    """Print each figure, in red if it differs from the source."""
    table = _table("proof: Parquet against the source")
    table.add_column("producer")
    for column in NAMES[:-1]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bytes", justify="right")
    for name, row in proof.rows.items():
        same = "same" if row[-1].is_exact else "[red]differ[/]"
        table.add_row(name, *map(_cell, row[:-1]), same)
    console.print(table)
    total = proof.total
    if proof.is_exact:
        console.print(f"[bold green]every record once:[/] {total.got:,} of {total.want:,}")
    else:
        console.print("[bold red]NOT every record once: see the red figures[/]")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD)


def _cell(figure: Figure) -> str:
    if figure.is_exact:
        return f"{figure.want:,}"
    return f"[red]{figure.got} (not {figure.want})[/]"
