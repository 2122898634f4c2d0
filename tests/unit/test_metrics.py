"""The table of instruments, compared with the values that an OpenTelemetry reader collects."""

from __future__ import annotations

import json
import subprocess
import sys

from opentelemetry.metrics import CallbackOptions

from opendata_buffer.metrics import WatchedGauge


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )


def test_a_watched_gauge_reads_the_live_objects() -> None:
    gauge = WatchedGauge("buffer.tested", "1", "Tested.")
    one, other = (lambda: 2.0), (lambda: None)
    gauge.watch(one, lambda owner: owner(), {"queue": "one"})
    gauge.watch(other, lambda owner: owner(), {"queue": "other"})
    assert [each.value for each in gauge._observe(CallbackOptions())] == [2.0]
    del one
    assert not [*gauge._observe(CallbackOptions())]


# One batch is produced after a lost race, consumed, acknowledged, and collected.
USE_ALL = """
import json
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))

from opendata_buffer import Compression, Consumer, ConsumerConfig, GarbageCollectorConfig
from opendata_buffer import GarbageCollector, Producer, ProducerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.ownership import change_grace_period
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore

def look():
    found = {}
    for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics:
        for metric in scope.metrics:
            for point in metric.data.data_points:
                attributes = dict(point.attributes)
                where = attributes.pop("queue", None)
                assert where in (None, "memory://metrics/ingest/manifest"), where
                assert (where is None) == (type(metric.data).__name__ != "Gauge"), metric.name
                key = metric.name + "".join(f"{{{v}}}" for v in attributes.values())
                found[key] = point.count if hasattr(point, "count") else point.value
    return found

store, runtime = MemoryStore("metrics"), SystemRuntime()
url, gc = "memory://unused", GarbageCollectorConfig(enabled=False)
with Producer(ProducerConfig(store=url, flush_interval_ms=60_000), store=store) as producer:
    producer.produce([b"abc", b""])
    buffered = look()["buffer.producer_buffered_bytes"]
config = ConsumerConfig(store=url, gc=gc, create_if_missing=True)
with Consumer(config, store=store) as consumer:
    batch = consumer.next_batch()
    unacked = look()
    consumer.ack(batch.sequence)
change_grace_period(store, config, runtime, 1)
runtime.sleep(0.005)
now_ms = runtime.now_ms()
store._now_ms = runtime.now_ms = lambda: now_ms  # one clock, which the collector compares
GarbageCollector(store, config, runtime=runtime).run_once()

here, there = (Queue(store, config, runtime=runtime, role=role) for role in ("here", "there"))
for queue in (here, there, here):
    queue.append([NewEntry(f"ingest/{runtime.ulid()}.batch")])

watched = ("buffer.consumer_lag_seconds", "buffer.oldest_unacked_seconds")
# Before 1.45 the SDK shows the value of a gauge once, and again when it is set again.
shown_before = {name: value for name, value in unacked.items() if "conflict_rate" in name}
print(json.dumps([{**shown_before, **look()}, buffered, [unacked[name] for name in watched]]))
"""


def test_every_instrument_is_measured_as_the_table_says() -> None:
    found, buffered, watched = json.loads(run(USE_ALL).stdout)
    assert buffered >= 11  # of a batch that is not flushed yet, and of the call itself
    assert min(watched) > 0
    assert found.pop("buffer.stored_bytes") > 0  # objects that contain times and names
    # Closed objects are no longer watched.
    assert found == {
        "buffer.batches_flushed": 1,
        "buffer.entries_flushed": 2,
        "buffer.bytes_flushed": 11,  # two lengths of four bytes, and "abc"
        "buffer.bytes_written": 18,  # and a footer of seven
        "buffer.flush_duration_seconds": 1,
        "buffer.manifest_writes{producer}": 1,
        "buffer.manifest_writes{consumer}": 2,  # the epoch and the dequeue
        "buffer.manifest_writes{here}": 3,  # the second append lost its first attempt
        "buffer.manifest_writes{there}": 1,
        "buffer.manifest_conflicts{here}": 1,
        "buffer.batches_collected": 1,
        "buffer.entries_collected": 2,
        "buffer.bytes_collected": 18,
        "buffer.fetch_duration_seconds": 1,
        "buffer.descriptors_handed_out": 1,
        "buffer.acks": 1,
        "buffer.queue_length": 0,
        "buffer.manifest_share": 193 / 2**26,
        "buffer.conflict_rate{producer}": 0,
        "buffer.conflict_rate{consumer}": 0,
        "buffer.conflict_rate{here}": 1 / 3,
        "buffer.conflict_rate{there}": 0,
        "buffer.gc_files_deleted": 1,
        "buffer.gc_files_failed": 0,
        "buffer.gc_duration_seconds": 1,
        "buffer.gc_clock_difference_seconds": 0,
    }
