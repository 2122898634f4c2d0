"""A question before something that cannot be undone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from opendata_buffer.cli.errors import Failure

__all__ = ["confirm", "somebody_is_there", "yes_option"]

F = TypeVar("F", bound=Callable[..., Any])


def yes_option(command: F) -> F:
    """``--yes``: do not ask."""
    return click.option("-y", "--yes", is_flag=True, help="Do it without asking.")(command)


def confirm(what: str, yes: bool) -> None:
    """Go on if that is wanted; where nobody can be asked, only with ``--yes``.

    Args:
        what: What will be done, as a sentence without its full stop.
        yes: The value of :func:`yes_option`.

    Raises:
        Failure: Nobody is there to be asked.
        click.Abort: The answer is no.
    """
    if yes:
        return
    if not somebody_is_there():
        raise Failure(f"{what}. Nobody is there to be asked: give --yes to do it")
    click.confirm(f"{what}. Go on?", abort=True, err=True)


def somebody_is_there() -> bool:
    """Whether a person can answer."""
    return sys.stdin is not None and sys.stdin.isatty()
