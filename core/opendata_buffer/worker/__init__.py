"""Workers that claim: several processes share one queue, each batch is one worker's at a time."""

from __future__ import annotations

from opendata_buffer._public import attach

__getattr__, __dir__, __all__ = attach(__name__)
