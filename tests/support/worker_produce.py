"""Produce numbered transactions into queues until killed, and print each durable number.

Arguments: app, first number, end (exclusive), grace period in milliseconds, seconds to wait after
each transaction, number of batches that make a queue long, stores. It waits while a queue is long.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from opendata_buffer import Producer, ProducerConfig, Transaction
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from tests.support.killed import FOREVER

RECORDS_EACH = 20


def values(app: str, end: int) -> list[str]:
    """Return the records of all transactions before ``end``, in order."""
    return [f"{app} {number} {k}" for number in range(end) for k in range(RECORDS_EACH)]


def await_short(long: int, queues: list[Queue]) -> None:
    """Wait while the queues hold at least ``long`` batches."""
    while long < FOREVER:
        manifests = [queue.read() for queue in queues]
        if sum(manifest.entry_count for manifest in manifests if manifest is not None) <= long:
            return
        time.sleep(0.05)


def main() -> None:
    app, first, end, grace_ms, pause_s, long, *stores = sys.argv[1:]
    with ExitStack() as stack:
        producers, queues = [], []
        for store in stores:
            config, runtime = ProducerConfig(store=store, flush_interval_ms=2), SystemRuntime()
            opened = open_store(store)
            claim_for_writing(opened, config, runtime=runtime, grace_ms=int(grace_ms))
            producers.append(stack.enter_context(Producer(config)))
            queues.append(Queue(opened, config, runtime=runtime, role="test"))
        for number in range(int(first), int(end)):
            records = [f"{app} {number} {k}".encode() for k in range(RECORDS_EACH)]
            transaction = Transaction(app, number)
            for handle in [
                producer.produce(records, transaction=transaction) for producer in producers
            ]:
                handle.result(120)
            print(number, flush=True)
            time.sleep(float(pause_s))
            await_short(int(long), queues)


if __name__ == "__main__":
    main()
