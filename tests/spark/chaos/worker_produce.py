"""Produces numbered transactions into some queues until killed; prints each durable number.

It waits while a queue is long. Arguments: first number, end (exclusive), how many batches make
a queue long, stores.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from opendata_buffer import Producer, ProducerConfig, Transaction
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

APP = "writer"
RECORDS_EACH = 20
GRACE_MS = 20_000
PAUSE_S = 0.05


def values(number: int) -> list[str]:
    """The records of a transaction."""
    return [f"{number}.{k}" for k in range(RECORDS_EACH)]


def main() -> None:
    first, end, long, *stores = sys.argv[1:]
    with ExitStack() as stack:
        producers = [
            stack.enter_context(
                Producer(
                    ProducerConfig(store=store, flush_interval_ms=2, gc_grace_period_ms=GRACE_MS)
                )
            )
            for store in stores
        ]
        queues = [
            Queue(open_store(store), QueueConfig(store=store), runtime=SystemRuntime(), role="test")
            for store in stores
        ]
        for number in range(int(first), int(end)):
            records = [value.encode() for value in values(number)]
            handles = [
                producer.produce(records, transaction=Transaction(APP, number))
                for producer in producers
            ]
            for handle in handles:
                handle.result(120)
            print(number, flush=True)
            time.sleep(PAUSE_S)
            while any(length(queue) > int(long) for queue in queues):
                time.sleep(PAUSE_S)


def length(queue: Queue) -> int:
    manifest = queue.read()
    return 0 if manifest is None else manifest.entry_count


if __name__ == "__main__":
    main()
