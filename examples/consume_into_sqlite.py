"""A service that writes a queue's records into a database, until SIGTERM or Ctrl-C ends it.

    python examples/consume_into_sqlite.py s3://bucket/orders orders.db
    python examples/consume_into_sqlite.py s3://bucket/orders orders.db --exactly-once

Without ``--exactly-once``, the service acknowledges a batch after writing it. If it is killed in
between, it writes the batch again after a restart. With ``--exactly-once``, each transaction of the
database also saves the position after its batch, and the service starts there.
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
    """The service's own tables; with PostgreSQL only the driver differs."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, check_same_thread=False)
        self._connection.executescript(SCHEMA)

    def position(self) -> str | None:
        """Return the last position that was saved; None before the first one."""
        found = self._connection.execute("SELECT position FROM position").fetchone()
        return None if found is None else str(found[0])

    def write(self, batch: ConsumedBatch, position: str | None) -> None:
        """Write a batch and, if given, its position in one transaction."""
        with self._connection as transaction:
            transaction.executemany("INSERT INTO orders VALUES (?, ?, ?)", batch.records())
            if position is not None:
                transaction.execute("INSERT OR REPLACE INTO position VALUES (1, ?)", [position])


async def consume(url: str, database: Database, *, exactly_once: bool) -> None:
    """Write batch after batch to the database."""
    saved = database.position() if exactly_once else None
    async with await asyncio.to_thread(Consumer, url, saved) as consumer:
        print("ready", flush=True)
        async for batch in consumer:
            position = str(batch.position) if exactly_once else None
            await asyncio.to_thread(database.write, batch, position)
            await asyncio.to_thread(batch.ack)


async def serve(url: str, database: Database, *, exactly_once: bool) -> None:
    """Consume until a signal comes.

    Starts again after a RetryLater. Other errors end the service, because they need a person.
    """
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
