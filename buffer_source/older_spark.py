"""Streaming reads in a Spark that does not say where a micro-batch starts.

Spark 4.0 and 4.1, and Databricks before 18.1, call ``latestOffset()`` without arguments. The source
has to remember where the last planned micro-batch ended, and to answer the same end until Spark has
planned it (decision 0031).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer_source.partitions import INITIAL
from opendata_buffer.errors import InvalidInput

Json = dict[str, Any]


class UntoldStart:
    """Where the next micro-batch starts, for a Spark that calls ``latestOffset()`` without it.

    It starts where the last planned one ended. Until Spark has planned an end, it gets the same one
    again: what it wrote into its log is the answer that it received last.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._start: Json = dict(INITIAL)
        self._end: Json | None = None

    def latest(self, end_of: Callable[[Json], Json]) -> Json:
        """Return the end of the next micro-batch; ``end_of`` finds it for a start."""
        self.is_used = True
        if self._end is None or self._end == self._start:
            self._end = end_of(self._start)
        return self._end

    def planned(self, start: Json, end: Json) -> None:
        """Note that Spark plans a micro-batch from ``start`` to ``end``.

        Raises:
            InvalidInput: Spark got another answer for its end, so batches might be repeated or
                skipped. Spark has not logged that answer yet, since a restart plans first.
        """
        if self._end is not None and (start, end) != (self._start, self._end):
            raise InvalidInput(
                f"Spark plans a micro-batch from {start} to {end}, and this source had answered "
                f"{self._end} for the start {self._start}. Nothing was read. Spark 4.0, 4.1 and "
                "Databricks before 18.1 do not tell a source where to start: leave the setting "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled off, and start the query "
                "again"
            )
        self._start, self._end = end, None
