"""Queues inside each other's data prefix: refused where that can be seen (failure F7).

The collector of a v1 client deletes everything under its prefix that its manifest does not name:
a whole queue, if one lies there. Each queue's marker shows where a queue is, so who makes a new
one looks for markers above it, and among the first objects below it.
"""

from __future__ import annotations

from typing import Protocol

from opendata_buffer.errors import InvalidInput, ObjectNotFound
from opendata_buffer.stores import Get, List

__all__ = ["refuse_nesting"]

LOOKED_AT = 1_000
"""Objects below the new prefix that are looked at: one page of a listing."""

_MAX_MARKER_BYTES = 1024 * 1024


class ReadList(Get, List, Protocol):
    """What looking around needs of a store."""


def refuse_nesting(store: ReadList, data_path_prefix: str, marker_name: str) -> None:
    """Check a data prefix that is about to get its first queue.

    Raises:
        InvalidInput: It lies inside another queue's data prefix, or one lies inside it.
        StorageError: The store did not answer.
    """
    parts = data_path_prefix.split("/")
    for length in range(1, len(parts)):
        outer = "/".join(parts[:length])
        if _exists(store, f"{outer}/{marker_name}"):
            raise _nested(data_path_prefix, outer, f"inside the data prefix {outer!r} of another")
    below = store.list(f"{data_path_prefix}/", limit=LOOKED_AT)
    for found in below.objects:
        folder, _, name = found.key.rpartition("/")
        if name == marker_name and folder != data_path_prefix:
            raise _nested(data_path_prefix, folder, f"around the data prefix {folder!r} of another")


def _exists(store: Get, key: str) -> bool:
    try:
        store.get(key, max_bytes=_MAX_MARKER_BYTES)
    except ObjectNotFound:
        return False
    return True


def _nested(data_path_prefix: str, other: str, where: str) -> InvalidInput:
    return InvalidInput(
        f"data prefix {data_path_prefix!r} lies {where} queue: a garbage collector of the outer "
        f"one may delete the inner one's batches. Use a prefix beside {other!r}."
    )
