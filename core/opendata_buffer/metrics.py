"""Metrics: OpenData's instrument names through the OpenTelemetry metrics API.

Nothing is measured until the application installs a ``MeterProvider``, before or after it imports
this module. A watched gauge is computed when a metric reader collects, so it continues to rise
while a consumer stalls, and ends with its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar
from weakref import ref

from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation, get_meter
from opentelemetry.metrics import _Gauge as Gauge  # the API's own name is still provisional

PREFIX = "buffer."

# The SDK's default buckets start at 5 and are meant for milliseconds; these are seconds.
SECONDS_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str  # ``buffer.`` included
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # UCUM: ``By`` bytes, ``s`` seconds, ``{batch}`` a count of batches
    labels: tuple[str, ...]  # the attributes of every measurement
    meaning: str  # description of the measured value, and when it is measured


_ROLE = ("role",)
_QUEUE = ("queue",)

TABLE: list[Metric] = []  # all instruments, in the order of the reference

EXPORTED: dict[str, Metric] = {}
"""The gauges of ``opendata-buffer exporter`` by name, without ``buffer.``. The command reads the
store itself, so no program has to run. A gauge that :data:`TABLE` has too has the same meaning.
All have the label ``store``, and those of a queue ``queue`` and, in a topic, ``partition``."""

_meter = get_meter("opendata_buffer")

Owner = TypeVar("Owner")


def queue_label(url: str, manifest_path: str) -> str:
    """Return the value of the ``queue`` attribute: the manifest's URL in a store with this URL."""
    root = url.partition("?")[0]
    return root + ("" if root.endswith("/") else "/") + manifest_path


class WatchedGauge:
    """A gauge that is computed for each watched owner when a metric reader collects."""

    def __init__(self, name: str, unit: str, meaning: str) -> None:
        # Weak references, so that an owner that is dropped without being closed is neither kept
        # alive nor reported forever. Each use of the dictionary is one step and needs no lock.
        self._owners: dict[int, Callable[[], Observation | None]] = {}
        _meter.create_observable_gauge(name, [self._observe], unit, meaning)

    def watch(
        self, owner: Owner, value: Callable[[Owner], float | None], labels: Mapping[str, str]
    ) -> None:
        """Report ``value(owner)`` whenever a metric reader collects; None reports nothing.

        Args:
            owner: Kept by a weak reference; the gauge ends with it.
            value: Called in the metric reader's thread.
            labels: Attributes of the measurement.
        """
        key = id(owner)
        alive = ref(owner, lambda _: self._owners.pop(key, None))

        def ask() -> Observation | None:
            found = alive()
            measured = None if found is None else value(found)
            return None if measured is None else Observation(measured, labels)

        self._owners[key] = ask

    def unwatch(self, owner: object) -> None:
        """Stop reporting for an owner. May be called again."""
        self._owners.pop(id(owner), None)

    def _observe(self, options: CallbackOptions) -> Iterable[Observation]:
        for ask in list(self._owners.values()):
            measured = ask()
            if measured is not None:
                yield measured


def _counter(name: str, unit: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
    TABLE.append(Metric(PREFIX + name, "counter", unit, labels, meaning))
    return _meter.create_counter(PREFIX + name, unit, meaning)


def _gauge(name: str, unit: str, meaning: str, labels: tuple[str, ...] = _QUEUE) -> Gauge:
    TABLE.append(Metric(PREFIX + name, "gauge", unit, labels, meaning))
    return _meter.create_gauge(PREFIX + name, unit, meaning)


def _watched(name: str, unit: str, meaning: str) -> WatchedGauge:
    TABLE.append(Metric(PREFIX + name, "gauge", unit, _QUEUE, meaning))
    return WatchedGauge(PREFIX + name, unit, meaning)


def _histogram(name: str, meaning: str) -> Histogram:
    TABLE.append(Metric(PREFIX + name, "histogram", "s", (), meaning))
    return _meter.create_histogram(
        PREFIX + name, "s", meaning, explicit_bucket_boundaries_advisory=SECONDS_BUCKETS
    )


# Producer
batches_flushed = _counter(
    "batches_flushed", "{batch}", "Batches made durable: uploaded, enqueued."
)
entries_flushed = _counter("entries_flushed", "{entry}", "Records in the batches made durable.")
bytes_flushed = _counter("bytes_flushed", "By", "Bytes of those records, before compression.")
bytes_written = _counter("bytes_written", "By", "Bytes of batch objects uploaded, footer included.")
flush_duration_seconds = _histogram(
    "flush_duration_seconds", "Uploading one batch object, retries included."
)
producer_buffered_bytes = _watched(
    "producer_buffered_bytes",
    "By",
    "Bytes of max_buffered_bytes taken by what is not durable yet, now.",
)

# Manifest, by the role that writes it: producer, consumer, ...
manifest_writes = _counter("manifest_writes", "{write}", "Attempts to write the manifest.", _ROLE)
manifest_conflicts = _counter(
    "manifest_conflicts", "{conflict}", "Attempts that lost a race.", _ROLE
)
conflict_rate = _gauge(
    "conflict_rate", "1", "Share of the last 100 attempts that lost a race, 0 to 1.", _QUEUE + _ROLE
)

manifest_share = _gauge(
    "manifest_share",
    "1",
    "Size of the manifest at the last append, as a share of max_manifest_bytes. At 1 appends are "
    "refused.",
)

# Consumer
batches_collected = _counter("batches_collected", "{batch}", "Batches fetched and decoded.")
entries_collected = _counter("entries_collected", "{entry}", "Records in the batches fetched.")
bytes_collected = _counter("bytes_collected", "By", "Bytes of batch objects fetched.")
fetch_duration_seconds = _histogram(
    "fetch_duration_seconds", "Fetching one batch; with its decoding where one call does both."
)
descriptors_handed_out = _counter(
    "descriptors_handed_out", "{descriptor}", "Queue entries handed out."
)
acks = _counter("acks", "{ack}", "Batches acknowledged.")
consumer_lag_seconds = _watched(
    "consumer_lag_seconds",
    "s",
    "Age of the oldest batch queued and not acknowledged, now, of those that the consumer has "
    "seen in the manifest; 0 if none.",
)
oldest_unacked_seconds = _watched(
    "oldest_unacked_seconds",
    "s",
    "Age of the oldest batch handed out and not acknowledged, now; 0 if none.",
)
queue_length = _gauge("queue_length", "{batch}", "Queued batches when the manifest was last read.")
reader_lag = _gauge(
    "reader_lag",
    "{batch}",
    "Batches of a log that a reader has not acknowledged, at the collector's last cycle.",
    (*_QUEUE, "reader"),
)
reader_lag_seconds = _gauge(
    "reader_lag_seconds",
    "s",
    "Age of the oldest batch that a reader has not acknowledged, at the collector's last cycle; 0 "
    "if none.",
    (*_QUEUE, "reader"),
)
reader_expires_seconds = _gauge(
    "reader_expires_seconds",
    "s",
    "How long a reader may stay away until it holds nothing, at the collector's last cycle.",
    (*_QUEUE, "reader"),
)
batches_quarantined = _counter(
    "batches_quarantined",
    "{batch}",
    "Batches that could not be delivered and were copied to the quarantine.",
)
repeats_dropped = _counter(
    "repeats_dropped",
    "{batch}",
    "Queue entries left out by a reader because their writer had repeated an append or a "
    "transaction.",
)
records_malformed = _counter(
    "records_malformed",
    "{record}",
    "Records read into columns that do not fit the schema, dropped ones included.",
)
records_dropped = _counter(
    "records_dropped",
    "{record}",
    "Malformed records that were left out, because mode is DROPMALFORMED.",
)

# Garbage collector
gc_files_deleted = _counter("gc_files_deleted", "{file}", "Batch objects the collector deleted.")
gc_files_failed = _counter(
    "gc_files_failed", "{file}", "Deletions that failed; the next cycle retries."
)
gc_duration_seconds = _histogram("gc_duration_seconds", "One cycle of the collector.")
stored_bytes = _gauge(
    "stored_bytes", "By", "Objects below the prefix after the collector's last whole cycle."
)
gc_cycles_held = _counter(
    "gc_cycles_held",
    "{cycle}",
    "Cycles that deleted nothing because it was not safe; a warning in the log says why.",
)
gc_clock_difference_seconds = _gauge(
    "gc_clock_difference_seconds",
    "s",
    "How far the store's clock is ahead of the collector's. Far apart, nothing is deleted.",
)

# Sink
write_repeats_dropped = _counter(
    "write_repeats_dropped",
    "{batch}",
    "Batches not appended because the same transaction was committed before.",
)

# Broker, in the process that serves
broker_clients = _watched("broker_clients", "{client}", "Connections of producers and workers.")
broker_waiting_entries = _watched(
    "broker_waiting_entries", "{entry}", "Queue entries that wait for the broker's next write."
)
broker_commits = _counter("broker_commits", "{commit}", "Groups the broker appended, a write each.")
broker_entries_appended = _counter(
    "broker_entries_appended", "{entry}", "Queue entries in those groups."
)
claims_held = _watched("claims_held", "{batch}", "Batches that workers hold.")
claims_lapsed = _counter(
    "claims_lapsed",
    "{claim}",
    "Claims that ended because their worker sent no heartbeat; the batch is handed out again.",
)


_STORE = ("store",)
_OF_QUEUE = ("store", "queue", "partition")
_OF_READER = (*_OF_QUEUE, "reader")


def _exported(name: str, unit: str, meaning: str, labels: tuple[str, ...] = _OF_QUEUE) -> None:
    EXPORTED[name] = Metric(PREFIX + name, "gauge", unit, labels, meaning)


# The exporter
_exported("exporter_up", "1", "1 if the last read of the store succeeded in time, else 0.", _STORE)
_exported(
    "exporter_last_success_timestamp_seconds", "s", "When a read succeeded last, Unix time.", _STORE
)
_exported("exporter_read_seconds", "s", "How long the last read took.", _STORE)
_exported(
    "queue_length",
    "{batch}",
    "Batches that wait; in a log, for the reader that is furthest behind.",
)
_exported("consumer_lag_seconds", "s", "Age of the oldest batch that waits; 0 if none waits.")
_exported("next_sequence", "1", "The sequence that the next batch gets.")
_exported("epoch", "1", "How often a consumer has claimed the queue.")
_exported("manifest_bytes", "By", "Size of the manifest.")
_exported(
    "manifest_share",
    "1",
    "Size of the manifest as a share of the size beyond which appends are refused.",
)
_exported("queue_refused", "1", "1 if producers, consumers or workers are refused, else 0.")
_exported("partition_draining", "1", "1 if the partition leaves its topic, else 0.")
_exported("quarantined", "{batch}", "Batches in quarantine, as far as one listing shows.")
_exported("claims_held", "{batch}", "Batches that workers hold.")
_exported("transactions_open", "{transaction}", "Transactions that are not decided.")
_exported("oldest_transaction_seconds", "s", "Age of the oldest open transaction; 0 if none.")
_exported("reader_lag", "{batch}", "Batches that a reader has not acknowledged.", _OF_READER)
_exported(
    "reader_lag_seconds",
    "s",
    "Age of the oldest batch that a reader has not acknowledged; 0 if none.",
    _OF_READER,
)
_exported(
    "reader_expires_seconds", "s", "How long a reader may stay away until it expires.", _OF_READER
)
_exported("reader_runs", "1", "1 if a consumer seems to run with the reader's name.", _OF_READER)
_exported(
    "reader_unfed",
    "{batch}",
    "Batches that are not in the queue of a v1 consumer yet.",
    _OF_READER,
)
_exported(
    "reader_feeding_stopped",
    "1",
    "1 if the queue of a v1 consumer is not fed any more, else 0; 'status' says why.",
    _OF_READER,
)
