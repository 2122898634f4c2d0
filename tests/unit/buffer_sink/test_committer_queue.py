"""The commit to one queue: decisions on a manifest, records, repeats, uploads that grow old."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from buffer_sink.committer import (
    AlreadyDone,
    Decision,
    Group,
    QueueCommitter,
    Separate,
    UploadAges,
    UploadedBatch,
    decide,
    is_queued,
)
from buffer_sink.options import SinkOptions
from opendata_buffer import outcomes
from opendata_buffer.admin.rebuild import rebuild
from opendata_buffer.admin.target import Target
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.errors import (
    CommitStateUnknown,
    InvalidInput,
    PermanentStorageError,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.batch import Transaction, batch_key, parse_location
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.gc import GarbageCollector, Queued, plan
from opendata_buffer.queue.ownership import change_grace_period, check_owner
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.base import Listing, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.transactions import CommitRecord
from tests.unit.buffer_sink.target_queue import CONFIG, PREFIX, RECORD, World
from tests.unit.scripted import (
    ScriptedStore,
    applied,
    applied_answer_lost,
    before,
    not_applied_answer_lost,
    then,
)

ULIDS = [f"01JD0000000000000000000{number:03}" for number in range(100)]


def batch_entry(number: int, batch: int | None = None, app: str = "q") -> NewEntry:
    txn = None if batch is None else Transaction(app, batch)
    return NewEntry(batch_key(PREFIX, ULIDS[number], txn), (Metadata(0, 5, b""),))


def decision(manifest: Manifest, record: CommitRecord | None, batch: int) -> Decision | None:
    return decide(manifest, record, Transaction("q", batch), prefix=PREFIX, key="m")


def test_a_half_dequeued_batch_is_still_seen() -> None:
    manifest = (
        Manifest.empty().append([batch_entry(0, batch=3), batch_entry(1, batch=3)]).drop_through(0)
    )
    assert decision(manifest, None, 3) == AlreadyDone((batch_entry(1, batch=3).location,))


def test_a_separator_is_needed_only_when_our_entries_may_have_been_dequeued_unseen() -> None:
    full = Manifest.empty().append([batch_entry(0, batch=0), batch_entry(1), batch_entry(2)])
    drained = full.drop_through(2)
    # Batch 0 ended at sequence 0; 1 and 2 came after, and one of them might be batch 1.
    assert decision(drained, CommitRecord(batch=0, next_sequence=1), 1) == Separate()
    # Nothing came after batch 0, so nothing is hidden.
    assert decision(drained, CommitRecord(batch=0, next_sequence=3), 1) is None
    # Without a record anything may be hidden.
    assert decision(drained, None, 1) == Separate()
    # An entry that is still queued stands in between already.
    assert decision(full.drop_through(1), None, 1) is None


def test_f4_a_queue_shorter_than_the_record_is_refused() -> None:
    record = CommitRecord(batch=3, next_sequence=7)
    with pytest.raises(QueueReset, match=r"up to sequence 6, but manifest 'm' ends at -1"):
        decision(Manifest.empty(), record, 4)


def test_a_payload_that_looks_like_a_location_is_not_one() -> None:
    forged = batch_key(PREFIX, ULIDS[1], Transaction("q", 99)).encode()
    # The two bytes before the text are its length, as before a location.
    payload = len(forged).to_bytes(2, "little") + forged
    real = batch_key(PREFIX, ULIDS[0], Transaction("q", 1))
    manifest = Manifest.empty().append([NewEntry(real, (Metadata(0, 0, payload),))])
    assert not is_queued(manifest, PREFIX, Transaction("q", 2))
    assert is_queued(manifest, PREFIX, Transaction("q", 1))


def test_all_batches_enter_the_queue_in_one_write() -> None:
    world = World(ScriptedStore())
    group = world.group(0, b"a", b"b", b"c")
    assert world.driver().append(group)
    entries = world.manifest.entries()
    assert tuple(each.location for each in entries) == group.locations
    assert [each.sequence for each in entries] == [0, 1, 2]
    assert entries[0].metadata == (Metadata(0, 7, b""),)
    # The owner marker (by the test), the manifest, its watermark in the marker, the record.
    assert world.store.puts == 4
    record = "p/app=q/_commit.json"
    assert world.store.get(record).data == CommitRecord(0, 3).to_json()
    assert parse_location(record, PREFIX) is None, "the collector deletes what is named as a batch"


def test_a_write_without_rows_touches_nothing() -> None:
    world = World(ScriptedStore())
    puts = world.store.puts
    assert not world.driver().append(None)
    assert world.store.puts == puts
    assert world.queue().read() is None


def test_two_drivers_that_commit_one_batch_at_once() -> None:
    world = World(ScriptedStore())
    zombie, driver = world.driver(), world.driver()
    late, group = world.group(0, b"a"), world.group(0, b"a")
    # The zombie has decided to append; before its write lands the new driver commits.
    world.store.script = [before(applied, lambda _: driver.append(group))]
    assert not zombie.append(late)
    assert world.manifest.locations() == list(group.locations)


def test_a_zombie_never_lowers_the_record() -> None:
    world = World(ScriptedStore())
    zombie, driver = world.driver(), world.driver()
    first = world.group(0, b"a")
    # Between the zombie's append and its record the other driver writes batch 1.
    world.store.script = [then(applied, lambda _: driver.append(world.group(1, b"b")))]
    assert zombie.append(first)
    assert CommitRecord.from_json(world.store.get(RECORD).data).batch == 1


def test_a_lost_answer_and_a_fast_consumer_is_an_unknown_outcome_until_a_restart() -> None:
    world = World(ScriptedStore())
    world.store.script = [then(applied_answer_lost, lambda _: world.drain())]
    with pytest.raises(CommitStateUnknown) as caught:
        world.driver().append(world.group(0, b"a"))
    assert "Spark repeats the batch 0" in "".join(caught.value.__notes__)
    # What Spark does next: new tasks, the same batch.
    assert world.driver().append(world.group(0, b"a"))
    assert world.driver().append(world.group(1, b"b"))
    world.drain()
    assert world.read == [b"a", b"b"]


def refuse(*_: Any) -> PutOutcome:
    raise PermanentStorageError("403")


@pytest.mark.parametrize(
    ("answer", "warns"),
    [
        (not_applied_answer_lost, True),
        (lambda *_: outcomes.Conflict(), True),
        (refuse, True),
        (applied_answer_lost, False),
    ],
)
def test_a_record_that_cannot_be_written_fails_no_commit(
    answer: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def write(store: ScriptedStore, key: str, *change: Any) -> PutOutcome:
        return (answer if key == RECORD else applied)(store, key, *change)

    world = World(ScriptedStore())
    world.store.script = [write] * 1_000
    assert world.driver().append(world.group(0, b"a"))
    assert (f"commit record {RECORD} was not written" in caplog.text) == warns
    world.store.script.clear()
    assert not world.driver().append(world.group(0, b"a"))
    assert world.driver().append(world.group(1, b"b"))
    world.drain()
    assert world.taken == [b"a", b"b"]


def test_f4_a_write_outside_of_a_query_lets_the_marker_know_how_far_the_queue_got() -> None:
    world = World()
    for batch in range(3):
        world.driver().append(world.group(batch, b"a", query="one"))
    noted = check_owner(world.store, CONFIG).watermark.next_sequence
    assert noted == 1, "a query notes its first batch, and then seldom"
    world.driver().append(world.group(None, b"b"))
    assert check_owner(world.store, CONFIG).watermark.next_sequence == 4


def test_a_record_newer_than_the_remembered_manifest_does_not_accuse_the_queue() -> None:
    world = World()
    driver = world.driver()
    driver.append(world.group(0, b"a"))
    world.driver().append(world.group(1, b"b"))
    # The first driver still remembers the manifest of batch 0.
    assert driver.append(world.group(2, b"c"))
    world.drain()
    assert world.taken == [b"a", b"b", b"c"]


def test_f5_a_young_write_is_committed_without_a_listing() -> None:
    def refuse_listing(prefix: str, **options: Any) -> Any:
        raise AssertionError("listed")

    world = World()
    group = world.group(0, b"a", b"b")
    world.runtime.advance(300)
    world.store.list = refuse_listing
    assert world.driver().append(group)


def test_f5_a_long_write_whose_uploads_are_young_is_committed() -> None:
    world = World()
    planned = Moment.now(world.runtime)
    world.runtime.advance(3_000)
    group = world.group(0, b"a")
    assert world.driver().append(Group(planned, group.uploads, group.transaction))


@pytest.mark.parametrize("batch", [0, None])
@pytest.mark.parametrize("is_old", [False, True])
def test_f5_old_or_deleted_uploads_are_not_appended(batch: int | None, is_old: bool) -> None:
    world = World()
    planned = Moment.now(world.runtime)
    world.runtime.advance(0 if is_old else 3_000)
    group = replace(world.group(batch, b"a", b"b"), planned=planned)
    if is_old:
        world.runtime.advance(301)
    else:
        world.store.delete_many([group.uploads[1].location])
    with pytest.raises(TransientStorageError, match=r"it may take 21600 s .*Nothing was appended"):
        world.driver().append(group)
    assert world.queue().read() is None


def pause(runtime: ManualRuntime, wall_s: int = 601, monotonic_s: int = 601) -> None:
    now_ms = runtime.now_ms()
    runtime.advance(monotonic_s)
    runtime.set_wall_clock(now_ms + wall_s * 1000)


pause_and_set_the_clock_back = partial(pause, wall_s=0)
suspend = partial(pause, monotonic_s=0)  # the monotonic clock stops with the machine


class Pausing(MemoryStore):
    """Freezes the driver when it reads an object; the store's own clock goes on."""

    def __init__(
        self,
        happens: Callable[[ManualRuntime], None],
        key: str = CONFIG.manifest_path,
        times: int = 100,
    ) -> None:
        self.runtime = ManualRuntime()
        self._happens = happens
        self._key = key
        self._times = times
        self._clock_ms = self.runtime.now_ms()
        super().__init__(now_ms=lambda: self._clock_ms)

    def get(self, key: str, **options: Any) -> Any:
        if key == self._key and self._times:
            self._times -= 1
            self._happens(self.runtime)
            self._clock_ms += 601_000
        return super().get(key, **options)


@pytest.mark.parametrize(
    ("batch", "key"), [(0, CONFIG.manifest_path), (None, CONFIG.manifest_path), (0, RECORD)]
)
@pytest.mark.parametrize("happens", [pause, pause_and_set_the_clock_back, suspend])
def test_f5_f6_a_driver_paused_between_read_and_write_does_not_append(
    happens: Callable[[ManualRuntime], None], batch: int | None, key: str
) -> None:
    world = World(store := Pausing(happens, key), store.runtime)
    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        world.driver().append(world.group(batch, b"a"))
    assert not world.manifest.entry_count


def test_f5_a_suspended_driver_appends_what_is_named_far_enough_ahead() -> None:
    # The first time when the queue is claimed, the second between read and write.
    world = World(store := Pausing(suspend, times=2), store.runtime)
    assert world.driver().append(world.group(0, b"a", ahead_s=6 * 3600))
    world.drain()
    assert world.read == [b"a"]


class FrozenWrite(MemoryStore):
    """The next manifest write is under way for 20 minutes; the collector may come by meanwhile."""

    def __init__(self, runtime: ManualRuntime, collected: int) -> None:
        super().__init__(now_ms=runtime.now_ms)
        self._runtime = runtime
        self._collected = collected
        self.frozen = False

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if key == CONFIG.manifest_path and not self.frozen:
            self.frozen = True
            self._runtime.advance(1200)
            self.delete_many(batches_in(self)[: self._collected])
        return super().put_if(key, data, condition)


def batches_in(store: MemoryStore) -> list[str]:
    keys = [each.key for each in store.list(PREFIX).objects]
    return [key for key in keys if parse_location(key, PREFIX) is not None]


def frozen_world(collected: int) -> World:
    world = World()
    world.store = FrozenWrite(world.runtime, collected)
    return world


def test_f5_an_append_that_landed_late_is_committed_once_no_collector_deletes_its_objects() -> None:
    world = frozen_world(collected=0)
    assert world.driver().append(world.group(3, b"a"))
    # A collector that looked before may start deletes for a quarter of the grace period, and its
    # last request may take 60 s.
    assert world.runtime.slept == [210]
    world.drain()
    assert world.read == [b"a"]


def test_f5_an_append_that_landed_late_without_its_objects_is_written_again() -> None:
    world = frozen_world(collected=1)
    with pytest.raises(CommitStateUnknown, match="later than the collector's grace period"):
        world.driver().append(world.group(3, b"a"))
    # Spark repeats the batch. It is queued, and cannot be read: that is not committed.
    assert world.driver().append(world.group(3, b"a"))
    torn, separator, again = world.manifest.entries()
    assert "/app=" not in separator.location
    passes = TransactionFilter(PREFIX)
    passes.skip(torn.sequence, torn.location)
    assert passes.offer(separator.sequence, separator.location)
    assert passes.offer(again.sequence, again.location)
    assert not world.driver().append(world.group(3, b"a"))


def test_f5_a_torn_write_that_is_skipped_during_its_repeat_is_written_again() -> None:
    class Overtaken(FrozenWrite):
        def list(self, prefix: str, **options: Any) -> Listing:
            if self.frozen and world.manifest.entry_count:
                queue = world.queue()
                epoch = queue.claim_epoch(None).epoch
                for entry in world.manifest.entries():
                    world.passes.skip(entry.sequence, entry.location)
                    queue.dequeue(entry.sequence, epoch)
            return super().list(prefix, **options)

    world = World()
    world.store = Overtaken(world.runtime, collected=0)
    group = world.group(3, b"a")
    world.queue().append(group.entries)
    world.store.delete_many(group.locations)
    world.store.frozen = True
    assert world.driver().append(world.group(3, b"a"))
    world.drain()
    assert world.read == [b"a"]


@pytest.mark.parametrize(
    ("age_s", "collected", "waits"), [(600, False, []), (601, False, [210]), (601, True, [210])]
)
def test_f5_a_repeat_waits_for_a_collector_that_may_not_know_the_queued_one(
    monkeypatch: pytest.MonkeyPatch, age_s: float, collected: bool, waits: list[float]
) -> None:
    world = World()
    group = world.group(3, b"a")
    world.runtime.advance(age_s)
    world.queue().append(group.entries)
    sleep = world.runtime.sleep

    def sleep_and_collect(seconds: float) -> None:
        sleep(seconds)
        if collected:
            world.store.delete_many(group.locations)

    monkeypatch.setattr(world.runtime, "sleep", sleep_and_collect)
    assert world.driver().append(world.group(3, b"a")) == collected
    assert world.runtime.slept == waits


def test_f5_a_write_without_identity_that_landed_late_without_its_objects_is_unknown() -> None:
    world = frozen_world(collected=1)
    group = world.group(None, b"a", b"b")
    with pytest.raises(CommitStateUnknown, match="later than the collector's grace") as caught:
        world.driver().append(group)
    assert (caught.value.sequence, caught.value.next_sequence) == (0, 2)
    assert caught.value.locations == group.locations


def test_f6_a_driver_clock_that_was_set_back_does_not_hide_age() -> None:
    world = World(MemoryStore(now_ms=(clock := ManualRuntime()).now_ms))
    group = world.group(0, b"a")
    clock.advance(700)
    world.runtime.set_wall_clock(0)
    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        world.driver().append(group)


# One query per app id.


def test_a_deleted_checkpoint_with_the_same_app_id_is_refused_and_loses_nothing() -> None:
    world = World()
    for batch in range(3):
        world.driver().append(world.group(batch, b"old", query="one"))
    world.drain()
    with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
        world.driver().append(world.group(0, b"new", query="two"))
    # With an app id of its own it goes on, and every micro-batch arrives.
    assert world.driver().append(world.group(0, b"new", app="q2", query="two"))
    world.drain()
    assert world.read == [b"old", b"old", b"old", b"new"]


def test_of_two_queries_that_begin_at_once_one_is_refused() -> None:
    world = World(ScriptedStore())
    first, second = (world.group(0, b"a", query=query) for query in ("one", "two"))
    # It has read that there is no record; before its claim lands, the other one's does.
    world.store.script = [before(applied, lambda _: world.driver().append(first))]
    with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
        world.driver().append(second)
    assert world.manifest.locations() == list(first.locations)


def test_a_claim_that_cannot_be_written_stops_the_append() -> None:
    world = World()
    world.store.put_if = lambda *_: outcomes.Unknown("no answer")
    with pytest.raises(TransientStorageError, match=r"commit record.*Nothing was appended"):
        world.driver().append(world.group(0, b"a", query="one"))


def test_a_repeat_within_one_query_is_a_warning_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.driver().append(world.group(7, b"a", b"b", query="one"))
    assert not world.driver().append(world.group(7, b"a", b"b", query="one"))
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "batch 7 of app q was committed before: 2 records in 2 batches" in warning.getMessage()


# Writes that take longer than the grace period.


@pytest.mark.parametrize("batch", [0, None])
def test_f5_a_micro_batch_of_three_grace_periods_gets_through(batch: int | None) -> None:
    world = World()
    collector = GarbageCollector(
        world.store, ConsumerConfig(store="memory://x", data_path_prefix=PREFIX),
        runtime=world.runtime,
    )  # fmt: skip
    world.driver().append(world.group(None, b"before"))
    planned = Moment.now(world.runtime)
    uploads: tuple[UploadedBatch, ...] = ()
    for minute in range(30):
        part = world.group(batch, f"{minute}".encode(), ahead_s=6 * 3600)
        uploads += part.uploads
        world.runtime.advance(60)
        collector.run_once()
    txn = None if batch is None else Transaction("q", batch)
    assert world.driver().append(Group(planned, uploads, txn))
    world.drain()
    assert world.read == [b"before", *(f"{minute}".encode() for minute in range(30))]
    # Once it is over, nothing of it is kept for ever.
    world.runtime.advance(6 * 3600 + 601)
    collector.run_once()
    assert not batches_in(world.store)


@pytest.mark.parametrize("own_ms", [None, 60_000_000])
def test_f5_a_write_goes_by_the_grace_period_of_its_queue(own_ms: int | None) -> None:
    world = World()
    change_grace_period(world.store, CONFIG, world.runtime, 100_000)
    options = SinkOptions(queue=CONFIG, grace_ms=own_ms)
    driver = QueueCommitter(world.store, options, world.runtime)
    assert driver.append(world.group(0, b"young"))
    old = world.group(1, b"old")
    world.runtime.advance(51)
    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        driver.append(old)
    # An append that races for longer would land behind the grace period.
    assert driver._queues[CONFIG.manifest_path]._config.timeout_ms == 50_000


# How long uploads are safe, as the collector judges them.


def ages(world: World) -> UploadAges:
    return UploadAges(world.store, SinkOptions(queue=CONFIG), world.runtime)


@pytest.mark.parametrize("grace_periods", [1, 3, 6])
def test_f5_a_write_of_several_grace_periods_is_safe_as_long_as_its_names_say(
    grace_periods: int,
) -> None:
    world = World()
    group = world.group(None, b"a", ahead_s=3_600)
    world.runtime.advance(grace_periods * 600)
    oldest = ages(world).oldest(group)
    # The collector sees it the same way, until the very moment when they expire.
    for seconds, collected in ((3_600 + 600 - grace_periods * 600, 0), (1, 1)):
        world.runtime.advance(seconds)
        assert ages(world).has_expired(oldest) == collected
        page = world.store.list(f"{PREFIX}/")
        found = plan(Queued(), page, own_ms=page.now_ms, data_path_prefix=PREFIX, grace_ms=600_000)
        assert len(found.delete) == collected


def test_uploads_are_found_page_by_page_and_nothing_behind_them_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("buffer_sink.committer._PAGE", 2)
    world = World()
    keys = sorted(world.group(1, *[b"a"] * 7).locations)
    asked: list[str] = []
    real = world.store.list

    def watched(prefix: str, **options: Any) -> Any:
        asked.append(prefix)
        return real(prefix, **options)

    world.store.list = watched
    assert ages(world).oldest_ms(keys[1:4]) == 0
    assert asked == [f"{PREFIX}/app=q/batch=1/"] * 2
    world.store.delete_many([keys[2]])
    assert ages(world).oldest_ms(keys[1:4]) is None


def test_f52_a_write_that_a_rebuild_found_half_uploaded_is_complete_after_its_repeat() -> None:
    world = World()
    assert world.driver().append(world.group(0, b"a"))
    world.drain()
    world.group(1, b"b")  # The driver dies before the other task's upload.
    world.store.delete_many(["p/manifest"])
    rebuild(Target(world.store, CONFIG, world.runtime))
    assert world.driver().append(world.group(1, b"b", b"c"))
    world.drain()
    assert {*world.read} == {b"a", b"b", b"c"}
    assert world.read[-2:] == [b"b", b"c"]
