"""Convert bytes to values and back. Nothing here reads a clock, a store, or a setting."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

MIB = 1024 * 1024
"""Bytes in a mebibyte."""

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Types that are accepted where bytes are read."""


@cache
def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next large object.

    Once a large block was freed, glibc keeps up to twice as much. The block here is never touched,
    so it takes no memory itself. The page faults of fresh memory take longer than filling it.
    """
    bytes(16 * MIB)
