"""How far a command is, on stderr, for a person who waits. Built on rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from opendata_buffer.cli.words import plural

__all__ = ["counting", "track"]


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
    """A bar on stderr; nothing when that is no terminal.

    Yields:
        Tell it how many are done, and of how many.
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
def counting(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Bytes and records so far, on stderr; nothing when that is no terminal or ``quiet``.

    Yields:
        Tell it how many bytes and records more.
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
        seen = 0

        def advance(size: int, records: int) -> None:
            nonlocal seen
            seen += records
            progress.update(task, advance=size, records=seen)

        yield advance


class _Records(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(plural(task.fields["records"], "record"), style="progress.download")
