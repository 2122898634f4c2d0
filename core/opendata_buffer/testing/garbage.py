"""When garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]


@contextmanager
def no_collections() -> Iterator[None]:
    """Python looks for no cycles of garbage meanwhile.

    It does so whenever a thread makes an object, and runs finalizers there and then. One that takes
    a lock, as that of unfinished results does, would give the turn away in the middle of anything:
    in a simulation two threads would run at once, and in the end none. Where a call is
    interrupted at a chosen step, that step could lie in such a finalizer, and come to nothing.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
