"""Versions in answers: what tells whether an object is still the one that was read. Pure."""

from __future__ import annotations

from opendata_buffer.errors import UnsafeStore

__all__ = ["strong_etag", "unversioned", "weak_or_none"]


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
