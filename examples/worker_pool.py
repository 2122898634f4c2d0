"""One consumer that plans and acknowledges, and a pool of processes that fetch and count.

    python examples/worker_pool.py s3://bucket/orders

A queue has one consumer, but any process may fetch its batches: descriptors and the fetch handle
pickle. The consumer acknowledges a batch once all batches of its run are processed. So batches that
a crash interrupts are delivered again. If that matters, let the workers write their results and the
sequence in one transaction.
"""

from __future__ import annotations

import multiprocessing
import sys
from functools import partial

from opendata_buffer import BatchDescriptor, Consumer, ConsumerConfig, FetchHandle

PROCESSES = 2
RUN = 100
"""Batches that are planned together and acknowledged with one write."""


def count(fetch: FetchHandle, descriptor: BatchDescriptor) -> tuple[int, int]:
    """Fetch one batch, in a worker; return its sequence and its number of records."""
    batch = fetch.fetch(descriptor)
    return batch.sequence, len(batch.values)


def main(store: str) -> None:
    """Process all queued batches."""
    records = 0
    # Not "fork": a forked worker would share the connections and threads of this process.
    with (
        Consumer(ConsumerConfig(store=store)) as consumer,
        multiprocessing.get_context("spawn").Pool(PROCESSES) as pool,
    ):
        work = partial(count, consumer.fetch_handle())
        while descriptors := consumer.next_descriptors(RUN):
            for sequence, found in pool.imap(work, descriptors):
                print(f"batch {sequence}: {found} records")
                records += found
            consumer.ack_through(descriptors[-1].sequence)
    print(f"{records} records processed")


if __name__ == "__main__":
    main(sys.argv[1])
