"""Metrics: OpenData's instrument names through the OpenTelemetry metrics API.

Nothing is measured until the application installs a ``MeterProvider``; it may do so before or
after this module is imported. Call sites name the instrument and nothing else::

    metrics.manifest_writes.add(1, {"role": "producer"})
    metrics.flush_duration_seconds.record(seconds)
    metrics.queue_length.set(manifest.entry_count, {"queue": "s3://bucket/ingest/manifest"})
    metrics.consumer_lag_seconds.watch(consumer, Consumer.lag_seconds, {"queue": ...})

A gauge that is watched is computed when a reader collects: it goes on rising while a consumer
stalls, and ends with its owner.

The instruments are those of :data:`TABLE`; units are in the names or in UCUM braces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar
from weakref import ref

from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation, get_meter
from opentelemetry.metrics import _Gauge as Gauge  # the API's own name is still provisional

__all__ = [
    "TABLE",
    "Metric",
    "WatchedGauge",
    "acks",
    "batches_collected",
    "batches_flushed",
    "batches_quarantined",
    "broker_clients",
    "broker_commits",
    "broker_entries_appended",
    "broker_waiting_entries",
    "bytes_collected",
    "bytes_flushed",
    "bytes_written",
    "claims_held",
    "claims_lapsed",
    "conflict_rate",
    "consumer_lag_seconds",
    "descriptors_handed_out",
    "entries_collected",
    "entries_flushed",
    "fetch_duration_seconds",
    "flush_duration_seconds",
    "gc_clock_difference_seconds",
    "gc_cycles_held",
    "gc_duration_seconds",
    "gc_files_deleted",
    "gc_files_failed",
    "manifest_conflicts",
    "manifest_writes",
    "oldest_unacked_seconds",
    "producer_buffered_bytes",
    "queue_label",
    "queue_length",
    "records_dropped",
    "records_malformed",
    "repeats_dropped",
    "write_repeats_dropped",
]

METER_NAME = "opendata_buffer"
PREFIX = "buffer."

# The SDK's default buckets start at 5 and are meant for milliseconds; these are seconds.
SECONDS_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: Full name, ``buffer.`` included.
        kind: ``counter`` only grows, ``gauge`` is the last value, ``histogram`` a distribution.
        unit: UCUM unit: ``By`` bytes, ``s`` seconds, ``{batch}`` a count of batches.
        labels: Names of the attributes every measurement carries.
        meaning: What is counted, and when.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str


_ROLE = ("role",)
_QUEUE = ("queue",)

Owner = TypeVar("Owner")


def queue_label(url: str, manifest_path: str) -> str:
    """The value of the ``queue`` attribute: where the manifest is.

    Args:
        url: Of the store, as :attr:`.Store.url` gives it: without credentials.
        manifest_path: The manifest's key.
    """
    root = url.partition("?")[0]
    return root + ("" if root.endswith("/") else "/") + manifest_path


class WatchedGauge:
    """A gauge that is computed when a reader collects, from whoever is there to be asked."""

    def __init__(self, name: str, unit: str, meaning: str) -> None:
        # Weak: what is dropped without being closed must not be kept, nor reported for ever. A
        # plain dictionary, and each use of it one step: it needs no lock that an interrupted
        # thread could leave locked.
        self._owners: dict[int, Callable[[], Observation | None]] = {}
        _meter.create_observable_gauge(name, [self._observe], unit, meaning)

    def watch(
        self, owner: Owner, value: Callable[[Owner], float | None], labels: Mapping[str, str]
    ) -> None:
        """Ask for ``value(owner)`` from now on, in the reader's thread; None is no measurement."""
        key = id(owner)
        alive = ref(owner, lambda _: self._owners.pop(key, None))

        def ask() -> Observation | None:
            found = alive()
            measured = None if found is None else value(found)
            return None if measured is None else Observation(measured, labels)

        self._owners[key] = ask

    def unwatch(self, owner: object) -> None:
        """Ask no more. Free to repeat."""
        self._owners.pop(id(owner), None)

    def _observe(self, options: CallbackOptions) -> Iterable[Observation]:
        for ask in list(self._owners.values()):
            measured = ask()
            if measured is not None:
                yield measured


def _row(name: str, kind: Kind, unit: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(PREFIX + name, kind, unit, labels, meaning)


TABLE: tuple[Metric, ...] = (
    # Producer
    _row("batches_flushed", "counter", "{batch}", (), "Batches made durable: uploaded, enqueued."),
    _row("entries_flushed", "counter", "{entry}", (), "Records in the batches made durable."),
    _row("bytes_flushed", "counter", "By", (), "Bytes of those records, before compression."),
    _row("bytes_written", "counter", "By", (), "Bytes of batch objects uploaded, footer included."),
    _row(
        "flush_duration_seconds",
        "histogram",
        "s",
        (),
        "Uploading one batch object, retries included.",
    ),
    _row(
        "producer_buffered_bytes",
        "gauge",
        "By",
        _QUEUE,
        "Bytes of max_buffered_bytes taken by what is not durable yet, now.",
    ),
    # Manifest, by the role that writes it: producer, consumer, ...
    _row("manifest_writes", "counter", "{write}", _ROLE, "Attempts to write the manifest."),
    _row("manifest_conflicts", "counter", "{conflict}", _ROLE, "Attempts that lost a race."),
    _row(
        "conflict_rate",
        "gauge",
        "1",
        _QUEUE + _ROLE,
        "Share of the last 100 attempts that lost a race, 0 to 1.",
    ),
    # Consumer
    _row("batches_collected", "counter", "{batch}", (), "Batches fetched and decoded."),
    _row("entries_collected", "counter", "{entry}", (), "Records in the batches fetched."),
    _row("bytes_collected", "counter", "By", (), "Bytes of batch objects fetched."),
    _row(
        "fetch_duration_seconds",
        "histogram",
        "s",
        (),
        "Fetching one batch; with its decoding where one call does both.",
    ),
    _row("descriptors_handed_out", "counter", "{descriptor}", (), "Queue entries handed out."),
    _row("acks", "counter", "{ack}", (), "Batches acknowledged."),
    _row(
        "consumer_lag_seconds",
        "gauge",
        "s",
        _QUEUE,
        "Age of the oldest batch queued and not acknowledged, now, of those that the consumer has "
        "seen in the manifest; 0 if none.",
    ),
    _row(
        "oldest_unacked_seconds",
        "gauge",
        "s",
        _QUEUE,
        "Age of the oldest batch handed out and not acknowledged, now; 0 if none.",
    ),
    _row(
        "queue_length",
        "gauge",
        "{batch}",
        _QUEUE,
        "Queued batches when the manifest was last read.",
    ),
    _row(
        "batches_quarantined",
        "counter",
        "{batch}",
        (),
        "Batches that could not be delivered and were copied to the quarantine.",
    ),
    _row(
        "repeats_dropped",
        "counter",
        "{batch}",
        (),
        "Batches left out by a reader because their writer had repeated a transaction.",
    ),
    _row(
        "records_malformed",
        "counter",
        "{record}",
        (),
        "Records read into columns that are not what the schema says, dropped ones included.",
    ),
    _row(
        "records_dropped",
        "counter",
        "{record}",
        (),
        "Malformed records that were left out, because mode is DROPMALFORMED.",
    ),
    # Garbage collector
    _row("gc_files_deleted", "counter", "{file}", (), "Batch objects the collector deleted."),
    _row(
        "gc_files_failed",
        "counter",
        "{file}",
        (),
        "Deletions that failed; the next cycle retries.",
    ),
    _row("gc_duration_seconds", "histogram", "s", (), "One cycle of the collector."),
    _row(
        "gc_cycles_held",
        "counter",
        "{cycle}",
        (),
        "Cycles that deleted nothing because it was not safe; a warning in the log says why.",
    ),
    _row(
        "gc_clock_difference_seconds",
        "gauge",
        "s",
        _QUEUE,
        "How far the store's clock is ahead of the collector's. Far apart, nothing is deleted.",
    ),
    # Sink
    _row(
        "write_repeats_dropped",
        "counter",
        "{batch}",
        (),
        "Batches not appended because the same transaction was committed before.",
    ),
    # Broker, in the process that serves
    _row("broker_clients", "gauge", "{client}", _QUEUE, "Connections of producers and workers."),
    _row(
        "broker_waiting_entries",
        "gauge",
        "{entry}",
        _QUEUE,
        "Queue entries that wait for the broker's next write.",
    ),
    _row("broker_commits", "counter", "{commit}", (), "Groups the broker appended, a write each."),
    _row("broker_entries_appended", "counter", "{entry}", (), "Queue entries in those groups."),
    _row("claims_held", "gauge", "{batch}", _QUEUE, "Batches that workers hold."),
    _row(
        "claims_lapsed",
        "counter",
        "{claim}",
        (),
        "Claims that ended because their worker gave no sign of life; the batch is handed out "
        "again.",
    ),
)

_meter = get_meter(METER_NAME)
_rows = {row.name.removeprefix(PREFIX): row for row in TABLE}


def _counter(name: str) -> Counter:
    row = _rows[name]
    return _meter.create_counter(row.name, row.unit, row.meaning)


def _gauge(name: str) -> Gauge:
    row = _rows[name]
    return _meter.create_gauge(row.name, row.unit, row.meaning)


def _watched(name: str) -> WatchedGauge:
    row = _rows[name]
    return WatchedGauge(row.name, row.unit, row.meaning)


def _histogram(name: str) -> Histogram:
    row = _rows[name]
    return _meter.create_histogram(
        row.name, row.unit, row.meaning, explicit_bucket_boundaries_advisory=SECONDS_BUCKETS
    )


batches_flushed = _counter("batches_flushed")
entries_flushed = _counter("entries_flushed")
bytes_flushed = _counter("bytes_flushed")
bytes_written = _counter("bytes_written")
flush_duration_seconds = _histogram("flush_duration_seconds")
manifest_writes = _counter("manifest_writes")
manifest_conflicts = _counter("manifest_conflicts")
batches_collected = _counter("batches_collected")
entries_collected = _counter("entries_collected")
bytes_collected = _counter("bytes_collected")
fetch_duration_seconds = _histogram("fetch_duration_seconds")
descriptors_handed_out = _counter("descriptors_handed_out")
acks = _counter("acks")
conflict_rate = _gauge("conflict_rate")
consumer_lag_seconds = _watched("consumer_lag_seconds")
oldest_unacked_seconds = _watched("oldest_unacked_seconds")
producer_buffered_bytes = _watched("producer_buffered_bytes")
queue_length = _gauge("queue_length")
batches_quarantined = _counter("batches_quarantined")
repeats_dropped = _counter("repeats_dropped")
records_malformed = _counter("records_malformed")
records_dropped = _counter("records_dropped")
gc_files_deleted = _counter("gc_files_deleted")
gc_files_failed = _counter("gc_files_failed")
gc_duration_seconds = _histogram("gc_duration_seconds")
gc_cycles_held = _counter("gc_cycles_held")
gc_clock_difference_seconds = _gauge("gc_clock_difference_seconds")
write_repeats_dropped = _counter("write_repeats_dropped")
broker_clients = _watched("broker_clients")
broker_waiting_entries = _watched("broker_waiting_entries")
broker_commits = _counter("broker_commits")
broker_entries_appended = _counter("broker_entries_appended")
claims_held = _watched("claims_held")
claims_lapsed = _counter("claims_lapsed")
