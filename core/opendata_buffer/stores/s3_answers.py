"""What is read off an answer of S3, also of servers that leave out what S3 always sends."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from opendata_buffer.stores import ObjectInfo
from opendata_buffer.stores.ranges import read_part

__all__ = ["modified_ms", "page_of", "read_body"]


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
        TransientStorageError: There are more than were asked for.
    """
    body = response["Body"]
    whole = byte_range is not None and "ContentRange" not in response
    size: int | None = response.get("ContentLength")
    try:
        return read_part(key, body.read, size, byte_range, max_bytes, whole=whole)
    finally:
        body.close()


def modified_ms(response: Mapping[str, Any]) -> int:
    """When the object was written, milliseconds since the epoch; 0 when the answer does not say."""
    when = response.get("LastModified")
    return 0 if when is None else _ms(when)


def page_of(
    response: Mapping[str, Any], root: str
) -> tuple[list[ObjectInfo], str | None, int | None]:
    """What ``list_objects_v2`` tells.

    Args:
        response: Its answer.
        root: What stands before every key.

    Returns:
        Objects, their keys without the root; the token of the next page, None at the last; and
        the store's clock, milliseconds since the Unix epoch.

    Raises:
        ValueError, LookupError: It is no page of a listing. Taken for an empty one, it would hide
            all the objects that follow.
    """
    if response.keys() <= {"ResponseMetadata"}:
        raise ValueError("it is no page of a listing")
    token: str | None = response.get("NextContinuationToken")
    more = bool(response.get("IsTruncated"))
    if more and not token:
        raise ValueError("more objects follow, and it does not say where: ListObjectsV2 is unknown")
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    objects = [
        ObjectInfo(item["Key"][len(root) :], item["Size"], _ms(item["LastModified"]))
        for item in response.get("Contents", ())
    ]
    return objects, token if more else None, _ms(parsedate_to_datetime(date)) if date else None


def _ms(when: Any) -> int:
    return int(when.timestamp() * 1000)
