"""Several workers on one queue: each batch is one worker's, and another one's when it fails.

    python examples/shared_queue.py s3://bucket/orders

Start it as often as you like, on as many machines: all of them share the queue, and one of them
serves as the broker that hands out batches. A batch whose worker dies goes to another one, so work
may be done twice: here the result is a set, which does not mind. Ends when nothing came for a
while.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from opendata_buffer import ClaimLost, Worker, WorkerConfig

THREADS = 4
IDLE_S = 2.0


def work(worker: Worker, results: set[tuple[int, int]]) -> None:
    """Count the records of batch after batch; a thread."""
    while batches := worker.claim(1, timeout=IDLE_S):
        for batch in batches:
            if any(record == b"" for record in batch.entries):
                # Nobody could do anything with it: it is kept aside, and the queue goes on.
                batch.reject("an empty record")
                continue
            results.add((batch.sequence, len(batch.entries)))
            try:
                batch.done()
            except ClaimLost as error:
                # It was handed to somebody else meanwhile, who does it again.
                print(error, file=sys.stderr)


def main(store: str) -> None:
    """Work on everything that is queued."""
    results: set[tuple[int, int]] = set()
    with Worker(WorkerConfig(store=store)) as worker, ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, worker, results) for _ in range(THREADS)]:
            done.result()
    print(f"{sum(count for _, count in results)} records in {len(results)} batches")


if __name__ == "__main__":
    main(sys.argv[1])
