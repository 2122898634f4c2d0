"""Consume into SQLite until killed: records, position, and filter state in one transaction.

Arguments: store, database, number of records after which to stop.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time

from opendata_buffer import Consumer, ConsumerConfig, GarbageCollectorConfig, TransactionFilter

GRACE_MS = 10_000
"""The grace period of its producers. On a slow machine an append may come seconds later."""


def main() -> None:
    store, path, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("pragma journal_mode = wal")
    database.execute("create table if not exists records (sequence int, record text)")
    database.execute("create table if not exists position (one int primary key, seq int, filter)")
    row = database.execute("select seq, filter from position").fetchone()
    seen = TransactionFilter("ingest")
    if row:
        seen = TransactionFilter.from_dict(json.loads(row[1]), "ingest")
    # With a short interval and grace period, the collector runs and must not delete needed objects.
    gc = GarbageCollectorConfig(interval_ms=50, grace_period_ms=GRACE_MS)
    config = ConsumerConfig(store=store, gc=gc, create_if_missing=True)
    with Consumer(config, last_acked_sequence=row[0] if row else None) as consumer:
        fetch = consumer.fetch_handle()
        while True:
            descriptors = consumer.next_descriptors(7)
            if not descriptors:
                (count,) = database.execute("select count(*) from records").fetchone()
                if count >= wanted:
                    return
                time.sleep(0.01)
                continue
            database.execute("begin")
            for descriptor in descriptors:
                if seen.offer(descriptor.sequence, descriptor.location):
                    database.executemany(
                        "insert into records values (?, ?)",
                        [
                            (descriptor.sequence, record.decode())
                            for record in fetch.fetch(descriptor).entries
                        ],
                    )
            last = descriptors[-1].sequence
            database.execute(
                "insert or replace into position values (1, ?, ?)",
                (last, json.dumps(seen.to_dict())),
            )
            database.execute("commit")
            consumer.ack_through(last)
            print(last, flush=True)


if __name__ == "__main__":
    main()
