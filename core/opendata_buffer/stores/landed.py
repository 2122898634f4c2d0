"""What became of a write whose answer does not tell the version that it made."""

from __future__ import annotations

from opendata_buffer.errors import (
    CorruptData,
    ObjectNotFound,
    OpenDataBufferError,
)
from opendata_buffer.stores import Applied, Blob, Get, Unknown

__all__ = ["looked_up"]


def looked_up(store: Get, key: str, written: bytes) -> Applied | Unknown:
    """The outcome of a write that was answered without a version, as behind some proxies.

    If the object holds the bytes that were written, its version is a version of them, whoever
    wrote it last. It raises nothing: the write may be there, and an error would deny it.

    Args:
        store: Read once.
        key: Of the object.
        written: What was sent.
    """
    why = "the object has changed since"
    try:
        found = store.get(key, max_bytes=len(written))
        if isinstance(found, Blob) and found.data == written:
            return Applied(found.version)
    except (CorruptData, ObjectNotFound):
        pass  # it may have been written all the same, and is larger or gone since
    except OpenDataBufferError as error:
        why = f"it cannot be looked up: {error}"
    return Unknown(f"the store answered a write of {key!r} without its version, and {why}")
