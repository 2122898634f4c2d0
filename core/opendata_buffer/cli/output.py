"""What commands print for a person: sizes, ages, progress and questions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from opendata_buffer.cli.errors import Failure

__all__ = [
    "confirm",
    "count_progress",
    "format_age",
    "format_bytes",
    "is_interactive",
    "plural",
    "track",
    "waiting",
]


def plural(count: int, noun: str) -> str:
    """``1 batch``, ``2 batches``, ``1,000 copies``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("ch", "sh", "s", "x")):
        noun += "e"
    elif noun.endswith("y") and noun[-2] not in "aeiou":
        noun = noun[:-1] + "ie"
    return f"{count:,} {noun}s"


def waiting(batches: int) -> str:
    """``1 batch waits``, ``2 batches wait``."""
    return f"{plural(batches, 'batch')} {'waits' if batches == 1 else 'wait'}"


def format_bytes(size: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def format_age(seconds: float | None) -> str:
    """``93.2`` as ``1 min 33 s``; None as a dash."""
    if seconds is None:
        return "-"
    # Negative when another machine's clock runs ahead.
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    days, whole = divmod(whole, 86_400)
    hours, whole = divmod(whole, 3_600)
    minutes, whole = divmod(whole, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole} s"
    return f"{whole} s"


# ---- questions


def confirm(what: str, yes: bool) -> None:
    """Ask before something that cannot be undone.

    Args:
        what: What the command will do, as a sentence without its full stop.
        yes: The value of ``--yes``.

    Raises:
        Failure: Standard input is no terminal, and ``--yes`` was not given.
        click.Abort: The answer is no.
    """
    if yes:
        return
    if not is_interactive():
        raise Failure(f"{what}. Standard input is no terminal to ask on: give --yes to do it")
    click.confirm(f"{what}. Go on?", abort=True, err=True)


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


# ---- progress, on stderr


@contextmanager
def _progress(*columns: ProgressColumn) -> Iterator[Progress | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


@contextmanager
def track(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; nothing when that is no terminal.

    Yields:
        Call it with the number of items done, and of all.
    """
    with _progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    ) as progress:
        if progress is None:
            yield lambda done, total: None
            return
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def count_progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """The bytes and records so far, on stderr; nothing when that is no terminal or ``quiet``.

    Yields:
        Call it with the number of further bytes and records.
    """
    if quiet:
        yield lambda size, records: None
        return
    with _progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        _Records(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    ) as progress:
        if progress is None:
            yield lambda size, records: None
            return
        task = progress.add_task(what, total=None, records=0)
        total = 0

        def advance(size: int, records: int) -> None:
            nonlocal total
            total += records
            progress.update(task, advance=size, records=total)

        yield advance


class _Records(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(plural(task.fields["records"], "record"), style="progress.download")
