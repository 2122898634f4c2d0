"""What GCS is asked: queries, headers and bodies of its JSON API. Pure but for a random mark."""

from __future__ import annotations

import json
import uuid

from opendata_buffer.stores import Absent, IfVersion
from opendata_buffer.stores.checksums import as_base64, md5

__all__ = ["download", "expected_generation", "upload"]

_NO_GENERATION = "1"
"""No object has it: generations are microseconds since 1970."""


def download(
    if_changed: str | None, byte_range: tuple[int, int] | None
) -> tuple[dict[str, str | int], dict[str, str]]:
    """Query and headers of a read.

    Args:
        if_changed: The generation of an object that need not be sent again.
        byte_range: Start and end, the end exclusive.
    """
    query: dict[str, str | int] = {"alt": "media"}
    if if_changed is not None and if_changed.isdecimal():
        query["ifGenerationNotMatch"] = if_changed
    if byte_range is None:
        return query, {}
    return query, {"Range": f"bytes={byte_range[0]}-{byte_range[1] - 1}"}


def expected_generation(condition: Absent | IfVersion) -> str:
    """What a conditional write expects; ``0`` is no object.

    What is no generation matches no object, and the question is asked all the same.
    """
    if not isinstance(condition, IfVersion):
        return "0"
    version = condition.version
    return version if version.isdecimal() and version != "0" else _NO_GENERATION


def upload(full: str, data: bytes | memoryview) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an upload: the object's description, which has its checksum, and it.

    No cache may keep it: for what anybody may read, GCS otherwise hands out an hour-old manifest.
    """
    about = {"name": full, "md5Hash": as_base64(md5(data)), "cacheControl": "no-store"}
    mark = f"part-{uuid.uuid4().hex}".encode()
    body = b"".join(
        (
            b"--" + mark + b"\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n",
            json.dumps(about).encode(),
            b"\r\n--" + mark + b"\r\nContent-Type: application/octet-stream\r\n\r\n",
            data,
            b"\r\n--" + mark + b"--\r\n",
        )
    )
    return body, {"Content-Type": f"multipart/related; boundary={mark.decode()}"}
