"""Threads that take turns stay on one processor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["on_one_processor"]


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Keep this thread, and those that it starts meanwhile, on the processor where it runs.

    Of a simulation's threads one runs at a time. Spread over processors, each of its many thousand
    changes of turn would first wake an idle processor up, which takes as long as the step itself.

    Nothing happens where the system cannot do this, or does not allow it.
    """
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {_here()})
    except (AttributeError, OSError):  # not on Linux
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _here() -> int:
    """The processor that runs this thread."""
    with open("/proc/thread-self/stat") as stat:
        # Field 39; the second one, a name in brackets, may have blanks.
        return int(stat.read().rpartition(")")[2].split()[36])
