"""The segments of a log in the store: how they are found, read, and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import CorruptData
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.hints import Action
from opendata_buffer.queue import log_segments
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import (
    Part,
    begin_of_part,
    end_of_part,
    name_ms,
    page_to_json,
)
from opendata_buffer.queue.log_segments import SegmentGone, Segments
from opendata_buffer.stores.base import Listing
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.log_fixture import LogFixture, small

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


def test_stored_segments_are_listed_page_by_page_up_to_the_end_of_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_segments, "_LISTED", 3)
    asked: list[tuple[str, int | None]] = []

    class Watched(MemoryStore):
        def list(self, prefix: str, **options: Any) -> Listing:
            asked.append((options["start_after"], options["limit"]))
            return super().list(prefix, **options)

    store = Watched()
    segments = Segments(store, QueueConfig(store="memory://x"), ManualRuntime())
    keys = [f"ingest/_log/{at:020d}-{at + 8:020d}-x.segment" for at in range(0, 80, 8)]
    for key in keys:
        store.put(key, b"")
    assert [first for first, _, _ in segments.stored_between(8, 40)] == [8, 16, 24, 32]
    assert asked == [(f"ingest/_log/{0:020d}", 3), (keys[2], 3)]


def test_two_writers_that_store_the_same_entries_name_them_differently() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    entries = Manifest.starting_at(8, 0).append([NewEntry("ingest/a.batch")])
    segments = Segments(store, QueueConfig(store="memory://x"), runtime)
    first, second = segments.add(entries), segments.add(entries)
    assert first.name != second.name
    assert (first.first, first.end) == (second.first, second.end) == (8, 9)
    assert len(store.list("ingest/_log/").objects) == 2


class Stored:
    """A log whose index names many segments, and the segments."""

    def __init__(self) -> None:
        self.fixture = LogFixture()
        self.fixture.append(200)
        self.index = self.fixture.index()
        self.parts = [part for part, _ in self.segments().each(self.index)]

    def segments(self, *reader: str) -> Segments:
        fixture = self.fixture
        return Segments(fixture.store, fixture.config, fixture.runtime, *reader)

    def time_ms(self, sequence: int) -> int:
        return name_ms(self.fixture.locations[sequence])

    def lose(self, part: Part) -> None:
        self.fixture.store.delete_many([f"ingest/_log/{part.name}"])


def test_only_segments_that_may_have_a_location_are_searched_for_it() -> None:
    log = Stored()
    second = log.parts[1]
    segments = log.segments()
    location = log.fixture.locations[second.end - 1]
    assert segments.find(log.index, location, second.end - 1) == second.end - 1
    assert segments.find(log.index, location, second.end) is None


def test_a_time_is_searched_from_the_floor_on_in_segments_that_have_it() -> None:
    log = Stored()
    first, second, third = log.parts[:3]
    above = replace(log.index, floor=first.end)
    log.lose(first)
    segments = log.segments()
    assert segments.sequence_since(above, 0) == second.first
    assert segments.sequence_since(above, log.time_ms(second.end - 1)) == second.end - 1
    assert segments.sequence_since(above, log.time_ms(second.end - 1) + 1) == third.first
    assert segments.sequence_since(above, log.time_ms(log.index.end - 1) + 1) is None


def test_newer_entries_are_those_of_segments_above_the_floor_that_have_such_a_record() -> None:
    log = Stored()
    first, second, third = log.parts[:3]
    above = replace(log.index, floor=first.end)
    log.lose(first)
    segments = log.segments()

    def sequences(index: LogIndex, time_ms: int) -> list[int]:
        return [entry.sequence for entry in segments.newer_entries(index, time_ms)]

    assert sequences(above, 0) == [*range(second.first, log.index.end)]
    assert sequences(replace(above, floor=second.end - 1), 0)[0] == second.end - 1
    at_end_ms = log.time_ms(second.end - 1)
    assert sequences(above, at_end_ms) == [*range(second.first, log.index.end)]
    assert sequences(above, at_end_ms + 1) == [*range(third.first, log.index.end)]


def test_the_oldest_name_is_that_of_a_part_above_the_floor() -> None:
    store = MemoryStore()
    segments = Segments(store, QueueConfig(store="memory://x"), ManualRuntime())
    in_page = (Part(0, 8, 10, 0, "a"), Part(8, 20, 40, 0, "b"))
    page = Part.page(in_page, "page")
    index = LogIndex("q", 30, 0, ((Part(20, 24, 30, 0, "c"), Part(24, 30, 60, 0, "d")), (page,)))
    assert segments.oldest_name_ms(index) == 10, "the page has to be read only for a part of it"
    store.put("ingest/_log/page", page_to_json(in_page))
    for floor, oldest_ms in ((7, 10), (8, 30), (20, 30), (23, 30), (24, 60), (30, None)):
        assert segments.oldest_name_ms(replace(index, floor=floor)) == oldest_ms


def test_up_to_four_segments_are_read_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Stored()
    read: list[int] = []
    in_parallel = log_segments.in_parallel

    def counted(runtime: Any, work: Callable[[Part], Manifest], parts: Sequence[Part]) -> Any:
        read.append(len(parts))
        return in_parallel(runtime, work, parts)

    monkeypatch.setattr(log_segments, "in_parallel", counted)
    found = log.segments().entries(log.index, 5, log.index.end - 5)
    assert [entry.sequence for entry in found] == [*range(5, log.index.end)]
    assert max(read) == 4
    assert sum(read) == len(log.parts)


def test_a_segment_that_is_larger_than_any_writer_makes_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Stored()
    monkeypatch.setattr(log_segments, "MAX_SEGMENT_BYTES", 100)
    with pytest.raises(CorruptData, match="more than the limit of 100"):
        log.segments().entries(log.index, 0, 1)


def test_a_page_that_is_larger_than_any_writer_makes_is_not_read() -> None:
    log = Stored()
    page = log.index.parts()[0]
    assert page.name.endswith(".page")
    key = f"ingest/_log/{page.name}"
    large = log.fixture.store.get(key).data + b" " * (1024 * 1024)
    log.fixture.store.put(key, large)
    with pytest.raises(CorruptData, match="limit of 1048576: it was not read"):
        log.segments().entries(log.index, 0, 1)


def test_a_page_is_named_after_the_sequences_of_its_parts() -> None:
    """The collector deletes a page by the end in its name."""
    log = Stored()
    pages = [part for part in log.index.parts() if part.name.endswith(".page")]
    assert pages
    for page in pages:
        assert page.name.startswith(f"{page.first:020d}-{page.end:020d}-")
        assert (begin_of_part(page.name), end_of_part(page.name)) == (page.first, page.end)


def test_the_last_pages_and_segments_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_segments, "_PAGES", 1)
    monkeypatch.setattr(log_segments, "_SEGMENTS", 1)
    read: list[str] = []

    class Watched(MemoryStore):
        def get(self, key: str, **options: Any) -> Any:
            read.append(key.rpartition("/")[2])
            return super().get(key, **options)

    store = Watched()
    segments = Segments(store, QueueConfig(store="memory://x"), ManualRuntime())
    pages = []
    for at in range(2):
        entries = Manifest.starting_at(at, 0).append([NewEntry(f"ingest/{at}.batch")])
        part, page = Part.of(entries, f"{at}.entry"), f"{at}.pages"
        store.put(f"ingest/_log/{part.name}", entries.raw)
        store.put(f"ingest/_log/{page}", page_to_json([part]))
        pages.append(Part.page([part], page))
    index = LogIndex("q", 2, 0, ((), tuple(pages)))
    for at in (0, 0, 1, 0):
        assert [entry.sequence for entry in segments.entries(index, at, 1)] == [at]
    assert read == ["0.pages", "0.entry", "1.pages", "1.entry", "0.pages", "0.entry"]


@pytest.mark.parametrize("reader", [(), ("billing",)])
def test_the_error_of_a_segment_has_its_cause_its_sequences_and_the_way_past_it(
    reader: tuple[str, ...],
) -> None:
    log = Stored()
    first, second = log.parts[:2]
    where = rf"'ingest/_log/{first.name}' in memory://log"
    what = rf"It names sequences {first.first} to {first.end - 1} of the log: readers"
    other = log.fixture.store.get(f"ingest/_log/{second.name}").data
    log.fixture.store.put(f"ingest/_log/{first.name}", other)
    ends = f"it ends at {second.end}, and the index has {first.end}"
    with pytest.raises(CorruptData, match=rf"{where} cannot be read: {ends}\. {what}") as damaged:
        log.segments(*reader).entries(log.index, 0, 1)
    assert not isinstance(damaged.value, SegmentGone)
    log.lose(first)
    with pytest.raises(SegmentGone, match=rf"{where} is gone\. {what}") as gone:
        log.segments(*reader).entries(log.index, 0, 1)
    for error in (damaged.value, gone.value):
        (hint,) = error.hints
        assert hint.action is (
            Action.RESET_PAST_SEGMENT if reader else Action.RESET_READERS_PAST_SEGMENT
        )
        assert (hint.sequence, hint.readers) == (first.end, reader)
        assert hint.queue is not None
        assert "memory://log" in str(hint)


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
