"""What S3 is asked: arguments of boto3's calls. Pure."""

from __future__ import annotations

from typing import Any

from opendata_buffer.stores import Absent, IfVersion
from opendata_buffer.stores.checksums import as_base64, crc32

__all__ = ["conditional_upload", "download", "upload"]


def download(
    bucket: str, full: str, if_changed: str | None, byte_range: tuple[int, int] | None
) -> dict[str, Any]:
    """Of ``get_object``.

    Args:
        bucket: The bucket.
        full: The full key.
        if_changed: The ETag of an object that need not be sent again.
        byte_range: Start and end, the end exclusive.
    """
    arguments: dict[str, Any] = {"Bucket": bucket, "Key": full}
    if if_changed is not None:
        arguments["IfNoneMatch"] = if_changed
    if byte_range is not None:
        arguments["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
    return arguments


def upload(bucket: str, full: str, data: bytes) -> dict[str, Any]:
    """Of ``put_object``.

    The checksum is a header and not left to boto3, which over https would send a trailer in
    aws-chunked encoding; many stores that look like S3 do not know that (failure F36).
    """
    return {
        "Bucket": bucket,
        "Key": full,
        "Body": data,
        "ChecksumCRC32": as_base64(crc32(data)),
    }


def conditional_upload(
    bucket: str, full: str, data: bytes, condition: Absent | IfVersion
) -> dict[str, Any]:
    """Of ``put_object``, which writes only while the condition holds."""
    if isinstance(condition, IfVersion):
        return {**upload(bucket, full, data), "IfMatch": condition.version}
    return {**upload(bucket, full, data), "IfNoneMatch": "*"}
