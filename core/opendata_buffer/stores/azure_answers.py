"""What is read off an answer of Azure, as its SDK hands it on. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import Any

from opendata_buffer.stores import ObjectInfo

__all__ = ["date_ms", "modified_ms", "objects_of"]


def modified_ms(about: Any) -> int:
    """When a blob was written, milliseconds since the Unix epoch; 0 when the answer does not say.

    Args:
        about: Its properties.
    """
    when = about.last_modified
    return 0 if when is None else int(when.timestamp() * 1000)


def date_ms(header: str | None) -> int | None:
    """A date in a header, milliseconds since the Unix epoch; None where there is none."""
    return None if not header else int(parsedate_to_datetime(header).timestamp() * 1000)


def objects_of(blobs: Iterable[Any], root: str) -> list[ObjectInfo]:
    """The objects of a page of a listing, their keys without the root.

    Accounts with directories list those, too, as empty blobs.
    """
    return [
        ObjectInfo(each.name[len(root) :], each.size, modified_ms(each))
        for each in blobs
        if (each.metadata or {}).get("hdi_isfolder") != "true"
    ]
