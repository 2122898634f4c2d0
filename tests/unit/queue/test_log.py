"""A queue as a log: moved entries, lookups, retention, and errors about damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import opendata_buffer.gc
from buffer_source.options import SourceOptions
from buffer_source.partitions import view_of
from opendata_buffer import (
    CommitStateUnknown,
    Consumer,
    ConsumerConfig,
    CorruptData,
    DataLoss,
    Fenced,
    InvalidInput,
    QueueReset,
    TransientStorageError,
    outcomes,
)
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue import log_index, reader_queue
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import Part
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.reader_admin import reset_reader, unregister
from tests.support.log_fixture import DAY_S, KEY, URL, WEEK_MS, LogFixture, read, small

__all__ = ["small"]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the collector delete segments that end only a few entries before the floor."""
    for module in (log_index, reader_queue, opendata_buffer.gc):
        monkeypatch.setattr(module, "REMEMBERED", 4)


def test_the_manifest_stays_short_and_every_reader_reads_everything() -> None:
    fixture = LogFixture()
    fixture.append(500)
    assert fixture.manifest().entry_count <= 24 + 1
    assert len(fixture.index().levels) >= 3, "the index has no page of pages"
    assert [e.location for e in fixture.view().entries()] == fixture.locations
    first, second = fixture.reader("first"), fixture.reader("second")
    assert read(first) == [*range(500)]
    assert read(second) == [*range(500)]
    first.close()
    fixture.append(1)
    assert read(fixture.reader("first")) == [500]


@pytest.mark.parametrize("sequence", [0, 1, 17, 150, 299])
def test_every_sequence_and_every_time_is_found(sequence: int) -> None:
    fixture = LogFixture()
    times = []
    for _ in range(300):
        fixture.runtime.advance(1)
        fixture.append(1)
        times.append(fixture.runtime.now_ms())
    view = fixture.view()
    (entry,) = view.entries(sequence, 1)
    assert (entry.sequence, entry.location) == (sequence, fixture.locations[sequence])
    assert view.since(times[sequence]) == sequence
    assert view.since(times[sequence] - 999) == sequence
    assert view.since(times[-1] + 1) == 300


def test_a_v1_producer_can_append_while_segments_are_cut() -> None:
    """OpenData's Rust producer reads, writes with If-Match, and starts again after a 412."""
    fixture = LogFixture()
    lost_races = 0
    for number in range(200):
        entry = fixture.entry()
        while True:
            found = fixture.store.get(KEY) if number else None
            manifest = Manifest.parse(found.data) if found else Manifest.empty()
            if number % 3 == 0 and number:
                fixture.append(1)  # another producer moves entries between the two requests
            after = manifest.append([entry]).raw
            if found is None:
                fixture.queue.append([entry])
                break
            outcome = fixture.store.put_if(KEY, after, found.version)
            if type(outcome).__name__ == "Applied":
                break
            lost_races += 1
            number = 1
    assert lost_races
    assert fixture.index().end > 100
    found_locations = [e.location for e in fixture.view().entries()]
    assert sorted(found_locations) == sorted(fixture.locations)
    assert read(fixture.reader("all")) == [*range(len(fixture.locations))]


def append_without_answer(
    fixture: LogFixture, meanwhile: Callable[[], None]
) -> tuple[NewEntry, int]:
    """Lose the answer of an append while others append 40 more.

    Returns:
        The entry and its sequence.
    """
    entry, other = fixture.entry(), fixture.writer()
    write, lost = fixture.store.put_if, []

    def put_if(key: str, data: bytes, condition: Any) -> Any:
        outcome = write(key, data, condition)
        if key != KEY or lost:
            return outcome
        lost.append(key)
        for _ in range(40):
            other.append([fixture.entry()])
        meanwhile()
        return outcomes.Unknown("the connection was reset")

    fixture.store.put_if = put_if  # type: ignore[method-assign]
    sequence = fixture.queue.append([entry])
    assert lost
    return entry, sequence


def test_an_append_whose_answer_was_lost_is_found_in_a_segment() -> None:
    """Another producer moves the entry out of the manifest before its own producer looks for it."""
    fixture = LogFixture()
    fixture.append(2)
    entry, sequence = append_without_answer(fixture, lambda: None)
    assert sequence == 2
    assert fixture.manifest().first_sequence > 2, (
        "the entry was not moved, so the test shows nothing"
    )
    assert [e.location for e in fixture.view().entries()].count(entry.location) == 1


def test_an_append_that_the_index_may_have_forgotten_is_not_repeated(forgetful: None) -> None:
    fixture = LogFixture()
    fixture.append(2)
    reader = fixture.reader("reader")

    def collect() -> None:
        read(reader)
        fixture.collector().run_once()

    with pytest.raises(CommitStateUnknown):
        append_without_answer(fixture, collect)
    assert fixture.index().floor == 43
    assert not any(each.first <= 2 for each in fixture.index().parts())


def test_an_append_that_cannot_be_looked_up_is_not_repeated() -> None:
    fixture = LogFixture()
    fixture.append(2)
    with pytest.raises(CommitStateUnknown):
        append_without_answer(fixture, lambda: fixture.store.put("ingest/_log.json", b"rubbish"))


def test_f45_a_recreated_queue_is_not_collected_by_the_old_index() -> None:
    fixture = LogFixture()
    fixture.append(60)
    read(fixture.reader("reader"))
    fixture.collect()
    fixture.store.delete_many([KEY])
    claim_for_writing(fixture.store, fixture.config, runtime=fixture.runtime, recreate=True)
    fixture.queue = fixture.writer()
    fixture.append(5)
    with pytest.raises(CorruptData, match="it was started over"):
        fixture.collect()
    assert {*fixture.locations[-5:]} <= {each.key for each in fixture.store.list("ingest/").objects}
    found = ReadOnlyReader(fixture.config, store=fixture.store, runtime=fixture.runtime)
    with pytest.raises(CorruptData, match="it was started over"):
        found.seek(None)
    options = SourceOptions.from_spark({"path": "/unused"})
    with pytest.raises(CorruptData, match="it was started over"):
        view_of(options, fixture.store, fixture.runtime)


def test_f46_running_processes_detect_a_restored_old_index_without_the_marker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = LogFixture()
    fixture.append(30)
    reader = fixture.reader("reader")
    copy = fixture.store.get("ingest/_log.json").data
    fixture.append(60)
    assert len(read(reader)) == 90
    fixture.store.put("ingest/_log.json", copy)
    marker = json.loads(fixture.store.get("ingest/_owner.json").data)
    del marker["index_changes"]
    fixture.store.put("ingest/_owner.json", json.dumps(marker).encode())
    fixture.runtime.advance(61)
    with pytest.raises(CorruptData, match="went backwards: it had"):
        reader.next_batch()
    caplog.clear()
    fixture.append(40)
    assert fixture.index().lost == ()
    warnings = [each for each in caplog.messages if "went backwards" in each]
    assert 1 <= len(warnings) <= 40 / Log.left_entries
    before = {each.key for each in fixture.store.list("").objects}
    fixture.runtime.advance(3_600)
    with pytest.raises(CorruptData, match="went backwards: it ends at"):
        fixture.collector().run_once()
    assert {each.key for each in fixture.store.list("").objects} == before


def test_a_segment_that_is_added_during_a_gap_check_is_not_mistaken_for_an_old_index() -> None:
    """A v1 consumer dequeues entries whose segment is stored but not yet in the index."""
    fixture = LogFixture()
    fixture.append(60)
    before, kept = fixture.index(), fixture.manifest()
    entries = kept.part(before.end, kept.next_sequence)
    name = f"{before.end:020d}-{kept.next_sequence:020d}-x.segment"
    taken = kept.drop_through(before.end)
    list_objects, listed = fixture.store.list, []

    def late(prefix: str, **options: Any) -> Any:
        found = list_objects(prefix, **options)
        if prefix == "ingest/_log/":
            listed.append(prefix)
            fixture.store.put(
                "ingest/_log.json", before.with_segment(Part.of(entries, name)).to_json()
            )
        return found

    log = Log(fixture.store, fixture.config, fixture.runtime)
    index = log.need()
    fixture.store.put(f"ingest/_log/{name}", entries.raw)
    fixture.store.list = late  # type: ignore[method-assign]
    with pytest.raises(TransientStorageError, match="changed while it was read"):
        log.check_gap(index, taken)
    assert listed
    log.check_gap(log.need(), taken)


def test_nothing_is_delivered_past_the_end_of_the_manifest_that_was_read() -> None:
    """The index is read after the manifest and may have more entries."""
    fixture = LogFixture()
    fixture.append(60)
    reader, other = fixture.reader("reader"), fixture.writer()
    more = [fixture.entry() for _ in range(100)]
    get, appended = fixture.store.get, []

    def late(key: str, **options: Any) -> Any:
        if key.endswith("_log.json") and not appended:
            appended.append(key)
            other.append(more)
        return get(key, **options)

    fixture.store.get = late  # type: ignore[method-assign]
    fixture.runtime.advance(61)
    found = reader.next_descriptors(1_000)
    assert appended
    reader.ack_through(found[-1].sequence)
    assert read(reader)[-1] == 159


def test_the_collector_waits_for_the_slowest_reader() -> None:
    fixture = LogFixture()
    slow, fast = fixture.reader("slow"), fixture.reader("fast")
    fixture.append(100)
    read(fast)
    assert fixture.collect() == 0
    assert read(slow, 40) == [*range(40)]
    fixture.runtime.advance(10)
    assert fixture.collect() > 0
    assert fixture.index().floor == 40
    there = {each.key for each in fixture.store.list("ingest/").objects}
    assert {*fixture.locations[40:]} <= there
    assert not {*fixture.locations[:10]} & there
    assert read(slow) == [*range(40, 100)]


def test_batches_within_the_retention_are_kept_after_all_readers_have_read_them() -> None:
    fixture = LogFixture(retention_ms=DAY_S * 1000)
    reader = fixture.reader("reader")
    fixture.append(40)
    fixture.runtime.advance(DAY_S / 2)
    fixture.append(40)
    assert len(read(reader)) == 80
    assert fixture.collect() == 0
    fixture.runtime.advance(DAY_S * 0.75)
    fixture.collect()
    assert 0 < fixture.index().floor <= 40
    replay = fixture.reader("late")
    assert read(replay)[-40:] == [*range(40, 80)]


@pytest.mark.parametrize("retention_ms", [None, 2 * WEEK_MS])
def test_retained_bytes_are_kept_after_all_readers_have_read_them(retention_ms: int | None) -> None:
    """With both limits set, the one that keeps less applies."""
    fixture = LogFixture(retention_ms=retention_ms, retention_bytes=200)
    reader = fixture.reader("reader")
    for _ in range(60):
        fixture.append(1)
        fixture.runtime.advance(600)
    assert len(read(reader)) == 60
    fixture.collect()  # measures the stored bytes and raises the floor
    assert fixture.collect() > 0
    first = fixture.index().floor
    size = fixture.kept_bytes() // (60 - first)
    assert 0 < first < 60
    assert 200 <= fixture.kept_bytes() <= 200 + 3 * size
    assert read(fixture.reader("late")) == [*range(first, 60)]


@pytest.mark.parametrize(("retention_ms", "floor"), [(None, 0), (DAY_S * 1000, 40)])
def test_a_byte_limit_above_the_stored_bytes_keeps_everything_unless_the_time_limit_ends(
    retention_ms: int | None, floor: int
) -> None:
    fixture = LogFixture(retention_ms=retention_ms, retention_bytes=10**9)
    fixture.append(40)
    assert len(read(fixture.reader("reader"))) == 40
    fixture.runtime.advance(2 * DAY_S)
    fixture.collect()
    assert (fixture.collect() > 0, fixture.index().floor) == (False, floor)


def test_a_reader_that_has_nothing_to_read_does_not_expire() -> None:
    fixture = LogFixture()
    fixture.append(3)
    idle = fixture.reader("idle")
    read(idle)
    for _ in range(40):
        fixture.runtime.advance(DAY_S / 2)
        assert idle.next_batch() is None
        fixture.collect()
    assert fixture.index().readers == ("idle",)


def test_a_second_consumer_of_a_reader_fences_the_first_and_no_other_reader() -> None:
    fixture = LogFixture()
    fixture.append(5)
    other = fixture.reader("other")
    first = fixture.reader("name")
    second = fixture.reader("name")
    with pytest.raises(Fenced, match=r"_readers/name.json"):
        read(first)
    assert read(second) == read(other) == [*range(5)]


def test_an_empty_poll_costs_one_request_and_so_does_an_acknowledgement() -> None:
    fixture = LogFixture()
    reader = fixture.reader("reader")
    fixture.append(1)
    batch = reader.next_batch()
    assert batch is not None
    fixture.store.requests.clear()
    reader.ack_through(batch.sequence)
    assert fixture.store.requests == {("put_if", "ingest/_readers/reader.json"): 1}
    fixture.store.requests.clear()
    assert reader.next_batch() is None
    assert fixture.store.requests == {("get", KEY): 1}


def test_a_consumer_without_a_name_is_refused_on_a_log() -> None:
    fixture = LogFixture()
    with pytest.raises(InvalidInput, match=r"is a log with named readers\. Add reader=NAME"):
        Consumer(ConsumerConfig(store=URL), store=fixture.store, runtime=fixture.runtime)


@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "\n", "-", "a" * 101])
def test_invalid_reader_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="use 1 to 100 letters"):
        ConsumerConfig(store=URL, reader=name)


def test_batches_that_a_v1_consumer_dequeued_are_named_and_segments_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = LogFixture()
    reader = fixture.reader("reader")
    fixture.append(60)
    end = fixture.index().end
    thief = fixture.writer()
    epoch = thief.claim_epoch(None).epoch
    taken = end + 2
    thief.dequeue(taken, epoch)
    assert read(reader, end) == [*range(end)]
    with pytest.raises(DataLoss, match="without knowing that it is a log"):
        read(reader)
    fixture.append(60)
    assert fixture.index().lost == ((end, taken + 1),)
    assert f"sequences {end} to {taken} were removed" in caplog.text
    again = fixture.reader("reader", allow_data_loss=True)
    assert read(again) == [*range(taken + 1, 120)]


@pytest.mark.parametrize(
    ("kind", "data"), [("segment", b"rubbish"), ("segment", Manifest.empty().raw), ("page", b"{}")]
)
def test_a_damaged_part_is_named_and_readers_can_read_before_and_after_it(
    kind: str, data: bytes
) -> None:
    fixture = LogFixture()
    fixture.append(200)
    part = next(p for p in fixture.index().parts() if p.name.endswith(kind))
    fixture.store.put(f"ingest/_log/{part.name}", data)
    reader = fixture.reader("reader")
    with pytest.raises(CorruptData, match=rf"{part.name}.*sequences {part.first} to"):
        read(reader)
    assert reader.last_acked_sequence == (part.first - 1 if part.first else None)
    reset_reader(fixture.view(), "other", part.end)
    assert read(fixture.reader("other")) == [*range(part.end, 200)]


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("readers", [1], "a list of names"),
        ("lost", [[1]], "a list of ranges"),
        ("levels", [[["a"]]], "a list of parts"),
        ("levels", [[[0, 8, 0, 0, "a"], [9, 40, 0, 0, "b"]]], "'b' does not begin at 8"),
        ("end", 41, "40, where the last segment ends"),
    ],
)
def test_an_index_that_breaks_the_format_is_refused(field: str, value: Any, wanted: str) -> None:
    index = json.loads(LogIndex("q", 40, 0, ((Part(0, 40, 0, 0, "a"),),)).to_json())
    with pytest.raises(CorruptData, match=wanted):
        LogIndex.from_json(json.dumps({**index, field: value}).encode())


def test_the_number_of_readers_of_a_log_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_queue, "MOST_READERS", 1)
    fixture = LogFixture()
    fixture.reader("one")
    with pytest.raises(InvalidInput, match=r"has 1 readers\. Delete some"):
        fixture.reader("two")


def test_a_deleted_reader_retains_nothing_and_its_consumer_is_refused() -> None:
    fixture = LogFixture()
    fixture.append(30)
    reader, other = fixture.reader("reader"), fixture.reader("other")
    read(other)
    assert fixture.collect() == 0
    unregister(fixture.store, fixture.view().log, "reader")
    fixture.runtime.advance(10)
    assert fixture.collect() == 30
    with pytest.raises(QueueReset, match="the reader was deleted"):
        reader.check_fence()
    with pytest.raises(InvalidInput, match="readers of this log: other"):
        unregister(fixture.store, fixture.view().log, "reader")


def test_a_batch_that_was_queued_twice_is_delivered_once_across_restarts() -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("reader"))
    fixture.queue.append([NewEntry(fixture.locations[3])])
    fixture.append(1)
    assert read(fixture.reader("reader")) == [41]


def test_a_position_from_the_target_system_wins_over_the_stored_one() -> None:
    fixture = LogFixture(retention_ms=WEEK_MS)
    fixture.append(60)
    assert read(fixture.reader("reader", 29)) == [*range(30, 60)]
    assert read(fixture.reader("reader", 9)) == [*range(10, 60)]
    with pytest.raises(QueueReset, match="ends at"):
        fixture.reader("reader", 60)


def test_a_reader_without_its_position_retains_everything_that_it_may_not_have_read() -> None:
    fixture = LogFixture()
    fixture.append(40)
    away, other = fixture.reader("away"), fixture.reader("other")
    assert len(read(away, 10)) == 10
    away.close()
    fixture.collect()
    read(other)
    fixture.store.delete_many(["ingest/_readers/away.json"])
    fixture.collect()
    assert fixture.index().readers == ("away", "other")
    assert read(fixture.reader("away")) == [*range(fixture.index().floor, 40)]
    assert fixture.index().floor <= 10


def test_an_index_is_put_back_only_over_the_one_that_was_read() -> None:
    fixture = LogFixture()
    fixture.append(40)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    old = log.need()
    restored = old.changed(floor=3)
    log.put_back(old, restored)
    assert log.need() == restored
    with pytest.raises(TransientStorageError, match=r"_log.json' in memory://log was changed mean"):
        log.put_back(old, old.changed(floor=5))
    assert fixture.index() == restored
    # The owner marker has it too, so an older copy is refused from now on.
    fixture.store.put("ingest/_log.json", old.to_json())
    with pytest.raises(
        CorruptData, match=r"_log.json' in memory://log went backwards: it had .* run"
    ):
        fixture.index()
