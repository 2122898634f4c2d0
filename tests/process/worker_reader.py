"""Reads a log by a name until killed, from the reader's own position; appends what it read to a
file before it acknowledges.

Arguments: store, reader, file, number of records after which to stop.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opendata_buffer import Consumer, ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.errors import RetryLater
from opendata_buffer.queue.log import Log

Log.most_entries, Log.left_entries = 24, 8


def main() -> None:
    store, name, path, wanted = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    gc = GarbageCollectorConfig(interval_ms=50)
    config = ConsumerConfig(store=store, gc=gc, reader=name, ack_interval=5)
    before = Path(path).read_text() if os.path.exists(path) else ""
    seen = {"", *before.split("\n")}
    with open(path, "a") as file, Consumer(config) as consumer:
        while len(seen) - 1 < wanted:
            batch = consumer.next_batch(timeout=1)
            if batch is None:
                continue
            lines = [record.value.decode() for record in batch.records()]
            seen.update(lines)
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
            while True:
                try:
                    batch.ack()
                    break
                except RetryLater:
                    continue
            print(batch.sequence, flush=True)


if __name__ == "__main__":
    main()
