"""Reading the small JSON objects beside a manifest, by who only looks; a register changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from opendata_buffer.errors import CorruptData
from opendata_buffer.formats.sidecar import Sidecar
from opendata_buffer.stores import Blob, Get

__all__ = ["read_sidecar"]

T = TypeVar("T")


def read_sidecar(store: Get, key: str, kind: Sidecar, decode: Callable[[bytes], T]) -> T:
    """The object at a key, as a value.

    Args:
        store: Where it lies.
        key: Its key.
        kind: How large it may be.
        decode: From its bytes to the value; raises :class:`CorruptData`.

    Raises:
        ObjectNotFound: There is none.
        CorruptData: It is too large, or no such object; names the key.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    try:
        got = store.get(key, max_bytes=kind.max_bytes)
    except CorruptData as error:
        raise CorruptData(f"{key!r}: {kind.unreadable(str(error).rstrip('.'))}") from error
    assert isinstance(got, Blob)  # the other one is only an answer to if_changed
    try:
        return decode(got.data)
    except CorruptData as error:
        # The decoder sees bytes and cannot say whose they are.
        raise CorruptData(f"{key!r}: {error}") from error
