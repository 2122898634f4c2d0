"""A queue as a log: what is moved, found again, kept, and told when somebody breaks it."""

from __future__ import annotations

import json
from collections import Counter
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
from opendata_buffer.config import GarbageCollectorConfig, QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue import log as queue_log
from opendata_buffer.queue import reader_queue
from opendata_buffer.queue.log import Log, LogIndex, LogView, Part, chain_of, floor_of
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers, reset_reader, unregister
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.logs import open_view

URL = "memory://log"
KEY = "ingest/manifest"
DAY_S = 86_400
WEEK_MS = 7 * DAY_S * 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "most_entries", 16)
    monkeypatch.setattr(Log, "left_entries", 4)
    monkeypatch.setattr(queue_log, "FAN", 3)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are deleted that end a few entries before the floor."""
    for module in (queue_log, reader_queue, opendata_buffer.gc):
        monkeypatch.setattr(module, "REMEMBERED", 4)


class Counting(MemoryStore):
    """Counts requests, by kind and key."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        super().__init__("log", now_ms=now_ms)
        self.requests: Counter[tuple[str, str]] = Counter()

    def get(self, key: str, **options: Any) -> Any:
        self.requests["get", key] += 1
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: Any) -> Any:
        self.requests["put_if", key] += 1
        return super().put_if(key, data, condition)


class House:
    """A log in memory, with a clock that the test moves."""

    def __init__(
        self, *, retention_ms: int | None = None, retention_bytes: int | None = None
    ) -> None:
        self.runtime = ManualRuntime()
        self.store = Counting(self.runtime.now_ms)
        self.config = QueueConfig(store=URL)
        self.claim = claim_for_writing(self.store, self.config, runtime=self.runtime)
        kept = {"retention_ms": retention_ms, "retention_bytes": retention_bytes}
        enable_readers(self.store, self.config, self.claim, self.runtime, **kept)
        self.queue = self.writer()
        self.locations: list[str] = []

    def kept_bytes(self) -> int:
        """Bytes of the batches from the floor on."""
        kept = {*self.locations[self.index().floor :]}
        return sum(each.size for each in self.store.list("ingest/").objects if each.key in kept)

    def writer(self) -> Queue:
        claim = claim_for_writing(self.store, self.config, runtime=self.runtime)
        return Queue(self.store, self.config, runtime=self.runtime, role="test", claim=claim)

    def entry(self) -> NewEntry:
        location = f"ingest/{self.runtime.ulid()}.batch"
        self.store.put(location, encode_batch([b"%d" % len(self.locations)]))
        self.locations.append(location)
        return NewEntry(location)

    def append(self, count: int) -> None:
        for _ in range(count):
            self.runtime.advance(0.01)
            self.queue.append([self.entry()])

    def reader(self, name: str, position: int | None = None, **settings: Any) -> Consumer:
        gc = GarbageCollectorConfig(enabled=False)
        config = ConsumerConfig(store=URL, reader=name, gc=gc)
        return Consumer(config, position, store=self.store, runtime=self.runtime, **settings)

    def collector(self) -> GarbageCollector:
        return GarbageCollector(self.store, ConsumerConfig(store=URL), runtime=self.runtime)

    def collect(self) -> int:
        self.runtime.advance(3_600)  # longer than the grace period
        report = self.collector().run_once()
        assert report.plan.held is None
        return report.deleted

    def view(self) -> LogView:
        return open_view(self.store, self.config, self.runtime, self.manifest())

    def index(self) -> LogIndex:
        return Log(self.store, self.config, self.runtime).need()

    def manifest(self) -> Manifest:
        found = self.writer().read()
        assert found is not None
        return found


def read(consumer: Consumer, most: int = 10_000) -> list[int]:
    """Read and acknowledge; the sequences."""
    found: list[int] = []
    while len(found) < most and (batch := consumer.next_batch()) is not None:
        found.append(batch.sequence)
        batch.ack()
    consumer.flush()
    return found


def test_the_manifest_stays_short_and_every_reader_reads_everything() -> None:
    house = House()
    house.append(500)
    assert house.manifest().entry_count <= 24 + 1
    assert len(house.index().levels) >= 3, "no page of pages was made"
    assert [e.location for e in house.view().entries()] == house.locations
    first, second = house.reader("first"), house.reader("second")
    assert read(first) == [*range(500)]
    assert read(second) == [*range(500)]
    first.close()
    house.append(1)
    assert read(house.reader("first")) == [500]


@pytest.mark.parametrize("sequence", [0, 1, 17, 150, 299])
def test_any_sequence_and_any_time_is_found(sequence: int) -> None:
    house = House()
    times = []
    for _ in range(300):
        house.runtime.advance(1)
        house.append(1)
        times.append(house.runtime.now_ms())
    view = house.view()
    (entry,) = view.entries(sequence, 1)
    assert (entry.sequence, entry.location) == (sequence, house.locations[sequence])
    assert view.since(times[sequence]) == sequence
    assert view.since(times[sequence] - 999) == sequence
    assert view.since(times[-1] + 1) == 300


def test_a_v1_producer_goes_on_while_segments_are_cut() -> None:
    """The requests of OpenData's Rust producer: get, put with If-Match, and again after a 412."""
    house = House()
    lost_races = 0
    for number in range(200):
        entry = house.entry()
        while True:
            found = house.store.get(KEY) if number else None
            manifest = Manifest.parse(found.data) if found else Manifest.empty()
            if number % 3 == 0 and number:
                house.append(1)  # another producer, which moves, between its two requests
            after = manifest.append([entry]).raw
            if found is None:
                house.queue.append([entry])
                break
            outcome = house.store.put_if(KEY, after, found.version)
            if type(outcome).__name__ == "Applied":
                break
            lost_races += 1
            number = 1
    assert lost_races
    assert house.index().end > 100
    found_locations = [e.location for e in house.view().entries()]
    assert sorted(found_locations) == sorted(house.locations)
    assert read(house.reader("all")) == [*range(len(house.locations))]


def append_without_answer(house: House, meanwhile: Callable[[], None]) -> tuple[NewEntry, int]:
    """Append an entry whose answer is lost while others append 40 more; the entry, and where."""
    entry, other = house.entry(), house.writer()
    write, lost = house.store.put_if, []

    def put_if(key: str, data: bytes, condition: Any) -> Any:
        outcome = write(key, data, condition)
        if key != KEY or lost:
            return outcome
        lost.append(key)
        for _ in range(40):
            other.append([house.entry()])
        meanwhile()
        return outcomes.Unknown("the connection was reset")

    house.store.put_if = put_if  # type: ignore[method-assign]
    sequence = house.queue.append([entry])
    assert lost
    return entry, sequence


def test_an_append_whose_answer_was_lost_is_found_in_a_segment() -> None:
    """Others moved it before its producer looked: in the manifest it is found no more."""
    house = House()
    house.append(2)
    entry, sequence = append_without_answer(house, lambda: None)
    assert sequence == 2
    assert house.manifest().first_sequence > 2, "it was not moved: the test shows nothing"
    assert [e.location for e in house.view().entries()].count(entry.location) == 1


def test_an_append_that_the_index_may_have_forgotten_is_not_repeated(forgetful: None) -> None:
    house = House()
    house.append(2)
    reader = house.reader("reader")

    def collect() -> None:
        read(reader)
        house.collector().run_once()

    with pytest.raises(CommitStateUnknown):
        append_without_answer(house, collect)
    assert house.index().floor == 43
    assert not any(each.first <= 2 for each in house.index().parts())


def test_an_append_that_cannot_be_looked_for_is_not_repeated() -> None:
    house = House()
    house.append(2)
    with pytest.raises(CommitStateUnknown):
        append_without_answer(house, lambda: house.store.put("ingest/_log.json", b"rubbish"))


def test_f45_a_queue_that_was_started_over_is_not_collected_by_the_old_index() -> None:
    house = House()
    house.append(60)
    read(house.reader("reader"))
    house.collect()
    house.store.delete_many([KEY])
    claim_for_writing(house.store, house.config, runtime=house.runtime, recreate=True)
    house.queue = house.writer()
    house.append(5)
    with pytest.raises(CorruptData, match="it was started over"):
        house.collect()
    assert {*house.locations[-5:]} <= {each.key for each in house.store.list("ingest/").objects}
    found = ReadOnlyReader(house.config, store=house.store, runtime=house.runtime)
    with pytest.raises(CorruptData, match="it was started over"):
        found.seek(None)
    options = SourceOptions.from_spark({"path": "/unused"})
    with pytest.raises(CorruptData, match="it was started over"):
        view_of(options, house.store, house.runtime)


def test_f46_processes_that_run_notice_an_old_index_without_the_marker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House()
    house.append(30)
    reader = house.reader("reader")
    copy = house.store.get("ingest/_log.json").data
    house.append(60)
    assert len(read(reader)) == 90
    house.store.put("ingest/_log.json", copy)
    marker = json.loads(house.store.get("ingest/_owner.json").data)
    del marker["index_changes"]
    house.store.put("ingest/_owner.json", json.dumps(marker).encode())
    house.runtime.advance(61)
    with pytest.raises(CorruptData, match="went backwards: it had"):
        reader.next_batch()
    caplog.clear()
    house.append(40)
    assert house.index().lost == ()
    warnings = [each for each in caplog.messages if "went backwards" in each]
    assert 1 <= len(warnings) <= 40 / Log.left_entries
    before = {each.key for each in house.store.list("").objects}
    house.runtime.advance(3_600)
    with pytest.raises(CorruptData, match="went backwards: it ends at"):
        house.collector().run_once()
    assert {each.key for each in house.store.list("").objects} == before


def test_a_segment_that_is_named_while_a_reader_looks_makes_no_old_index() -> None:
    """A v1 consumer takes entries that a mover has stored and not yet named."""
    house = House()
    house.append(60)
    before, kept = house.index(), house.manifest()
    entries = kept.part(before.end, kept.next_sequence)
    name = f"{before.end:020d}-{kept.next_sequence:020d}-x.segment"
    taken = kept.drop_through(before.end)
    list_objects, listed = house.store.list, []

    def late(prefix: str, **options: Any) -> Any:
        found = list_objects(prefix, **options)
        if prefix == "ingest/_log/":
            listed.append(prefix)
            house.store.put(
                "ingest/_log.json", before.with_segment(Part.of(entries, name)).to_json()
            )
        return found

    log = Log(house.store, house.config, house.runtime)
    index = log.need()
    house.store.put(f"ingest/_log/{name}", entries.raw)
    house.store.list = late  # type: ignore[method-assign]
    with pytest.raises(TransientStorageError, match="changed while it was read"):
        log.check_gap(index, taken)
    assert listed
    log.check_gap(log.need(), taken)


def test_nothing_is_handed_out_beyond_the_end_of_the_manifest_that_was_read() -> None:
    """The index that was read behind it may have more."""
    house = House()
    house.append(60)
    reader, other = house.reader("reader"), house.writer()
    more = [house.entry() for _ in range(100)]
    get, appended = house.store.get, []

    def late(key: str, **options: Any) -> Any:
        if key.endswith("_log.json") and not appended:
            appended.append(key)
            other.append(more)
        return get(key, **options)

    house.store.get = late  # type: ignore[method-assign]
    house.runtime.advance(61)
    found = reader.next_descriptors(1_000)
    assert appended
    reader.ack_through(found[-1].sequence)
    assert read(reader)[-1] == 159


def test_the_collector_waits_for_the_slowest_reader() -> None:
    house = House()
    slow, fast = house.reader("slow"), house.reader("fast")
    house.append(100)
    read(fast)
    assert house.collect() == 0
    assert read(slow, 40) == [*range(40)]
    house.runtime.advance(10)
    assert house.collect() > 0
    assert house.index().floor == 40
    there = {each.key for each in house.store.list("ingest/").objects}
    assert {*house.locations[40:]} <= there
    assert not {*house.locations[:10]} & there
    assert read(slow) == [*range(40, 100)]


def test_what_is_within_the_retention_stays_though_all_have_read_it() -> None:
    house = House(retention_ms=DAY_S * 1000)
    reader = house.reader("reader")
    house.append(40)
    house.runtime.advance(DAY_S / 2)
    house.append(40)
    assert len(read(reader)) == 80
    assert house.collect() == 0
    house.runtime.advance(DAY_S * 0.75)
    house.collect()
    assert 0 < house.index().floor <= 40
    replay = house.reader("late")
    assert read(replay)[-40:] == [*range(40, 80)]


@pytest.mark.parametrize("retention_ms", [None, 2 * WEEK_MS])
def test_so_many_bytes_stay_though_all_have_read_them(retention_ms: int | None) -> None:
    """Also where a time would keep more: of both the one counts that keeps less."""
    house = House(retention_ms=retention_ms, retention_bytes=200)
    reader = house.reader("reader")
    for _ in range(60):
        house.append(1)
        house.runtime.advance(600)
    assert len(read(reader)) == 60
    house.collect()  # sees how much there is, and raises the floor
    assert house.collect() > 0
    first = house.index().floor
    size = house.kept_bytes() // (60 - first)
    assert 0 < first < 60
    assert 200 <= house.kept_bytes() <= 200 + 3 * size
    assert read(house.reader("late")) == [*range(first, 60)]


@pytest.mark.parametrize(("retention_ms", "floor"), [(None, 0), (DAY_S * 1000, 40)])
def test_bytes_that_are_not_there_yet_keep_all_unless_a_time_keeps_less(
    retention_ms: int | None, floor: int
) -> None:
    house = House(retention_ms=retention_ms, retention_bytes=10**9)
    house.append(40)
    assert len(read(house.reader("reader"))) == 40
    house.runtime.advance(2 * DAY_S)
    house.collect()
    assert (house.collect() > 0, house.index().floor) == (False, floor)


def test_a_reader_that_has_nothing_to_read_does_not_expire() -> None:
    house = House()
    house.append(3)
    idle = house.reader("idle")
    read(idle)
    for _ in range(40):
        house.runtime.advance(DAY_S / 2)
        assert idle.next_batch() is None
        house.collect()
    assert house.index().readers == ("idle",)


def test_two_of_one_name_fence_each_other_and_two_names_never_notice() -> None:
    house = House()
    house.append(5)
    other = house.reader("other")
    first = house.reader("name")
    second = house.reader("name")
    with pytest.raises(Fenced, match=r"_readers/name.json"):
        read(first)
    assert read(second) == read(other) == [*range(5)]


def test_a_look_that_finds_nothing_is_one_request_and_an_acknowledgement_one_more() -> None:
    house = House()
    reader = house.reader("reader")
    house.append(1)
    batch = reader.next_batch()
    assert batch is not None
    house.store.requests.clear()
    reader.ack_through(batch.sequence)
    assert house.store.requests == {("put_if", "ingest/_readers/reader.json"): 1}
    house.store.requests.clear()
    assert reader.next_batch() is None
    assert house.store.requests == {("get", KEY): 1}


def test_a_consumer_without_a_name_is_refused_on_a_log() -> None:
    house = House()
    with pytest.raises(InvalidInput, match="is a log with named readers: add reader=NAME"):
        Consumer(ConsumerConfig(store=URL), store=house.store, runtime=house.runtime)


@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "\n", "-", "a" * 101])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="use 1 to 100 letters"):
        ConsumerConfig(store=URL, reader=name)


def test_what_a_foreign_consumer_takes_is_named_and_segments_are_not_touched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House()
    reader = house.reader("reader")
    house.append(60)
    end = house.index().end
    thief = house.writer()
    epoch = thief.claim_epoch(None).epoch
    taken = end + 2
    thief.dequeue(taken, epoch)
    assert read(reader, end) == [*range(end)]
    with pytest.raises(DataLoss, match="without knowing that it is a log"):
        read(reader)
    house.append(60)
    assert house.index().lost == ((end, taken + 1),)
    assert f"sequences {end} to {taken} were removed" in caplog.text
    again = house.reader("reader", allow_data_loss=True)
    assert read(again) == [*range(taken + 1, 120)]


@pytest.mark.parametrize(
    ("kind", "data"), [("segment", b"rubbish"), ("segment", Manifest.empty().raw), ("page", b"{}")]
)
def test_a_damaged_part_is_named_and_readers_go_on_before_and_behind_it(
    kind: str, data: bytes
) -> None:
    house = House()
    house.append(200)
    part = next(p for p in house.index().parts() if p.name.endswith(kind))
    house.store.put(f"ingest/_log/{part.name}", data)
    reader = house.reader("reader")
    with pytest.raises(CorruptData, match=rf"{part.name}.*sequences {part.first} to"):
        read(reader)
    assert reader.last_acked_sequence == (part.first - 1 if part.first else None)
    reset_reader(house.view(), "other", part.end)
    assert read(house.reader("other")) == [*range(part.end, 200)]


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


def test_a_log_takes_so_many_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_queue, "MOST_READERS", 1)
    house = House()
    house.reader("one")
    with pytest.raises(InvalidInput, match="has 1 readers: delete some"):
        house.reader("two")


def test_a_deleted_reader_holds_nothing_and_its_consumer_is_refused() -> None:
    house = House()
    house.append(30)
    reader, other = house.reader("reader"), house.reader("other")
    read(other)
    assert house.collect() == 0
    unregister(house.store, house.view().log, "reader")
    house.runtime.advance(10)
    assert house.collect() == 30
    with pytest.raises(QueueReset, match="the reader was deleted"):
        reader.check_fence()
    with pytest.raises(InvalidInput, match="readers of this log: other"):
        unregister(house.store, house.view().log, "reader")


def test_a_batch_that_was_queued_twice_is_delivered_once_across_restarts() -> None:
    house = House()
    house.append(40)
    read(house.reader("reader"))
    house.queue.append([NewEntry(house.locations[3])])
    house.append(1)
    assert read(house.reader("reader")) == [41]


def test_a_position_of_the_target_system_is_the_truth_forward_and_back() -> None:
    house = House(retention_ms=WEEK_MS)
    house.append(60)
    assert read(house.reader("reader", 29)) == [*range(30, 60)]
    assert read(house.reader("reader", 9)) == [*range(10, 60)]
    with pytest.raises(QueueReset, match="ends at"):
        house.reader("reader", 60)


def test_a_reader_whose_position_is_gone_holds_what_it_may_not_have_read() -> None:
    house = House()
    house.append(40)
    away, other = house.reader("away"), house.reader("other")
    assert len(read(away, 10)) == 10
    away.close()
    house.collect()
    read(other)
    house.store.delete_many(["ingest/_readers/away.json"])
    house.collect()
    assert house.index().readers == ("away", "other")
    assert read(house.reader("away")) == [*range(house.index().floor, 40)]
    assert house.index().floor <= 10


# The index and the floor, as functions of values

INDEX = LogIndex("q", end=80, floor=10)


@pytest.mark.parametrize(
    ("positions", "retained_from", "floor", "why"),
    [
        ({}, None, 10, "without readers and retention nothing goes"),
        ({"a": 30}, None, 30, "all readers have acknowledged"),
        ({"a": 30, "b": 20}, None, 20, "the slowest reader holds"),
        ({"a": 30, "b": 20}, 15, 15, "the retention holds, too"),
        ({"a": 30}, 50, 30, "a retention that is over lets nothing go that is not read"),
        ({}, 50, 50, "without readers the retention decides alone"),
        ({"a": 100}, None, 100, "all is read"),
        ({"a": 120}, 130, 100, "never beyond the end"),
        ({"a": 5}, None, 10, "a floor never falls"),
        ({}, 5, 10, "nor for a longer retention"),
    ],
)
def test_the_floor_is_the_lowest_of_what_readers_and_retention_need(
    positions: dict[str, int], retained_from: int | None, floor: int, why: str
) -> None:
    assert floor_of(INDEX, positions, 100, retained_from) == floor, why


@pytest.mark.parametrize(
    ("spans", "end", "chain"),
    [
        ([], 0, []),
        ([(0, 10), (10, 20)], 20, [(0, 10), (10, 20)]),
        ([(0, 10), (0, 15), (10, 20)], 20, [(0, 10), (10, 20)]),  # a lost race
        ([(0, 10), (5, 12), (10, 20), (20, 25)], 25, [(0, 10), (10, 20), (20, 25)]),  # overlapping
        ([(5, 30), (14, 28), (28, 42)], 42, [(14, 28), (28, 42)]),  # older
        ([(0, 10), (14, 20), (15, 18)], 20, [(0, 10), (14, 20)]),  # a gap
        ([(0, 10), (10, 20), (20, 30)], 15, [(0, 10), (10, 20)]),  # in the manifest, too
    ],
)
def test_segments_of_a_lost_index_are_put_in_a_row(
    spans: list[tuple[int, int]], end: int, chain: list[tuple[int, int]]
) -> None:
    assert chain_of(spans, end) == chain
