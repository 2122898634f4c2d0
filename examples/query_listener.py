"""Show the lag of Spark queries to Prometheus, and alert when one falls behind or ends.

Copy this file next to your job, and add three lines. It needs ``pip install prometheus-client``::

    from prometheus_client import start_http_server

    start_http_server(9466)  # http://driver:9466/metrics
    spark.streams.addListener(QueueListener(alert=page_someone, max_lag_s=60))

Spark calls a listener in the driver, after each micro-batch. It calls nothing while a micro-batch
hangs, or after the driver has died: for that, alert on the series that has vanished, or run
``opendata-buffer exporter``, which reads the queues themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from pyspark.sql.streaming import StreamingQueryListener

from buffer_source import progress

log = logging.getLogger(__name__)


class QueueListener(StreamingQueryListener):
    """Exports lag, backlog and records of each query, and alerts.

    Args:
        alert: Called with a sentence when a query falls behind, catches up, or ends. An error of it
            is logged.
        max_lag_s: A query is behind if its oldest waiting record is older, in seconds.
        registry: Where the metrics are registered.
    """

    def __init__(
        self,
        alert: Callable[[str], None] = log.warning,
        max_lag_s: float = 60.0,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"buffer_query_{name}", text, ["query"], registry=registry)

        self._alert = alert
        self._max_lag_s = max_lag_s
        self._lag = gauge("lag_seconds", "Age of the oldest record that waits")
        self._backlog = gauge("backlog_batches", "Batches that wait")
        self._running = gauge("running", "1 while the query runs, 0 after it has ended")
        self._records = Counter(
            "buffer_query_records", "Records that were read", ["query"], registry=registry
        )
        self._names: dict[str, str] = {}
        self._behind: set[str] = set()

    def onQueryStarted(self, event: Any) -> None:
        """Note the name of a query; without one, its id."""
        name = self._names[str(event.runId)] = event.name or str(event.id)
        self._running.labels(name).set(1)

    def onQueryProgress(self, event: Any) -> None:
        """Export the values of a micro-batch."""
        found = progress(event.progress)
        if found is not None:
            name = found.name or found.query_id
            self._records.labels(name).inc(found.records)
            self._note(name, found.backlog_batches, found.lag_ms / 1000)

    def onQueryIdle(self, event: Any) -> None:
        """Note that a query found nothing to read: it is not behind."""
        name = self._names.get(str(event.runId))
        if name is not None:
            self._note(name, 0, 0.0)

    def onQueryTerminated(self, event: Any) -> None:
        """Alert on the end of a query, with the library's message if it has one."""
        name = self._names.pop(str(event.runId), str(event.id))
        self._running.labels(name).set(0)
        if event.exception is None:
            self._tell(f"query {name} was stopped")
        else:
            self._tell(f"query {name} has failed: {reason(event.exception)}")

    def _note(self, name: str, backlog: int, lag_s: float) -> None:
        self._lag.labels(name).set(lag_s)
        self._backlog.labels(name).set(backlog)
        if lag_s > self._max_lag_s and name not in self._behind:
            self._behind.add(name)
            self._tell(f"query {name} is {lag_s:.0f} s behind: {backlog} batches wait")
        elif lag_s <= self._max_lag_s and name in self._behind:
            self._behind.discard(name)
            self._tell(f"query {name} has caught up")

    def _tell(self, text: str) -> None:
        try:
            self._alert(text)
        except Exception:  # Spark would only log it, without the text.
            log.exception("no alert was sent: %s", text)


def reason(exception: str) -> str:
    """Return the message of opendata-buffer in the text of a failed query, or its first line.

    Spark puts stack traces around the message, which is always one line.
    """
    lines = exception.splitlines() or [""]
    return next((line for line in lines if line.startswith("opendata_buffer.errors.")), lines[0])
