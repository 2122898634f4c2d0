"""Counts, ages and questions as a person reads them, without rich."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta

import click

from opendata_buffer.cli.errors import Failure


def plural(count: int, noun: str) -> str:
    """``1 batch``, ``2 batches``, ``1,000 copies``."""
    many = {"batch": "batches", "copy": "copies"}.get(noun, f"{noun}s")
    return f"{count:,} {noun if count == 1 else many}"


def waiting(batches: int) -> str:
    """``1 batch waits``, ``2 batches wait``."""
    return f"{plural(batches, 'batch')} {'waits' if batches == 1 else 'wait'}"


def format_age(seconds: float | None) -> str:
    """``93.2`` as ``0:01:33``; None as a dash."""
    # Negative when another machine's clock runs ahead.
    return "-" if seconds is None else str(timedelta(seconds=max(0, int(seconds))))


def format_time(milliseconds: int, timespec: str = "seconds") -> str | None:
    """Milliseconds since the Unix epoch in ISO 8601, UTC; None beyond the calendar."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec=timespec)
    except (OverflowError, ValueError, OSError):
        return None


def format_span(milliseconds: int | None) -> str:
    """``604800000`` as ``7d``, ``5400000`` as ``1h30m``; None as ``none``."""
    if milliseconds is None:
        return "none"
    rest, found = milliseconds // 1000, ""
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, seconds)
        found += f"{count:,}{unit}" if count else ""
    return found or "0s"


def format_retention(milliseconds: int | None, size: int | None) -> str:
    """How long a log keeps what all readers have acknowledged."""
    kept = [] if milliseconds is None else [format_span(milliseconds)]
    kept += [] if size is None else [f"{size:,} bytes"]
    return f"{' or '.join(kept)} at least" if kept else "until all readers have acknowledged"


def confirm(what: str, yes: bool) -> None:
    """Ask before the command does ``what``, a sentence; fail if standard input is no terminal."""
    if yes:
        return
    if not is_interactive():
        raise Failure(f"{what}. Standard input is no terminal to ask on: give --yes to do it")
    click.confirm(f"{what}. Go on?", abort=True, err=True)


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()
