"""Counts, ages and questions in a form for people, without rich."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import click

from opendata_buffer.cli.errors import Failure


def plural(count: int, noun: str) -> str:
    """Return ``1 batch``, ``2 batches``, ``1,000 copies``."""
    many = {"batch": "batches", "copy": "copies"}.get(noun, f"{noun}s")
    return f"{count:,} {noun if count == 1 else many}"


def waiting(batches: int) -> str:
    """Return ``1 batch waits``, ``2 batches wait``."""
    return f"{plural(batches, 'batch')} {'waits' if batches == 1 else 'wait'}"


def format_age(seconds: float | None) -> str:
    """Return an age: ``93.2`` as ``0:01:33``, None as a dash."""
    # The age is negative if another machine's clock runs ahead.
    return "-" if seconds is None else str(timedelta(seconds=max(0, int(seconds))))


def format_time(milliseconds: int, timespec: str = "seconds") -> str | None:
    """Return milliseconds since the Unix epoch in ISO 8601, UTC; None for times past year 9999."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec=timespec)
    except (OverflowError, ValueError, OSError):
        return None


def format_span(milliseconds: int | None) -> str:
    """Return a duration: ``604800000`` as ``7d``, ``5400000`` as ``1h30m``, None as ``none``."""
    if milliseconds is None:
        return "none"
    rest, found = milliseconds // 1000, ""
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, seconds)
        found += f"{count:,}{unit}" if count else ""
    return found or "0s"


def format_retention(milliseconds: int | None, size: int | None) -> str:
    """Describe how long a log keeps batches after all readers have acknowledged them."""
    kept = [] if milliseconds is None else [format_span(milliseconds)]
    kept += [] if size is None else [f"{size:,} bytes"]
    return f"{' or '.join(kept)} at least" if kept else "until all readers have acknowledged"


def echo_json_lines(values: Iterable[object]) -> None:
    """Print one line of JSON for each value, and ``[]`` if there is none.

    So a program that parses the output always finds a document in it.

    Args:
        values: What ``json.dumps`` accepts. Each line is printed as soon as its value is there.
    """
    found = False
    for value in values:
        found = True
        click.echo(json.dumps(value))
    if not found:
        click.echo("[]")


def confirm(what: str, yes: bool) -> None:
    """Ask before the command does something.

    Args:
        what: The effect of the command, as a sentence without a period.
        yes: Do not ask.

    Raises:
        Failure: Standard input is not a terminal, and ``yes`` was not given.
    """
    if yes:
        return
    if not is_interactive():
        raise Failure(
            f"{what}. Standard input is not a terminal, so no one can answer: give --yes to do it"
        )
    click.confirm(f"{what}. Go on?", abort=True, err=True)


def is_interactive() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()
