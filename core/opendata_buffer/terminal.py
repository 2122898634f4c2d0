"""What a person sees in a terminal: tables, progress, sizes and ages. Built on rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

__all__ = ["Counter", "counting", "format_age", "format_bytes", "table", "track"]


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
    # Another machine's clock may run ahead: an age below zero is no age.
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


def table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns, names and values. Values are shown as they are, never as markup."""
    result = Table(title=Text(title), show_header=False, title_justify="left", box=None)
    result.add_column(style="cyan")
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(Text(name), Text(value))
    return result


@contextmanager
def _progress(*columns: ProgressColumn) -> Iterator[Progress | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


@contextmanager
def track(what: str, items: Sequence[object]) -> Iterator[Counter]:
    """A bar of known length on stderr; nothing when that is no terminal."""
    with _progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    ) as progress:
        task = None if progress is None else progress.add_task(what, total=len(items))
        yield Counter(progress, task)


@contextmanager
def counting(what: str, *, quiet: bool = False) -> Iterator[Counter]:
    """Records and bytes so far, on stderr; nothing when that is no terminal or ``quiet``.

    Args:
        what: What is being done.
        quiet: Show nothing, because stdout goes to the same terminal.
    """
    if quiet and sys.stdout.isatty():
        yield Counter(None, None)
        return
    with _progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        _Records(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    ) as progress:
        task = None if progress is None else progress.add_task(what, total=None, records=0)
        yield Counter(progress, task)


class Counter:
    """Advances what :func:`track` or :func:`counting` shows, if anything."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task
        self._records = 0

    def advance(self, by: int = 1, *, records: int = 0) -> None:
        """``by`` items or bytes more."""
        if self._progress is not None and self._task is not None:
            self._records += records
            self._progress.update(self._task, advance=by, records=self._records)


class _Records(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['records']:,} records", style="progress.download")
