"""What commands print for a person without rich: counts, sizes, ages and questions."""

from __future__ import annotations

import sys

import click

from opendata_buffer.cli.errors import Failure

__all__ = [
    "confirm",
    "format_age",
    "format_bytes",
    "is_interactive",
    "plural",
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
