"""A log in memory, read by runs of Spark queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opendata_buffer.admin.target import Target
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.messages import ACK_TXN, build_uuid
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.reader_positions import ReaderPosition, position_object
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.logs import become_log, open_view
from tests.unit.buffer_source.source_queue import SourceQueue

CONFIG = QueueConfig(store="/queue")


class SourceLog(SourceQueue):
    """A queue that has become a log, with segments of 12 entries or more."""

    def __init__(self, runtime: ManualRuntime, monkeypatch: Any) -> None:
        monkeypatch.setattr(Log, "most_entries", 16)
        monkeypatch.setattr(Log, "left_entries", 4)
        super().__init__(runtime)
        become_log(self.store, CONFIG, runtime)

    def each(self, count: int, records: Sequence[bytes] = (b"x",)) -> None:
        """Append this number of batches one by one, so that segments are cut on the way."""
        for _ in range(count):
            self.produce(records=records)

    def append_entry(self, entry: NewEntry) -> None:
        self._queue.append([entry])

    def message(self, clock: int, flags: int) -> None:
        """Append one batch of a transaction, or its acknowledgement."""
        identity = build_uuid(b"writer", clock, flags)
        location = batch_key("ingest", self.runtime.ulid(), None, identity)
        self.store.put(location, encode_batch([] if flags == ACK_TXN else [b"x"]))
        self.append_entry(NewEntry(location))

    def index(self) -> LogIndex:
        return Log(self.store, CONFIG, self.runtime).need()

    def view(self) -> LogView:
        return open_view(self.store, CONFIG, self.runtime, self.manifest())

    def moved(self) -> int:
        """Return the first sequence of the manifest; earlier entries are in segments."""
        first = self.manifest().first_sequence
        assert 0 < first <= self.index().end
        return first

    @property
    def target(self) -> Target:
        """The log as commands see it."""
        return Target(self.store, CONFIG, self.runtime)

    def position(self, reader: str) -> ReaderPosition:
        found = position_object(Log(self.store, CONFIG, self.runtime), reader).read()
        assert isinstance(found, ReaderPosition)
        return found

    def at(self, reader: str) -> int:
        """Return the position of a reader."""
        return self.position(reader).next

    def lift_floor(self, floor: int) -> None:
        """Raise the floor, as a collector does."""
        Log(self.store, CONFIG, self.runtime).change(
            lambda before: None if before is None else before.with_floor(floor)
        )
