"""Bytes to values and back. Nothing here reads a clock, a store or a setting."""

from __future__ import annotations

from typing import TypeAlias

MIB = 1024 * 1024
"""Bytes in a mebibyte."""

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Types that are accepted where bytes are read."""
