"""Who appends to the manifest, in which order, and how the callers learn of it."""

from __future__ import annotations

from opendata_buffer._public import attach

__getattr__, __dir__, __all__ = attach(__name__)
