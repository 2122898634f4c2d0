"""Versions in answers: what tells whether an object is still the one that was read. Pure."""

from __future__ import annotations

from opendata_buffer.errors import TransientStorageError, UnsafeStore
from opendata_buffer.stores import NotModified

__all__ = ["not_modified", "strong_etag", "unversioned", "weak_or_none"]


def not_modified(key: str, store: str, if_changed: str | None) -> NotModified:
    """What a 304 means: nothing, where no version was asked about.

    Args:
        key: That was read.
        store: Its URL.
        if_changed: The version that the caller knows.

    Raises:
        TransientStorageError: It knows none, and would take the answer for the object.
    """
    if if_changed is None:
        raise TransientStorageError(
            f"cannot read {key!r} in {store}: it was answered as not modified (304), which was not "
            "asked. Check what answers at the endpoint (a cache?), or try again later."
        )
    return NotModified()


def strong_etag(etag: str | None) -> str | None:
    """An answer's ETag; None when there is none, or when it is weak.

    A weak one (``W/"..."``) says that two contents are as good as each other, not that they are
    the same bytes. It never matches an ``If-Match``.
    """
    return None if not etag or etag.startswith("W/") else etag


def weak_or_none(etag: str | None) -> str:
    """What an answer has instead of a strong ETag, in words."""
    return f"the weak ETag {etag}" if etag else "no ETag"


def unversioned(store: str, answers: str, use: str) -> UnsafeStore:
    """The error about a store whose answers do not tell an object's version.

    Args:
        store: Its URL and its endpoint.
        answers: What it answers, in words: ``answers a read with no ETag``.
        use: What to use instead, as a whole sentence.
    """
    return UnsafeStore(
        f"store {store} {answers}: nothing tells whether an object is still the one that was read, "
        f"and writers of one manifest would overwrite each other. {use}"
    )
