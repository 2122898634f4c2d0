"""The query's id in the note of who reads a queue, for ``opendata-buffer status``.

The process that claims the queue is not told which query it belongs to; the tasks of a micro-batch
are. So a task adds the id to the note, in the background and at most once a minute in a process.
"""

from __future__ import annotations

import logging

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.queue.consumer_info import add_query_id, read_consumer_info
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

__all__ = ["PROGRAM", "QueryNotes", "add_query"]

log = logging.getLogger(__name__)

PROGRAM = "Spark"
"""What the source notes when it claims a queue."""

INTERVAL_S = 60.0


class QueryNotes:
    """Adds queries to notes; remembers when it has last done so."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._at: dict[tuple[str, str, str], float] = {}

    def tell(self, config: QueueConfig, query: str) -> None:
        """A task of this query reads this queue. Returns at once, and raises nothing."""
        key = config.store, config.manifest_path, query
        now = self._runtime.monotonic()
        if now - self._at.get(key, -INTERVAL_S) < INTERVAL_S:
            return
        self._at[key] = now

        def note() -> None:
            try:
                store = open_store(config.store, config.store_options)
                add_query(store, config, self._runtime, query)
            except OpenDataBufferError as error:
                log.debug("the query was not noted beside the queue: %s", error)

        self._runtime.spawn(note, "opendata-buffer-note")


def add_query(store: Store, config: QueueConfig, runtime: Runtime, query: str) -> None:
    """Add the query to a note of Spark's that has none yet.

    A last task of a query that was fenced could so get into its successor's note: nothing but
    what a person is shown depends on it.

    Raises:
        CorruptData, StorageError: The note could not be read.
    """
    holder = read_consumer_info(store, config, runtime)
    if holder is not None and holder.program == PROGRAM and not holder.query:
        add_query_id(store, config, runtime, holder.epoch, query)
