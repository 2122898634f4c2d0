"""A log in memory that runs of Spark queries read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.messages import ACK_TXN, build_uuid
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.reader_positions import position_object
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.logs import become_log, open_view
from tests.unit.buffer_source.source_queue import World

CONFIG = QueueConfig(store="/world")


class LogWorld(World):
    """A queue that has become a log, with segments of 12 entries or more."""

    def __init__(self, runtime: ManualRuntime, monkeypatch: Any) -> None:
        monkeypatch.setattr(Log, "most_entries", 16)
        monkeypatch.setattr(Log, "left_entries", 4)
        super().__init__(runtime)
        become_log(self.store, CONFIG, runtime)

    def each(self, count: int, records: Sequence[bytes] = (b"x",)) -> None:
        """So many batches, each appended alone, so that segments are cut on the way."""
        for _ in range(count):
            self.produce(records=records)

    def append_entry(self, entry: NewEntry) -> None:
        self._queue.append([entry])

    def message(self, clock: int, flags: int) -> None:
        """One batch of a transaction, or its acknowledgement, each appended alone."""
        identity = build_uuid(b"writer", clock, flags)
        location = batch_key("ingest", self.runtime.ulid(), None, identity)
        self.store.put(location, encode_batch([] if flags == ACK_TXN else [b"x"]))
        self.append_entry(NewEntry(location))

    def index(self) -> LogIndex:
        return Log(self.store, CONFIG, self.runtime).need()

    def view(self) -> LogView:
        return open_view(self.store, CONFIG, self.runtime, self.manifest())

    def moved(self) -> int:
        """Entries before this sequence are in segments, and not in the manifest."""
        first = self.manifest().first_sequence
        assert 0 < first <= self.index().end
        return first

    def at(self, reader: str) -> int:
        """The position of a reader."""
        found = position_object(Log(self.store, CONFIG, self.runtime), reader).read()
        return found.next  # type: ignore[union-attr]

    def lift_floor(self, floor: int) -> None:
        """Collect everything before a sequence."""
        Log(self.store, CONFIG, self.runtime).change(
            lambda before: None if before is None else before.with_floor(floor)
        )
