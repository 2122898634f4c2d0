"""Imports that are made late: one thread at a time, and never in the middle of a fork.

Two threads that import modules of one package at the same moment can each see the other's half
loaded, and fail with an ImportError. And a child that is forked while a thread imports a module
inherits it half loaded and locked, with nobody to finish it: whoever imports it there waits for
ever. So a fork waits until such an import is done.
"""

from __future__ import annotations

# Both have hooks around a fork of their own. Imported while one waits here, they would give back
# in the parent what they have not taken.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["late_imports"]

FORK_WAITS_S = 10.0
"""How long a fork waits for an import: a directory of modules that does not answer must not
stop a process that forks."""


class _Loading:
    # Reentrant: one late import may contain another.
    lock = threading.RLock()


def _before_fork() -> None:
    _Loading.lock.acquire(timeout=FORK_WAITS_S)


def _after_in_parent() -> None:
    with suppress(RuntimeError):  # It was not acquired in time.
        _Loading.lock.release()


def _after_in_child() -> None:
    _Loading.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )


@contextmanager
def late_imports() -> Iterator[None]:
    """Around import statements in functions that run in threads of their own."""
    with _Loading.lock:
        yield
