"""A process that exports every metric, like an application, until its input closes.

``python -m tests.monitoring.exporting PORT`` changes every instrument of the table, and runs a
producer and a consumer. With PORT 0 it prints the metrics once.
"""

from __future__ import annotations

import sys
import threading

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import generate_latest, start_http_server

from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig, metrics

STORE = "memory://exporting"
LABELS = {"queue": "s3://bucket/manifest", "role": "producer", "reader": "billing"}


def move() -> None:
    """Record a measurement with every instrument of the table."""
    for row in metrics.TABLE:
        instrument = getattr(metrics, row.name.removeprefix(metrics.PREFIX))
        labels = {label: LABELS[label] for label in row.labels}
        if row.kind == "counter":
            instrument.add(1, labels)
        elif row.kind == "histogram":
            instrument.record(0.2, labels)
        elif isinstance(instrument, metrics.WatchedGauge):
            instrument.watch(metrics.Metric, lambda _: 7.0, labels)
        else:
            instrument.set(7.0, labels)


def work(stop: threading.Event) -> None:
    """Use a queue."""
    config = ProducerConfig(store=STORE, flush_interval_ms=20)
    with Producer(config) as producer, Consumer(ConsumerConfig(store=STORE)) as consumer:
        while not stop.wait(0.1):
            move()
            producer.produce([b"record"] * 10)
            producer.flush()
            batch = consumer.next_batch()
            if batch is not None:
                consumer.ack(batch.sequence)


def main() -> None:
    set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    port = int(sys.argv[1])
    if not port:
        move()
        print(generate_latest().decode())
        return
    stop = threading.Event()
    worker = threading.Thread(target=work, args=(stop,))
    worker.start()
    server, _ = start_http_server(port, "127.0.0.1")
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    worker.join()
    server.shutdown()


if __name__ == "__main__":
    main()
