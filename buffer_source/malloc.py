"""Settings of the C library's memory allocator in the process that plans a query."""

from __future__ import annotations

import threading
from importlib import import_module

M_ARENA_MAX = -8
"""The parameter in glibc's malloc.h for the maximum number of heaps of a process."""


def reserve_less_memory() -> None:
    """Let threads share one heap if the address space is limited (PYSPARK_PLANNER_MEMORY_MB).

    glibc reserves up to 128 MiB of address space for the heap of each thread, and 8 MiB for its
    stack.
    """
    try:
        resource, ctypes = import_module("resource"), import_module("ctypes")
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            threading.stack_size(1 << 20)
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    except (ImportError, AttributeError):
        pass  # Another C library, or not Unix.
