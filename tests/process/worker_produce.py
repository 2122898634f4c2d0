"""Produces numbered transactions until killed; prints each one's number once it is durable.

Arguments: store, app, first number, end (exclusive).
"""

from __future__ import annotations

import sys

from opendata_buffer import Producer, ProducerConfig, Transaction


def main() -> None:
    store, app, first, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    # The grace of worker_consume.py's collector.
    config = ProducerConfig(store=store, flush_interval_ms=2, gc_grace_period_ms=10_000)
    with Producer(config) as producer:
        for number in range(first, end):
            records = [f"{app} {number} {k}".encode() for k in range(5)]
            handle = producer.produce(records, transaction=Transaction(app, number))
            handle.result(60)
            print(number, flush=True)


if __name__ == "__main__":
    main()
