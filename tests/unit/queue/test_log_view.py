"""A manifest and an index as one view: its entries, its gaps, and its age."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import Part, parts_folder
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.log_fixture import LogFixture, small

__all__ = ["small"]

ULID = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
ULID_MS = 1_724_233_027_197


def view(
    first: int, index: LogIndex, manifest: Manifest, missing: tuple[tuple[int, int], ...] = ()
) -> LogView:
    runtime = ManualRuntime()
    log = Log(MemoryStore(), QueueConfig(store="memory://x"), runtime)
    return LogView(log, index, manifest, first, 3, "ingest/manifest", missing=missing)


def queued(first: int, count: int) -> Manifest:
    entries = [NewEntry(f"p/{ULID}.batch", (Metadata(0, 1_000 + n),)) for n in range(count)]
    return Manifest.starting_at(first, 0).append(entries)


def test_a_view_counts_the_present_entries_and_lists_the_missing_ranges() -> None:
    index = LogIndex(
        "q", 20, 4, ((Part(0, 8, 0, 0, "a"), Part(10, 20, 0, 0, "b")),), lost=((8, 10),)
    )
    found = view(4, index, queued(23, 7), missing=((9, 12), (15, 16)))
    assert found.lost == ((8, 10), (20, 23))
    assert list(found.gaps) == [(8, 12), (15, 16), (20, 23)]
    assert (found.next_sequence, found.entry_count) == (30, 26 - 4 - 1 - 3)
    assert found.count(9, 15) == 3
    assert found.count(9, 11) == 0
    assert found.count(20, 24) == 1
    assert found.count(30, 20) == 0
    available = [found.available_from(needed) for needed in (0, 7, 8, 11, 15, 22, 29)]
    assert available == [4, 7, 12, 12, 16, 23, 29]
    whole = view(4, replace(index, end=23, lost=()), queued(23, 7))
    assert list(whole.gaps) == []
    later = found.starting_at(26)
    assert (later.first_sequence, later.entry_count) == (26, 4)
    assert found.starting_at(2).first_sequence == 4


def test_a_view_of_a_manifest_alone_reads_its_entries() -> None:
    found = view(24, LogIndex("q", 23, 23), queued(23, 7))
    assert [each.sequence for each in found.entries()] == [*range(24, 30)]
    assert [each.sequence for each in found.entries(26, 2)] == [26, 27]
    for nothing in (found.entries(30), found.entries(31), found.entries(24, 0)):
        assert nothing == ()
    assert found.entries(24, -1) == ()
    assert not found.sealed
    assert view(0, LogIndex("q", 0, 0), Manifest.starting_at(0, 2**63 - 1)).sealed
    since = [found.since(time_ms) for time_ms in (0, 1_001, 1_002, 1_006, 1_007)]
    assert since == [24, 24, 25, 29, 30]
    assert found.find(f"p/{ULID}.batch", 23) == 23
    assert found.find("p/none", 23) is None


@pytest.mark.parametrize("moved", [0, 1, 2, 3, 4, 5, 6])
def test_an_entry_without_a_time_is_found_by_a_time_as_in_a_manifest(moved: int) -> None:
    """``moved`` entries are in segments of two, and the others in the manifest."""
    times = [None, 1_000, None, None, 5_000, None]
    entries = [
        NewEntry("p/x", () if time_ms is None else (Metadata(0, time_ms),)) for time_ms in times
    ]
    whole = Manifest.starting_at(0, 0).append(entries)
    log = Log(MemoryStore(), QueueConfig(store="memory://x"), ManualRuntime())
    parts = []
    for first in range(0, moved, 2):
        piece = whole.part(first, min(first + 2, moved))
        part = Part.of(piece, f"part-{first}")
        log.store.put(f"{parts_folder(log.config)}{part.name}", piece.raw)
        parts.append(part)
    index = LogIndex("q", moved, 0, (tuple(parts),) if parts else ())
    rest = Manifest.starting_at(moved, 0).append(entries[moved:])
    found = LogView(log, index, rest, 0, 3, "ingest/manifest")
    for time_ms in (0, 1_000, 1_001, 5_000, 5_001, 99_000):
        assert found.since(time_ms) == whole.since(time_ms)


def test_a_request_for_no_entries_reads_no_segment() -> None:
    gone = LogIndex("q", 20, 4, ((Part(0, 20, 0, 0, "gone"),),))
    assert view(4, gone, queued(20, 7)).entries(5, 0) == ()


def test_a_view_of_a_whole_log_has_the_epoch_and_the_path_of_the_manifest() -> None:
    fixture = LogFixture()
    fixture.append(30)
    fixture.queue.claim_epoch(None)
    found = fixture.view()
    assert (found.epoch, found.key) == (fixture.manifest().epoch, "ingest/manifest")
    assert found.epoch > 0


def test_a_view_ends_with_its_manifest_even_if_its_index_is_newer() -> None:
    fixture = LogFixture()
    fixture.append(60)
    before = fixture.manifest()
    fixture.append(60)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    index = log.need()
    assert index.end > before.next_sequence
    found = LogView.of(log, index, before)
    assert [each.sequence for each in found.entries(5)] == [*range(5, 60)]
    whole = LogView.of(log, index, fixture.manifest())
    assert [each.sequence for each in whole.entries(5)] == [*range(5, 120)]


def test_the_age_of_a_segment_is_the_age_of_its_oldest_name() -> None:
    index = LogIndex("q", 20, 0, ((Part(0, 8, 1_000, 0, "a"), Part(8, 20, 0, 0, "b")),))
    found = view(0, index, queued(20, 2))
    assert found.age_s(3_500) == found.age_s(3_500, 7) == 2.5
    assert found.age_s(500, 7) == 0.0
    assert found.age_s(3_500, 8) is None
    assert found.age_s(3_500, 20) == 2.5
    assert found.age_s(3_501, 21) == 2.5
    assert found.age_s(3_500, 22) is None
    assert view(0, LogIndex("q", 20, 0), queued(20, 2)).age_s(3_500, 3) is None
    assert view(0, LogIndex("q", 0, 0), queued(0, 2)).age_s(3_500) == 2.5


def test_a_location_is_found_in_segments_and_in_the_manifest() -> None:
    fixture = LogFixture()
    fixture.append(60)
    found = fixture.view()
    assert found.index.parts()[0].end <= 20 < found.manifest.first_sequence < 59
    assert [found.find(fixture.locations[at], 0) for at in (3, 19, 59)] == [3, 19, 59]
    assert found.find(fixture.locations[59], 59) == 59
    assert found.find(fixture.locations[3], 20) is None, "earlier segments are not read"
    assert found.starting_at(20).find(fixture.locations[3], 0) is None
    assert found.find("ingest/other.batch", 0) is None
