"""The segments of a log in the store: how they are found, read, and reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opendata_buffer import CorruptData
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue import log_segments
from opendata_buffer.queue.log import Log
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.queue.test_log import LogFixture, small

__all__ = ["small"]


def test_stored_segments_are_found_by_their_range_of_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_segments, "_LISTED", 2)
    store = MemoryStore()
    log = Log(store, QueueConfig(store="memory://x"), ManualRuntime())
    keys = [f"ingest/_log/{at:020d}-{at + 8:020d}-x.segment" for at in range(0, 64, 8)]
    page = f"ingest/_log/{8:020d}-{24:020d}-x.page"
    for key in (*keys, page, "ingest/_log/note", "ingest/a.batch"):
        store.put(key, b"")
    spans = [(at, at + 8, keys[at // 8]) for at in range(0, 64, 8)]
    assert log.segments.stored_between(0, 64) == spans
    assert log.segments.stored_between(8, 24) == spans[1:3]
    assert log.segments.stored_between(7, 25) == spans[0:4]
    assert log.segments.stored_between(15, 16) == spans[1:2]
    assert log.segments.stored_between(64, 99) == []


def test_each_segment_from_the_floor_on_is_read_or_reported_with_its_fault() -> None:
    fixture = LogFixture()
    fixture.append(200)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    index = log.need()
    whole = list(log.segments.each(index))
    assert [part.first for part, _ in whole] == sorted(part.first for part, _ in whole)
    assert all(isinstance(found, Manifest) for _, found in whole)
    assert sum(found.entry_count for _, found in whole if isinstance(found, Manifest)) == index.end
    fifth, last = whole[4][0], whole[-1][0]
    fixture.store.delete_many([f"ingest/_log/{fifth.name}"])
    log = Log(fixture.store, fixture.config, fixture.runtime)
    later = list(log.segments.each(replace(index, floor=fifth.first)))
    assert [part for part, _ in later] == [part for part, _ in whole[4:]]
    assert isinstance(later[0][1], CorruptData)
    assert all(isinstance(found, Manifest) for _, found in later[1:])
    after, _ = next(log.segments.each(replace(index, floor=fifth.end)))
    assert after == whole[5][0]
    assert list(log.segments.each(replace(index, floor=last.end))) == []
