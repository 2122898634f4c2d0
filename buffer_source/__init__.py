"""The Spark source: ``spark.readStream.format("opendata-buffer")`` and ``spark.read``.

``progress`` reads the lag and the backlog of a query, and ``fresh`` a table together with the log
that it is loaded from. Their modules are imported when the names are first used, because Spark
imports this package whenever it looks for data sources.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer_source.fresh_table import fresh as fresh
    from buffer_source.query_progress import QueryProgress as QueryProgress
    from buffer_source.query_progress import SourceProgress as SourceProgress
    from buffer_source.query_progress import progress as progress

_MODULES = {
    "QueryProgress": "query_progress",
    "SourceProgress": "query_progress",
    "fresh": "fresh_table",
    "progress": "query_progress",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # See the module docstring.
        return getattr(import_module(f"buffer_source.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
