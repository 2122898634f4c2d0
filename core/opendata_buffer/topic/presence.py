"""Whether a store has a topic: all that a query over one queue needs to know of topics."""

from __future__ import annotations

from opendata_buffer.errors import CorruptData, ObjectNotFound
from opendata_buffer.queue.nesting import TOPIC_KEY
from opendata_buffer.stores import Get

__all__ = ["MAX_BYTES", "is_topic"]

MAX_BYTES = 1024 * 1024
"""Of a topic's description."""


def is_topic(store: Get) -> bool:
    """Whether a topic lies at the store's root, by one small read.

    Raises:
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    try:
        store.get(TOPIC_KEY, max_bytes=MAX_BYTES)
    except ObjectNotFound:
        return False
    except CorruptData:
        return True  # too large to read, but there; whoever reads it says so
    return True
