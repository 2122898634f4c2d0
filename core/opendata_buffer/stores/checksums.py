"""Checksums of objects on their way to a service and back. Pure."""

from __future__ import annotations

import base64
import hashlib
import zlib

from opendata_buffer.errors import TransientStorageError

__all__ = ["as_base64", "check_md5", "crc32", "md5"]


def md5(data: bytes | memoryview) -> bytes:
    """The MD5 of some bytes: against accidents, not against people."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def crc32(data: bytes | memoryview) -> bytes:
    """The CRC-32 of some bytes, the highest byte first."""
    return zlib.crc32(data).to_bytes(4, "big")


def as_base64(checksum: bytes) -> str:
    """As headers carry it."""
    return base64.b64encode(checksum).decode()


def check_md5(data: bytes, told: bytes | None, what: str) -> None:
    """Refuse bytes that are not those whose MD5 the service told.

    Args:
        data: What was read.
        told: None where it told none.
        what: Which object, in words.

    Raises:
        TransientStorageError: They are others.
    """
    if told is not None and told != md5(data):
        raise TransientStorageError(
            f"cannot read {what}: the bytes were garbled on the way (MD5). Try again."
        )
