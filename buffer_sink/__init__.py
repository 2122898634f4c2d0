"""The Spark sink: ``df.writeStream.format("opendata-buffer")``, ``df.write``, ``foreachBatch``.

``foreach_batch_writer`` is imported on first use, because Spark's workers do not need it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["foreach_batch_writer"]


def __getattr__(name: str) -> Any:
    if name == "foreach_batch_writer":
        from buffer_sink.foreach_batch import foreach_batch_writer  # See the module docstring.

        return foreach_batch_writer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
