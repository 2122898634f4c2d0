"""Values from the progress of a streaming query: lag, backlog, records and bytes.

Spark shows no metrics of Python sources. This source reports lag and backlog in the query's
progress, as JSON within JSON. :func:`progress` reads them::

    found = progress(query)
    if found is not None and found.lag_ms > 60_000:
        print(found.name, "is behind by", found.backlog_batches, "batches")

It takes a query or an event of a ``StreamingQueryListener``, and makes no request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opendata_buffer.arguments import wrong_type


@dataclass(frozen=True, kw_only=True)
class SourceProgress:
    """How far a query is with one source, after the micro-batch of a progress.

    Attributes:
        source: The URL of the store, and the key of its manifest or topic.
        backlog_batches: Batches that wait after this micro-batch.
        lag_ms: Age of the oldest record that waits, in milliseconds; 0 if none waits.
        records: Records of this micro-batch.
        batches: Batches that earlier micro-batches of this run have read.
        bytes: Stored bytes of those batches; None if the size of one of them is not known.
        dropped_repeats: Batches of this run that were left out because their writer had repeated
            them.
        missing: Batches of this run that were skipped because their objects are gone.
        retries: Requests of this run that were repeated after a transient error.
        next: The sequence that the next batch of the queue gets; for a topic by partition.
        partition_backlogs: Batches that wait, by partition of a topic; only those with a backlog.
    """

    source: str
    backlog_batches: int
    lag_ms: int
    records: int
    batches: int
    bytes: int | None
    dropped_repeats: int
    missing: int
    retries: int
    next: int | Mapping[str, int]
    partition_backlogs: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class QueryProgress:
    """How far a query is with all of its queues, topics and logs.

    Attributes:
        name: The query's name, as ``queryName`` set it; None without one.
        query_id: The id of the query, which stays the same over restarts.
        batch_id: The number of the micro-batch.
        timestamp: When the micro-batch began, as ISO 8601 text in UTC.
        sources: The sources of this format, in the order of the query.
    """

    name: str | None
    query_id: str
    batch_id: int
    timestamp: str
    sources: Sequence[SourceProgress]

    @property
    def lag_ms(self) -> int:
        """The largest lag of a source, in milliseconds; 0 if nothing waits."""
        return max((source.lag_ms for source in self.sources), default=0)

    @property
    def backlog_batches(self) -> int:
        """The batches that wait in all sources."""
        return sum(source.backlog_batches for source in self.sources)

    @property
    def records(self) -> int:
        """The records of this micro-batch, from all sources."""
        return sum(source.records for source in self.sources)


def progress(query: Any) -> QueryProgress | None:
    """Return the lag and the backlog of a streaming query, by its latest progress.

    Spark reports progress after each micro-batch, and none while a query is idle. So the values are
    as old as the last micro-batch. An idle query has read everything, and its lag and backlog are 0
    then. They do not grow while a micro-batch runs or after the query has ended: to see that, use
    ``opendata-buffer exporter``.

    Args:
        query: A ``StreamingQuery``, or a ``StreamingQueryProgress``, such as the ``progress`` of an
            event of a ``StreamingQueryListener``. Or the dict that its JSON contains.

    Returns:
        The values; None if the query has made no progress yet, or reads no source of this format.

    Raises:
        InvalidInput: The argument is something else.
    """
    found = getattr(query, "lastProgress", query)
    if found is None:
        return None
    text = getattr(found, "json", None)
    if isinstance(text, str):
        found = json.loads(text)
    if not isinstance(found, Mapping) or not isinstance(found.get("sources"), Sequence):
        raise wrong_type("query", query, "a StreamingQuery or a StreamingQueryProgress")
    sources = [
        _source(reported, int(source.get("numInputRows") or 0))
        for source in found["sources"]
        if (reported := _report_of(source)) is not None
    ]
    if not sources:
        return None
    return QueryProgress(
        name=found.get("name"),
        query_id=str(found.get("id", "")),
        batch_id=int(found.get("batchId", -1)),
        timestamp=str(found.get("timestamp", "")),
        sources=tuple(sources),
    )


def _report_of(source: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what this library reported about a source; None for a source of another format."""
    reported = source.get("latestOffset")
    if isinstance(reported, str):
        try:
            reported = json.loads(reported)
        except ValueError:
            return None
    if isinstance(reported, Mapping) and {"backlogBatches", "lagMs", "source"} <= {*reported}:
        return reported
    return None


def _source(reported: Mapping[str, Any], records: int) -> SourceProgress:
    return SourceProgress(
        source=reported["source"],
        backlog_batches=reported["backlogBatches"],
        lag_ms=reported["lagMs"],
        records=records,
        batches=reported.get("batches", 0),
        bytes=reported.get("bytes"),
        dropped_repeats=reported.get("droppedRepeats", 0),
        missing=reported.get("missing", 0),
        retries=reported.get("retries", 0),
        next=reported.get("next", 0),
        partition_backlogs=reported.get("partitionBacklogs", {}),
    )
