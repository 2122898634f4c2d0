"""Entries in: batched, uploaded, handed to the committer."""

from __future__ import annotations

from opendata_buffer._public import attach

__getattr__, __dir__, __all__ = attach(__name__)
