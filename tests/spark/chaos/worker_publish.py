"""Publishes numbered transactions into a topic until killed; prints each that it committed.

A record is ``<number>/<attempt>/<k>``: a writer that is killed between a commit and its line
publishes the number again, as another attempt. It waits while the topic is long.
Arguments: first number, end (exclusive), how many batches make the topic long, store.
"""

from __future__ import annotations

import os
import sys
import time

from opendata_buffer import ProducerConfig, Publisher, QueueConfig, Topic
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.topic.partitioner import rendezvous
from tests.spark.chaos.worker_produce import GRACE_MS, length

RECORDS_EACH = 24
PARTS = 3
PAUSE_S = 0.03


def values(number: int, attempt: str) -> list[str]:
    """The records of one attempt at a transaction."""
    return [f"{number}/{attempt}/{k}" for k in range(RECORDS_EACH)]


def main() -> None:
    first, end, long = map(int, sys.argv[1:4])
    store = sys.argv[4]
    topic = Topic.open(store)
    queues = [
        Queue(
            topic.store,
            Topic.config_of(name, QueueConfig(store=store)),
            runtime=SystemRuntime(),
            role="test",
        )
        for name in topic.description.names
    ]
    config = ProducerConfig(store=store, flush_interval_ms=2, gc_grace_period_ms=GRACE_MS)
    with Publisher(store, "chaos", config=config) as publisher:
        for number in range(first, end):
            records = values(number, str(os.getpid()))
            size = RECORDS_EACH // PARTS
            for begin in range(0, RECORDS_EACH, size):
                # In several calls, and slowly, so that a kill cuts transactions in the middle.
                part = [record.encode() for record in records[begin : begin + size]]
                publisher.publish_uncommitted(part, keys=part, partitioner=rendezvous)
                time.sleep(PAUSE_S)
            publisher.commit(120)
            print(number, flush=True)
            while sum(map(length, queues)) > long:
                time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
