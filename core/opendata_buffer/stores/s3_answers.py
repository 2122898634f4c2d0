"""What is read off an answer of S3, also of servers that leave out what S3 always sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opendata_buffer.stores.ranges import check_size, cut

__all__ = ["modified_ms", "read_body"]


def read_body(
    key: str,
    response: Mapping[str, Any],
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
) -> bytes:
    """The bytes asked for, with the connection given back.

    Args:
        key: For errors.
        response: Of ``get_object``.
        byte_range: What was asked for; a store that knows no ranges sends the whole object.
        max_bytes: Most bytes to read.

    Raises:
        CorruptData: There are more.
    """
    body = response["Body"]
    whole = byte_range is not None and "ContentRange" not in response
    try:
        size: int | None = response.get("ContentLength")
        if size is not None:
            start, end = cut(byte_range, size) if whole else (0, size)
            check_size(key, end - start, max_bytes)
            data: bytes = body.read()
        else:
            # A chunked answer does not tell its length: what is too much ends the reading.
            most = byte_range[1] if whole and byte_range else max_bytes and max_bytes + 1
            data = body.read(most)
            start, end = cut(byte_range, len(data)) if whole else (0, len(data))
            check_size(key, end - start, max_bytes)
    finally:
        body.close()
    # All of it is not copied: bytes sliced from 0 to their end are the same object.
    return data[start:end]


def modified_ms(response: Mapping[str, Any]) -> int:
    """When the object was written, milliseconds since the epoch; 0 when the answer does not say."""
    when = response.get("LastModified")
    return 0 if when is None else int(when.timestamp() * 1000)
