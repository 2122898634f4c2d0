"""Byte ranges and limits of reads and listings, the same for every store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opendata_buffer.errors import CorruptData, InvalidInput, TransientStorageError
from opendata_buffer.stores import Listing, ObjectInfo

__all__ = [
    "check_goes_on",
    "check_limit",
    "check_range",
    "check_size",
    "cut",
    "listed",
    "read_part",
]


def check_limit(limit: int | None) -> None:
    """Refuse a listing of no objects: it would be truncated without a key to go on after.

    Raises:
        InvalidInput: ``limit`` is less than 1.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit!r}: use a whole number of at least 1")


def check_goes_on(token: object, following: object, prefix: str, store: str) -> None:
    """Refuse a listing whose next page would be the same one again, for ever.

    Args:
        token: Where this page began; empty or None for the first.
        following: Where the next one begins.
        prefix: The full prefix.
        store: The store's URL.

    Raises:
        TransientStorageError: Both are the same.
    """
    if token and token == following:
        raise TransientStorageError(
            f"cannot list {prefix!r} in {store}: the listing goes on where it was. Check what "
            "answers at the endpoint, or try again later."
        )


def check_range(byte_range: tuple[int, int] | None) -> None:
    """Refuse a range (start, end exclusive) that is empty or negative.

    Raises:
        InvalidInput: It is.
    """
    if byte_range is not None and not 0 <= byte_range[0] < byte_range[1]:
        raise InvalidInput(
            f"byte_range is {byte_range!r}: use (start, end) with 0 <= start < end, end exclusive"
        )


def cut(byte_range: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """The part of the range that an object of ``size`` bytes has: (start, end)."""
    if byte_range is None:
        return (0, size)
    return (min(byte_range[0], size), min(byte_range[1], size))


def check_size(key: str, size: int, max_bytes: int | None) -> None:
    """Refuse to read more than the caller wants to hold in memory.

    Raises:
        CorruptData: ``size`` is larger than ``max_bytes``.
    """
    if max_bytes is not None and size > max_bytes:
        raise CorruptData(
            f"object {key!r} has {size} bytes to read, more than the limit of {max_bytes}: "
            "it was not read"
        )


def read_part(
    key: str,
    read: Callable[[int | None], bytes],
    size: int | None,
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
    *,
    whole: bool,
) -> bytes:
    """What was asked for of an answer's body, reading no more than tells that it is too much.

    Args:
        key: For errors.
        read: Reads the body: at most so many bytes of it, or all.
        size: Of the body; None where the answer does not tell it.
        byte_range: What was asked for.
        max_bytes: Most bytes of that.
        whole: There was a range, and the answer has the whole object: the store knows no ranges.

    Raises:
        CorruptData: There are more than ``max_bytes``.
        TransientStorageError: There are more than the range has.
    """
    most = None if max_bytes is None else max_bytes + 1
    if byte_range is not None:
        most = byte_range[1] if whole else byte_range[1] - byte_range[0] + 1
    if size is not None:
        start, end = cut(byte_range, size) if whole else (0, size)
        check_size(key, end - start, max_bytes)
        _check_asked(key, end - start, byte_range)
        return read(None if end == size else end)[start:end]
    data = read(most)
    start, end = cut(byte_range, len(data)) if whole else (0, len(data))
    check_size(key, end - start, max_bytes)
    _check_asked(key, end - start, byte_range)
    # All of it is not copied: bytes sliced from 0 to their end are the same object.
    return data[start:end]


def _check_asked(key: str, size: int, byte_range: tuple[int, int] | None) -> None:
    """Refuse more bytes than a range has: they are others than were asked for.

    Raises:
        TransientStorageError: There are.
    """
    if byte_range is not None and size > byte_range[1] - byte_range[0]:
        raise TransientStorageError(
            f"cannot read bytes {byte_range[0]} to {byte_range[1]} of {key!r}: the answer has "
            f"{size} bytes. Check what answers at the endpoint, or try again later."
        )


def listed(
    objects: Sequence[ObjectInfo], now_ms: int | None, limit: int | None, *, more: bool
) -> Listing:
    """The listing that pages of a service make.

    Args:
        objects: All that were read, which may be more than ``limit``.
        now_ms: The service's clock, milliseconds since the Unix epoch; None where it told none.
        limit: Most objects of the listing.
        more: Whether there are pages that were not read.
    """
    if now_ms is None:
        # No clock of the store's: its newest object is a lower bound, so nothing looks
        # older than it is. This machine's clock would be no such bound (failure F6).
        now_ms = max((info.last_modified_ms for info in objects), default=0)
    # In their order already, except on accounts and buckets with directories, and on what only
    # looks like one of these services.
    kept = tuple(sorted(objects, key=lambda info: info.key)[:limit])
    return Listing(kept, now_ms, truncated=more or len(kept) < len(objects))
