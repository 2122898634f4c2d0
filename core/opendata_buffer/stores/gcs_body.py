"""Bodies of answers of GCS, read as far as they were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import urllib3.exceptions

from opendata_buffer.stores.ranges import read_part
from opendata_buffer.stores.wire import PIECE

__all__ = ["check_whole", "read_object"]


def read_object(
    key: str, byte_range: tuple[int, int] | None, max_bytes: int | None, response: Any
) -> bytes:
    """An object, or the part of it that was asked for.

    Args:
        key: For errors.
        byte_range: What was asked for; a server that knows no ranges sends the whole object.
        max_bytes: Most bytes of that.
        response: Of urllib3, with the status of a success.

    Raises:
        CorruptData: There are more.
        TransientStorageError: There are more than were asked for.
        HTTPError: The body broke off.
    """
    whole = byte_range is not None and response.status == 200
    size = _size(response.headers)
    return read_part(key, partial(_read, response), size, byte_range, max_bytes, whole=whole)


def check_whole(headers: Mapping[str, str], content: bytes) -> None:
    """Refuse a body that broke off, which urllib3 does not always see.

    Raises:
        ProtocolError: Fewer or more bytes came than the headers tell.
    """
    size = _size(headers)
    if size is not None and size != len(content):
        raise urllib3.exceptions.ProtocolError(f"{len(content)} of {size} bytes arrived")


def _size(headers: Mapping[str, str]) -> int | None:
    told = headers.get("content-length", "")
    # What is compressed on the way has another size when it is unpacked.
    return int(told) if told.isdecimal() and "content-encoding" not in headers else None


def _read(response: Any, most: int | None) -> bytes:
    if most is None:
        content: bytes = response.read()
        check_whole(response.headers, content)
        return content
    parts = []
    for part in response.stream(PIECE, decode_content=True):
        parts.append(part[:most])
        most -= len(parts[-1])
        if not most:
            response.close()  # the rest of the body is on its way
            break
    return b"".join(parts)
