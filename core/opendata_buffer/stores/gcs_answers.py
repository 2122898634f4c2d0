"""What is read off an answer of GCS. Pure."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from opendata_buffer.stores import ObjectInfo
from opendata_buffer.stores.gcs_client import Answer

__all__ = ["created_ms", "date_ms", "page_of", "told_md5"]


def created_ms(about: Mapping[str, Any]) -> int:
    """When an object was written, by its description; 0 where that does not say.

    Milliseconds since the Unix epoch, in whole seconds, as the headers of a read tell it.
    """
    when = about.get("timeCreated")
    return 0 if not when else int(datetime.fromisoformat(when).timestamp()) * 1000


def date_ms(header: str | None) -> int | None:
    """A date in a header, milliseconds since the Unix epoch; None where there is none."""
    return None if not header else int(parsedate_to_datetime(header).timestamp()) * 1000


def told_md5(headers: Mapping[str, str]) -> bytes | None:
    """The MD5 of the whole object, by the headers of a read; None where they have none."""
    for each in headers.get("x-goog-hash", "").split(","):
        name, _, value = each.strip().partition("=")
        if name == "md5":
            try:
                return b64decode(value, validate=True)
            except binascii.Error:
                return b""
    return None


def page_of(answer: Answer, root: str) -> tuple[list[ObjectInfo], str, int | None]:
    """What a page of a listing tells.

    Args:
        answer: With the status of a success.
        root: What stands before every key.

    Returns:
        Objects, their keys without the root; the token of the next page, empty at the last; and
        the service's clock, milliseconds since the Unix epoch.

    Raises:
        ValueError, LookupError, TypeError: It is no page of a listing. Taken for an empty one, it
            would hide all the objects that follow.
    """
    page = answer.fields()
    if not page and b"".join(answer.body.split()) != b"{}":
        raise ValueError("it is no page of a listing")
    objects = [
        ObjectInfo(item["name"][len(root) :], int(item["size"]), created_ms(item))
        for item in page.get("items", ())
    ]
    return objects, str(page.get("nextPageToken") or ""), date_ms(answer.headers.get("date"))
