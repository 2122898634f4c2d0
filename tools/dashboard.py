"""The Grafana dashboard as a program: ``python -m tools.dashboard`` writes its JSON.

A panel takes one line here, and forty in the file. ``tests/monitoring`` checks that the file is up
to date, and evaluates each expression in a real Prometheus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).parents[1] / "docs/operations/monitoring/grafana-dashboard.json"

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'job=~"$job"'
QUEUE = f'{CHOSEN}, queue=~"$queue"'
WIDTH = 24
"""Columns of Grafana's grid."""


@dataclass(frozen=True)
class Line:
    """One expression, with the template for the names of its lines."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: The measured value.
        why: The meaning of the value, and advice; shown at the title.
        lines: The expressions to draw.
        unit: Grafana's name of the unit.
        kind: ``timeseries``, or ``stat`` for the last value.
        width: Columns.
        steps: The values where the panel turns yellow, and red.
    """

    title: str
    why: str
    lines: tuple[Line, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    steps: tuple[float, float] | None = None


def rate(metric: str, by: str = "job", labels: str = CHOSEN) -> str:
    """Return the growth of a counter per second."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def grown(metric: str) -> str:
    """Return the growth of a counter in the displayed time range."""
    return f"sum by (job) (increase({metric}{{{CHOSEN}}}[$__range]))"


def either(metric: str, suffix: str, labels: str) -> str:
    """Return a metric, with or without the unit that some exporters add to its name."""
    stem, _, total = metric.partition("@")
    return f'{{__name__=~"{stem}({suffix})?{total}", {labels}}}'


def quantile(share: float, metric: str) -> str:
    """Return a quantile of a histogram, over all processes of a job."""
    buckets = f"rate({metric}_bucket{{{CHOSEN}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (job, le) ({buckets}))"


def gauge_of_reader(metric: str) -> str:
    """Return the largest value that any process of a job reports for a reader."""
    return f"max by (queue, reader) ({metric}{{{QUEUE}}})"


def gauge(metric: str, labels: str = QUEUE) -> str:
    """Return the largest value that any process of a job reports for a queue."""
    return f"max by (queue) ({metric}{{{labels}}})"


WRITTEN = either("buffer_bytes_written@_total", "_bytes", CHOSEN)
FLUSHED = either("buffer_bytes_flushed@_total", "_bytes", CHOSEN)
COLLECTED = either("buffer_bytes_collected@_total", "_bytes", CHOSEN)
CONFLICTS = either("buffer_conflict_rate@", "_ratio", QUEUE)
SIZE = either("buffer_manifest_share@", "_ratio", QUEUE)
STORED = either("buffer_stored@", "_bytes", QUEUE)


def per_second(selector: str) -> str:
    """Return the growth per second of a selector, summed like :func:`rate`."""
    return f"sum by (job) (rate({selector}[$__rate_interval]))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel(
            "Lag",
            "Age of the oldest queued batch that is not acknowledged. It rises while no consumer "
            "reads, or while it is too slow.",
            (Line(gauge("buffer_consumer_lag_seconds"), "{{queue}}"),),
            unit="s",
            kind="stat",
            width=6,
            steps=(60, 300),
        ),
        Panel(
            "Backlog",
            "Queued batches. Thousands make appends slow, because each append copies the manifest.",
            (Line(gauge("buffer_queue_length"), "{{queue}}"),),
            kind="stat",
            width=6,
            steps=(1_000, 10_000),
        ),
        Panel(
            "Records in",
            "Records made durable per second by all reporting processes.",
            (Line(rate("buffer_entries_flushed_total"), "{{job}}"),),
            unit="cps",
            kind="stat",
            width=6,
        ),
        Panel(
            "Quarantined",
            "Unreadable batches that were quarantined in the displayed time. Run opendata-buffer "
            "status to list them.",
            (Line(grown("buffer_batches_quarantined_total"), "{{job}}"),),
            kind="stat",
            width=6,
            steps=(1, 10),
        ),
    ),
    "Store, as the exporter reads it": (
        Panel(
            "Exporter",
            "1: the exporter could read the store. 0: it could not, and its log says why. Time "
            "since the last success, and the duration of a read.",
            (
                Line(f"min by (store) (buffer_exporter_up{{{CHOSEN}}})", "up {{store}}"),
                Line(
                    "time() - max by (store) "
                    f"(buffer_exporter_last_success_timestamp_seconds{{{CHOSEN}}})",
                    "seconds since success {{store}}",
                ),
                Line(
                    f"max by (store) (buffer_exporter_read_seconds{{{CHOSEN}}})",
                    "seconds for a read {{store}}",
                ),
            ),
        ),
        Panel(
            "Batches appended",
            "Batches that all producers appended, per second, also those without metrics. Epochs: "
            "new consumers in the time shown. Many of them fence each other.",
            (
                Line(
                    f"sum by (store) (rate(buffer_next_sequence{{{QUEUE}}}[$__rate_interval]))",
                    "{{store}}",
                ),
                Line(
                    f"sum by (queue) (delta(buffer_epoch{{{QUEUE}}}[$__range]))", "epochs {{queue}}"
                ),
            ),
            unit="cps",
        ),
        Panel(
            "Not normal",
            "Queues that refuse producers or consumers, batches in quarantine, partitions that "
            "leave their topic, open transactions, readers for which no consumer runs, and v1 "
            "consumers whose queue is not fed any more.",
            (
                Line(gauge("buffer_queue_refused"), "refused {{queue}}"),
                Line(gauge("buffer_quarantined"), "quarantined {{queue}}"),
                Line(
                    f"sum by (store) (buffer_partition_draining{{{QUEUE}}})", "draining {{store}}"
                ),
                Line(gauge("buffer_transactions_open"), "transactions {{queue}}"),
                Line(
                    f"count by (queue, reader) (buffer_reader_runs{{{QUEUE}}} == 0)",
                    "does not run: {{reader}} {{queue}}",
                ),
                Line(
                    gauge_of_reader("buffer_reader_feeding_stopped"),
                    "not fed: {{reader}} {{queue}}",
                ),
            ),
        ),
        Panel(
            "Oldest transaction",
            "Age of the oldest open transaction. Nothing after its first batch leaves the queue.",
            (Line(gauge("buffer_oldest_transaction_seconds"), "{{queue}}"),),
            unit="s",
            width=12,
        ),
        Panel(
            "Manifest",
            "Size of the manifest. Each append copies it.",
            (Line(gauge("buffer_manifest_bytes"), "{{queue}}"),),
            unit="bytes",
            width=12,
        ),
    ),
    "Flow": (
        Panel(
            "Records",
            "In: records made durable by producers. Out: records fetched and decoded by consumers.",
            (
                Line(rate("buffer_entries_flushed_total"), "in {{job}}"),
                Line(rate("buffer_entries_collected_total"), "out {{job}}"),
            ),
            unit="cps",
        ),
        Panel(
            "Bytes",
            "Size of records before compression, and of stored objects.",
            (
                Line(per_second(FLUSHED), "records in {{job}}"),
                Line(per_second(WRITTEN), "objects in {{job}}"),
                Line(per_second(COLLECTED), "objects out {{job}}"),
            ),
            unit="Bps",
        ),
        Panel(
            "Batches",
            "Small batches cost requests. If there are many, raise the flush interval.",
            (
                Line(rate("buffer_batches_flushed_total"), "in {{job}}"),
                Line(rate("buffer_batches_collected_total"), "out {{job}}"),
                Line(rate("buffer_acks_total"), "acknowledged {{job}}"),
            ),
            unit="cps",
        ),
    ),
    "Consumer": (
        Panel(
            "Lag and unacknowledged batches",
            "Lag: age of the oldest queued batch. In hand: age of the oldest batch that a consumer "
            "has received but not acknowledged. If both are high, processing is slow or stuck. If "
            "only the lag is high, reading is.",
            (
                Line(gauge("buffer_consumer_lag_seconds"), "lag {{queue}}"),
                Line(gauge("buffer_oldest_unacked_seconds"), "in hand {{queue}}"),
            ),
            unit="s",
        ),
        Panel(
            "Backlog",
            "Queued batches when the manifest was last read.",
            (Line(gauge("buffer_queue_length"), "{{queue}}"),),
        ),
        Panel(
            "Fetching a batch",
            "Time to fetch a batch, including retries, and decoding if one call does both.",
            (
                Line(quantile(0.5, "buffer_fetch_duration_seconds"), "median {{job}}"),
                Line(quantile(0.99, "buffer_fetch_duration_seconds"), "99 % {{job}}"),
            ),
            unit="s",
        ),
        Panel(
            "Readers: batches behind",
            "Batches of a log that a reader has not acknowledged, at the collector's last cycle.",
            (Line(gauge_of_reader("buffer_reader_lag"), "{{reader}} {{queue}}"),),
        ),
        Panel(
            "v1 consumers: batches not fed",
            "Batches of a log that are not in the queue of a v1 consumer yet.",
            (Line(gauge_of_reader("buffer_reader_unfed"), "{{reader}} {{queue}}"),),
        ),
        Panel(
            "Readers: time behind",
            "Age of the oldest batch that a reader has not acknowledged.",
            (Line(gauge_of_reader("buffer_reader_lag_seconds"), "{{reader}} {{queue}}"),),
            unit="s",
        ),
        Panel(
            "Readers: time to expiry",
            "Time until the log no longer keeps batches for a reader. It falls while the reader "
            "does not run.",
            (Line(gauge_of_reader("buffer_reader_expires_seconds"), "{{reader}} {{queue}}"),),
            unit="s",
        ),
    ),
    "Producer": (
        Panel(
            "Uploading a batch",
            "Time to upload a batch, including retries. It is high if the store is slow or batches "
            "are large.",
            (
                Line(quantile(0.5, "buffer_flush_duration_seconds"), "median {{job}}"),
                Line(quantile(0.99, "buffer_flush_duration_seconds"), "99 % {{job}}"),
            ),
            unit="s",
        ),
        Panel(
            "Not durable yet",
            "Bytes in the buffers of producers. At max_buffered_bytes, 256 MiB by default, "
            "produce() blocks.",
            (Line(gauge("buffer_producer_buffered_bytes"), "{{queue}}"),),
            unit="bytes",
        ),
        Panel(
            "Dropped records",
            "Repeats: a transaction arrived twice. Restarts cause some. Without restarts, two "
            "writers share an app id. Malformed: records that do not match the schema.",
            (
                Line(rate("buffer_repeats_dropped_total"), "repeats, by readers {{job}}"),
                Line(rate("buffer_write_repeats_dropped_total"), "repeats, by sinks {{job}}"),
                Line(rate("buffer_records_malformed_total"), "malformed {{job}}"),
                Line(rate("buffer_records_dropped_total"), "malformed and dropped {{job}}"),
            ),
            unit="cps",
        ),
    ),
    "Manifest": (
        Panel(
            "Writes",
            "Attempts to write the manifest by role, and attempts that lost a race.",
            (
                Line(rate("buffer_manifest_writes_total", "role"), "{{role}}"),
                Line(rate("buffer_manifest_conflicts_total", "role"), "{{role}}, lost"),
            ),
            unit="cps",
        ),
        Panel(
            "Lost races, and size",
            "Share of the last 100 attempts that lost a race. Above one half, let a broker append "
            "for all processes. Size: the manifest's share of its limit. At 100 %, appends are "
            "refused.",
            (
                Line(f"max by (queue, role) ({CONFLICTS})", "{{role}} {{queue}}"),
                Line(f"max by (queue) ({SIZE})", "size {{queue}}"),
            ),
            unit="percentunit",
        ),
        Panel(
            "Stored",
            "Size of the objects below each prefix, including those that are not collected yet.",
            (Line(f"max by (queue) ({STORED})", "{{queue}}"),),
            unit="bytes",
        ),
        Panel(
            "Handed out",
            "Queue entries handed to consumers and workers.",
            (Line(rate("buffer_descriptors_handed_out_total"), "{{job}}"),),
            unit="cps",
        ),
    ),
    "Garbage collector": (
        Panel(
            "Deleted and failed",
            "Failed deletes are retried. If they keep failing, the role may lack the permission.",
            (
                Line(rate("buffer_gc_files_deleted_total"), "deleted {{job}}"),
                Line(rate("buffer_gc_files_failed_total"), "failed {{job}}"),
            ),
            unit="cps",
        ),
        Panel(
            "Cycles",
            "Duration of a cycle, and cycles that deleted nothing because it was not safe.",
            (
                Line(quantile(0.99, "buffer_gc_duration_seconds"), "99 % {{job}}"),
                Line(grown("buffer_gc_cycles_held_total"), "held in the time shown {{job}}"),
            ),
            unit="s",
        ),
        Panel(
            "Clock difference",
            "How far the store's clock is ahead of the collector's. If they are far apart, nothing "
            "is deleted.",
            (Line(gauge("buffer_gc_clock_difference_seconds"), "{{queue}}"),),
            unit="s",
        ),
    ),
    "Broker and workers": (
        Panel(
            "Clients and waiting entries",
            "Connections of producers and workers, and entries that wait for the next write.",
            (
                Line(gauge("buffer_broker_clients"), "clients {{queue}}"),
                Line(gauge("buffer_broker_waiting_entries"), "entries wait {{queue}}"),
            ),
        ),
        Panel(
            "Groups",
            "Writes of the broker per second, and entries per write.",
            (
                Line(rate("buffer_broker_commits_total"), "writes {{job}}"),
                Line(
                    f"{rate('buffer_broker_entries_appended_total')} / "
                    f"{rate('buffer_broker_commits_total')}",
                    "entries in each {{job}}",
                ),
            ),
        ),
        Panel(
            "Claims",
            "Batches that workers hold, and claims that lapsed because their worker sent no "
            "heartbeat.",
            (
                Line(gauge("buffer_claims_held"), "held {{queue}}"),
                Line(grown("buffer_claims_lapsed_total"), "lapsed in the time shown {{job}}"),
            ),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_row(len(panels) + 1, title, top))
        top += 1
        height = 4 if row[0].kind == "stat" else 8
        left = 0
        for panel in row:
            place = {"h": height, "w": panel.width, "x": left, "y": top}
            panels.append(_panel(len(panels) + 1, panel, place))
            left += panel.width
        top += height
    return {
        "uid": "opendata-buffer",
        "title": "opendata-buffer",
        "description": "Queues in object storage: lag, flow, producers, consumers, collector.",
        "tags": ["opendata-buffer"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    def values_of(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "type": "query",
            "name": name,
            "label": label,
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Prometheus",
            "query": "prometheus",
            "current": {},
        },
        values_of("job", "Job", 'label_values({__name__=~"buffer_.+"}, job)'),
        values_of("queue", "Queue", f"label_values(buffer_queue_length{{{CHOSEN}}}, queue)"),
    ]


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
    return {
        "type": "row",
        "id": number,
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": line.expr,
            "legendFormat": line.legend,
            "range": True,
        }
        for index, line in enumerate(panel.lines)
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "noValue": "none"}
    if panel.title == "Clock difference":
        del defaults["min"]
    if panel.steps is not None:
        yellow, red = panel.steps
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {
            "mode": "absolute",
            "steps": [
                {"value": None, "color": "green"},
                {"value": yellow, "color": "yellow"},
                {"value": red, "color": "red"},
            ],
        }
    if panel.kind == "stat":
        options: dict[str, Any] = {
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False, "fields": ""},
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "textMode": "auto",
            "orientation": "auto",
        }
    else:
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 10,
            "showPoints": "never",
            "spanNulls": False,
        }
        options = {
            "legend": {
                "displayMode": "list",
                "placement": "bottom",
                "showLegend": True,
                "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "description": panel.why,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def text() -> str:
    """Return the content of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
