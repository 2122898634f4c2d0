"""What is read off an answer of GCS. Pure."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

__all__ = ["created_ms", "date_ms", "told_md5"]


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
