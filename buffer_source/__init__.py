"""The Spark source: ``spark.readStream.format("opendata-buffer")`` and ``spark.read``.

``progress`` reads the lag and the backlog of a query. Its module is imported when the name is first
used, because Spark imports this package whenever it looks for data sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer_source.query_progress import QueryProgress as QueryProgress
    from buffer_source.query_progress import SourceProgress as SourceProgress
    from buffer_source.query_progress import progress as progress

__all__ = ["QueryProgress", "SourceProgress", "progress"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from buffer_source import query_progress  # See the module docstring.

        return getattr(query_progress, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
