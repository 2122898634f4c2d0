"""The garbage collector: deletes batch objects that no queue entry names (OpenData RFC 0001)."""

from __future__ import annotations

from opendata_buffer._public import attach

__getattr__, __dir__, __all__ = attach(__name__)
