"""A service that writes a queue's records into a database, until SIGTERM or Ctrl-C ends it.

    python examples/consume_into_sqlite.py s3://bucket/orders orders.db
    python examples/consume_into_sqlite.py s3://bucket/orders orders.db --exactly-once

Without ``--exactly-once`` a batch is acknowledged after it was written: one that was written and
not acknowledged, because the service was killed in between, is written again. With it each
transaction of the database also saves the position behind its batch, and the service starts there.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
from contextlib import suppress

from opendata_buffer import ConsumedBatch, Consumer, RetryLater

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (record BLOB, metadata BLOB, produced_ms INTEGER);
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), position TEXT);
"""


class Database:
    """The service's own tables; PostgreSQL differs by its driver only."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, check_same_thread=False)
        self._connection.executescript(SCHEMA)

    def position(self) -> str | None:
        """Where the last transaction that saved a position ended."""
        found = self._connection.execute("SELECT position FROM position").fetchone()
        return None if found is None else str(found[0])

    def write(self, batch: ConsumedBatch, position: str | None) -> None:
        """Write a batch and, if given, its position in one transaction."""
        with self._connection as transaction:
            transaction.executemany("INSERT INTO orders VALUES (?, ?, ?)", batch.records())
            if position is not None:
                transaction.execute("INSERT OR REPLACE INTO position VALUES (1, ?)", [position])


async def consume(url: str, database: Database, *, exactly_once: bool) -> None:
    """Write batch after batch."""
    saved = database.position() if exactly_once else None
    async with await asyncio.to_thread(Consumer, url, saved) as consumer:
        print("ready", flush=True)
        async for batch in consumer:
            position = str(batch.position) if exactly_once else None
            await asyncio.to_thread(database.write, batch, position)
            await asyncio.to_thread(batch.ack)


async def serve(url: str, database: Database, *, exactly_once: bool) -> None:
    """Consume until a signal comes. Other errors than these end the service: they need a person."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        while True:
            try:
                await consume(url, database, exactly_once=exactly_once)
            except RetryLater as error:
                print(f"starting again in 5 s: {error}", file=sys.stderr)
                await asyncio.sleep(5)


if __name__ == "__main__":
    asyncio.run(
        serve(sys.argv[1], Database(sys.argv[2]), exactly_once="--exactly-once" in sys.argv)
    )
