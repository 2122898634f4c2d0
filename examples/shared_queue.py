"""Several workers on one queue: each batch goes to one worker, and to another if that one fails.

    python examples/shared_queue.py s3://bucket/orders

Start it several times, on several machines if you like. All processes share the queue, and one of
them serves as the broker that hands out batches. A batch whose worker dies goes to another worker,
so work may be done twice. That does not matter here, because the result is a set. The program ends
when it has received nothing for a while.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from opendata_buffer import ClaimLost, Worker, WorkerConfig

THREADS = 4
IDLE_S = 2.0


def work(worker: Worker, results: set[tuple[int, int]]) -> None:
    """Count the records of batch after batch; runs in a thread."""
    while batches := worker.claim(1, timeout=IDLE_S):
        for batch in batches:
            if any(record == b"" for record in batch.values):
                # No worker can process it: move it to the quarantine, and continue.
                batch.reject("an empty record")
                continue
            results.add((batch.sequence, len(batch.values)))
            try:
                batch.done()
            except ClaimLost as error:
                # Another worker has received the batch meanwhile, and does it again.
                print(error, file=sys.stderr)


def main(store: str) -> None:
    """Work on all queued batches."""
    results: set[tuple[int, int]] = set()
    with Worker(WorkerConfig(store=store)) as worker, ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, worker, results) for _ in range(THREADS)]:
            done.result()
    print(f"{sum(count for _, count in results)} records in {len(results)} batches")


if __name__ == "__main__":
    main(sys.argv[1])
