"""Publish numbered transactions into a topic until killed, and print each committed number.

A record is ``<number>/<attempt>/<k>``. A writer that is killed between a commit and its line
publishes the number again, as another attempt. The arguments are those of ``worker_produce``, with
one store.
"""

from __future__ import annotations

import os
import sys
import time

from opendata_buffer import ProducerConfig, Publisher, QueueConfig, Topic
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.topic.partitioner import rendezvous
from opendata_buffer.topic.topic import partition_config
from tests.support.worker_produce import await_short

RECORDS_EACH = 24
PARTS = 3


def main() -> None:
    app, first, end, grace_ms, pause_s, long, store = sys.argv[1:]
    topic = Topic.open(store)
    runtime, config = SystemRuntime(), QueueConfig(store=store)
    queues = [
        Queue(topic.store, partition_config(name, config), runtime=runtime, role="test")
        for name in topic.description.names
    ]
    for name in topic.description.names:
        partition = partition_config(name, config)
        claim_for_writing(topic.store, partition, runtime=runtime, grace_ms=int(grace_ms))
    producing = ProducerConfig(store=store, flush_interval_ms=2)
    with Publisher(store, app, config=producing) as publisher:
        for number in range(int(first), int(end)):
            records = [f"{number}/{os.getpid()}/{k}".encode() for k in range(RECORDS_EACH)]
            for part in range(PARTS):
                # In several calls, and slowly, so that a kill interrupts transactions.
                publisher.publish_uncommitted(
                    records[part::PARTS], keys=records[part::PARTS], partitioner=rendezvous
                )
                time.sleep(float(pause_s))
            publisher.commit(120)
            print(number, flush=True)
            await_short(int(long), queues)


if __name__ == "__main__":
    main()
