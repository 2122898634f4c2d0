"""Streaming reads in a Spark that does not pass the start of a micro-batch.

Spark 4.0 and 4.1, and Databricks before 18.1, call ``latestOffset()`` without arguments. So the
source has to remember where the last planned micro-batch ended. And until Spark has planned an end
that it was given, the source has to answer with the same end (decision 0031).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from buffer_source.partitions import INITIAL
from opendata_buffer.errors import InvalidInput

Json = dict[str, Any]


class UntoldStart:
    """The start of the next micro-batch, for a Spark that calls ``latestOffset()`` without it.

    A micro-batch starts where the last planned one ended. Until Spark has planned an end, it gets
    the same end again, because Spark logs the last answer that it received.
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

        Args:
            start: Where the micro-batch starts.
            end: Where it ends.

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
