"""Shared objects that only compare-and-swap changes: the manifest and the prefix's owner marker."""

from __future__ import annotations

from opendata_buffer._public import attach

__getattr__, __dir__, __all__ = attach(__name__)
