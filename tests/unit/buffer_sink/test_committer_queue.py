"""The commit to one queue: decisions on a manifest, commit records, repeats, and old uploads."""

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
from tests.unit.buffer_sink.target_queue import CONFIG, PREFIX, RECORD, TargetQueue
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


def test_a_partly_dequeued_batch_is_recognized() -> None:
    manifest = (
        Manifest.empty().append([batch_entry(0, batch=3), batch_entry(1, batch=3)]).drop_through(0)
    )
    assert decision(manifest, None, 3) == AlreadyDone((batch_entry(1, batch=3).location,))


def test_a_separator_is_needed_only_when_our_entries_may_have_been_dequeued_unseen() -> None:
    full = Manifest.empty().append([batch_entry(0, batch=0), batch_entry(1), batch_entry(2)])
    drained = full.drop_through(2)
    # Batch 0 ended at sequence 0. Sequences 1 and 2 followed, and one of them might be batch 1.
    assert decision(drained, CommitRecord(batch=0, next_sequence=1), 1) == Separate()
    # Nothing was appended after batch 0, so no entry can have been dequeued unseen.
    assert decision(drained, CommitRecord(batch=0, next_sequence=3), 1) is None
    # Without a record, any entry may have been dequeued unseen.
    assert decision(drained, None, 1) == Separate()
    # An entry that is still queued already separates the batches.
    assert decision(full.drop_through(1), None, 1) is None


def test_f4_a_queue_shorter_than_the_record_is_refused() -> None:
    record = CommitRecord(batch=3, next_sequence=7)
    with pytest.raises(QueueReset, match=r"up to sequence 6, but manifest 'm' ends at -1"):
        decision(Manifest.empty(), record, 4)


def test_a_payload_that_looks_like_a_location_is_not_taken_for_one() -> None:
    forged = batch_key(PREFIX, ULIDS[1], Transaction("q", 99)).encode()
    # The two bytes before the text are its length, as with a location.
    payload = len(forged).to_bytes(2, "little") + forged
    real = batch_key(PREFIX, ULIDS[0], Transaction("q", 1))
    manifest = Manifest.empty().append([NewEntry(real, (Metadata(0, 0, payload),))])
    assert not is_queued(manifest, PREFIX, Transaction("q", 2))
    assert is_queued(manifest, PREFIX, Transaction("q", 1))


def test_all_batches_are_appended_in_one_write() -> None:
    target = TargetQueue(ScriptedStore())
    group = target.group(0, b"a", b"b", b"c")
    assert target.driver().append(group)
    entries = target.manifest.entries()
    assert tuple(each.location for each in entries) == group.locations
    assert [each.sequence for each in entries] == [0, 1, 2]
    assert entries[0].metadata == (Metadata(0, 7, b""),)
    # The owner marker (by the test), the manifest, its watermark in the marker, and the record.
    assert target.store.puts == 4
    record = "p/app=q/_commit.json"
    assert target.store.get(record).data == CommitRecord(0, 3).to_json()
    assert parse_location(record, PREFIX) is None, (
        "the collector deletes objects that are named like batches"
    )


def test_a_write_without_rows_sends_no_request() -> None:
    target = TargetQueue(ScriptedStore())
    puts = target.store.puts
    assert not target.driver().append(None)
    assert target.store.puts == puts
    assert target.queue().read() is None


def test_a_batch_that_two_drivers_commit_at_once_is_appended_once() -> None:
    target = TargetQueue(ScriptedStore())
    zombie, driver = target.driver(), target.driver()
    late, group = target.group(0, b"a"), target.group(0, b"a")
    # The zombie has decided to append. The new driver commits before that write lands.
    target.store.script = [before(applied, lambda _: driver.append(group))]
    assert not zombie.append(late)
    assert target.manifest.locations() == list(group.locations)


def test_a_zombie_never_lowers_the_record() -> None:
    target = TargetQueue(ScriptedStore())
    zombie, driver = target.driver(), target.driver()
    first = target.group(0, b"a")
    # The other driver writes batch 1 between the zombie's append and its record.
    target.store.script = [then(applied, lambda _: driver.append(target.group(1, b"b")))]
    assert zombie.append(first)
    assert CommitRecord.from_json(target.store.get(RECORD).data).batch == 1


def test_a_lost_answer_and_a_fast_consumer_leave_the_outcome_unknown_until_a_restart() -> None:
    target = TargetQueue(ScriptedStore())
    target.store.script = [then(applied_answer_lost, lambda _: target.drain())]
    with pytest.raises(CommitStateUnknown) as caught:
        target.driver().append(target.group(0, b"a"))
    assert "Spark repeats the batch 0" in "".join(caught.value.__notes__)
    # Spark then runs new tasks for the same batch.
    assert target.driver().append(target.group(0, b"a"))
    assert target.driver().append(target.group(1, b"b"))
    target.drain()
    assert target.read == [b"a", b"b"]


def refuse(*_: Any) -> PutOutcome:
    raise PermanentStorageError("403")


@pytest.mark.parametrize(
    ("answer", "warns"),
    [
        (not_applied_answer_lost, True),
        (lambda *_: outcomes.LostRace(), True),
        (refuse, True),
        (applied_answer_lost, False),
    ],
)
def test_a_commit_succeeds_although_its_record_cannot_be_written(
    answer: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def write(store: ScriptedStore, key: str, *change: Any) -> PutOutcome:
        return (answer if key == RECORD else applied)(store, key, *change)

    target = TargetQueue(ScriptedStore())
    target.store.script = [write] * 1_000
    assert target.driver().append(target.group(0, b"a"))
    assert (f"commit record {RECORD} was not written" in caplog.text) == warns
    target.store.script.clear()
    assert not target.driver().append(target.group(0, b"a"))
    assert target.driver().append(target.group(1, b"b"))
    target.drain()
    assert target.taken == [b"a", b"b"]


def test_f4_a_write_outside_a_query_notes_the_watermark_in_the_marker() -> None:
    target = TargetQueue()
    for batch in range(3):
        target.driver().append(target.group(batch, b"a", query="one"))
    noted = check_owner(target.store, CONFIG).watermark.next_sequence
    assert noted == 1, "a query notes its first batch, and few later ones"
    target.driver().append(target.group(None, b"b"))
    assert check_owner(target.store, CONFIG).watermark.next_sequence == 4


def test_a_record_newer_than_the_remembered_manifest_is_not_an_error_of_the_queue() -> None:
    target = TargetQueue()
    driver = target.driver()
    driver.append(target.group(0, b"a"))
    target.driver().append(target.group(1, b"b"))
    # The first driver still remembers the manifest of batch 0.
    assert driver.append(target.group(2, b"c"))
    target.drain()
    assert target.taken == [b"a", b"b", b"c"]


def test_f5_a_young_write_is_committed_without_a_listing() -> None:
    def refuse_listing(prefix: str, **options: Any) -> Any:
        raise AssertionError("listed")

    target = TargetQueue()
    group = target.group(0, b"a", b"b")
    target.runtime.advance(300)
    target.store.list = refuse_listing
    assert target.driver().append(group)


def test_f5_a_long_write_whose_uploads_are_young_is_committed() -> None:
    target = TargetQueue()
    planned = Moment.now(target.runtime)
    target.runtime.advance(3_000)
    group = target.group(0, b"a")
    assert target.driver().append(Group(planned, group.uploads, group.transaction))


@pytest.mark.parametrize("batch", [0, None])
@pytest.mark.parametrize("is_old", [False, True])
def test_f5_old_or_deleted_uploads_are_not_appended(batch: int | None, is_old: bool) -> None:
    target = TargetQueue()
    planned = Moment.now(target.runtime)
    target.runtime.advance(0 if is_old else 3_000)
    group = replace(target.group(batch, b"a", b"b"), planned=planned)
    if is_old:
        target.runtime.advance(301)
    else:
        target.store.delete_many([group.uploads[1].location])
    with pytest.raises(TransientStorageError, match=r"it may take 21600 s .*Nothing was appended"):
        target.driver().append(group)
    assert target.queue().read() is None


def pause(runtime: ManualRuntime, wall_s: int = 601, monotonic_s: int = 601) -> None:
    now_ms = runtime.now_ms()
    runtime.advance(monotonic_s)
    runtime.set_wall_clock(now_ms + wall_s * 1000)


pause_and_set_the_clock_back = partial(pause, wall_s=0)
suspend = partial(pause, monotonic_s=0)  # the monotonic clock stops while the machine is suspended


class Pausing(MemoryStore):
    """Pauses the driver when it reads an object, while the clock of the store goes on."""

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
    target = TargetQueue(store := Pausing(happens, key), store.runtime)
    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        target.driver().append(target.group(batch, b"a"))
    assert not target.manifest.entry_count


def test_f5_a_suspended_driver_appends_uploads_that_are_named_far_enough_ahead() -> None:
    # The driver is suspended when it claims the queue, and between its read and its write.
    target = TargetQueue(store := Pausing(suspend, times=2), store.runtime)
    assert target.driver().append(target.group(0, b"a", ahead_s=6 * 3600))
    target.drain()
    assert target.read == [b"a"]


class FrozenWrite(MemoryStore):
    """Delays the next manifest write for 20 minutes, while a collector may delete objects."""

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


def target_with_a_frozen_write(collected: int) -> TargetQueue:
    target = TargetQueue()
    target.store = FrozenWrite(target.runtime, collected)
    return target


def test_f5_an_append_that_landed_late_is_committed_once_no_collector_deletes_its_objects() -> None:
    target = target_with_a_frozen_write(collected=0)
    assert target.driver().append(target.group(3, b"a"))
    # A collector that read the manifest before may start deletes for a quarter of the grace
    # period, and its last request may take 60 s.
    assert target.runtime.slept == [210]
    target.drain()
    assert target.read == [b"a"]


def test_f5_an_append_that_landed_late_without_its_objects_is_written_again() -> None:
    target = target_with_a_frozen_write(collected=1)
    with pytest.raises(CommitStateUnknown, match="later than the collector's grace period"):
        target.driver().append(target.group(3, b"a"))
    # Spark repeats the batch. It is queued but cannot be read, so it does not count as committed.
    assert target.driver().append(target.group(3, b"a"))
    torn, separator, again = target.manifest.entries()
    assert "/app=" not in separator.location
    passes = TransactionFilter(PREFIX)
    passes.skip(torn.sequence, torn.location)
    assert passes.offer(separator.sequence, separator.location)
    assert passes.offer(again.sequence, again.location)
    assert not target.driver().append(target.group(3, b"a"))


def test_f5_a_write_without_its_objects_that_is_skipped_during_its_repeat_is_written_again() -> (
    None
):
    class Overtaken(FrozenWrite):
        def list(self, prefix: str, **options: Any) -> Listing:
            if self.frozen and target.manifest.entry_count:
                queue = target.queue()
                epoch = queue.claim_epoch(None).epoch
                for entry in target.manifest.entries():
                    target.passes.skip(entry.sequence, entry.location)
                    queue.dequeue(entry.sequence, epoch)
            return super().list(prefix, **options)

    target = TargetQueue()
    target.store = Overtaken(target.runtime, collected=0)
    group = target.group(3, b"a")
    target.queue().append(group.entries)
    target.store.delete_many(group.locations)
    target.store.frozen = True
    assert target.driver().append(target.group(3, b"a"))
    target.drain()
    assert target.read == [b"a"]


@pytest.mark.parametrize(
    ("age_s", "collected", "waits"), [(600, False, []), (601, False, [210]), (601, True, [210])]
)
def test_f5_a_repeat_waits_for_a_collector_that_may_not_know_the_queued_batch(
    monkeypatch: pytest.MonkeyPatch, age_s: float, collected: bool, waits: list[float]
) -> None:
    target = TargetQueue()
    group = target.group(3, b"a")
    target.runtime.advance(age_s)
    target.queue().append(group.entries)
    sleep = target.runtime.sleep

    def sleep_and_collect(seconds: float) -> None:
        sleep(seconds)
        if collected:
            target.store.delete_many(group.locations)

    monkeypatch.setattr(target.runtime, "sleep", sleep_and_collect)
    assert target.driver().append(target.group(3, b"a")) == collected
    assert target.runtime.slept == waits


def test_f5_a_write_without_identity_that_landed_late_without_its_objects_is_unknown() -> None:
    target = target_with_a_frozen_write(collected=1)
    group = target.group(None, b"a", b"b")
    with pytest.raises(CommitStateUnknown, match="later than the collector's grace") as caught:
        target.driver().append(group)
    assert (caught.value.sequence, caught.value.next_sequence) == (0, 2)
    assert caught.value.locations == group.locations


def test_f6_a_driver_clock_that_was_set_back_does_not_hide_the_age_of_uploads() -> None:
    target = TargetQueue(MemoryStore(now_ms=(clock := ManualRuntime()).now_ms))
    group = target.group(0, b"a")
    clock.advance(700)
    target.runtime.set_wall_clock(0)
    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        target.driver().append(group)


# One query per app ID.


def test_a_deleted_checkpoint_with_the_same_app_id_is_refused_without_loss() -> None:
    target = TargetQueue()
    for batch in range(3):
        target.driver().append(target.group(batch, b"old", query="one"))
    target.drain()
    with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
        target.driver().append(target.group(0, b"new", query="two"))
    # With its own app ID the query continues, and every micro-batch arrives.
    assert target.driver().append(target.group(0, b"new", app="q2", query="two"))
    target.drain()
    assert target.read == [b"old", b"old", b"old", b"new"]


def test_one_of_two_queries_that_start_at_once_is_refused() -> None:
    target = TargetQueue(ScriptedStore())
    first, second = (target.group(0, b"a", query=query) for query in ("one", "two"))
    # It has read that no record exists. The claim of the other query lands before its own.
    target.store.script = [before(applied, lambda _: target.driver().append(first))]
    with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
        target.driver().append(second)
    assert target.manifest.locations() == list(first.locations)


def test_nothing_is_appended_if_the_claim_cannot_be_written() -> None:
    target = TargetQueue()
    target.store.put_if = lambda *_: outcomes.Unknown("no answer")
    with pytest.raises(TransientStorageError, match=r"commit record.*Nothing was appended"):
        target.driver().append(target.group(0, b"a", query="one"))


def test_repeats_within_one_query_are_logged_with_their_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = TargetQueue()
    target.driver().append(target.group(7, b"a", b"b", query="one"))
    assert not target.driver().append(target.group(7, b"a", b"b", query="one"))
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "batch 7 of app q was committed before: 2 records in 2 batches" in warning.getMessage()


# Writes that take longer than the grace period.


@pytest.mark.parametrize("batch", [0, None])
def test_f5_a_micro_batch_that_takes_three_grace_periods_is_committed(batch: int | None) -> None:
    target = TargetQueue()
    collector = GarbageCollector(
        target.store, ConsumerConfig(store="memory://x", data_path_prefix=PREFIX),
        runtime=target.runtime,
    )  # fmt: skip
    target.driver().append(target.group(None, b"before"))
    planned = Moment.now(target.runtime)
    uploads: tuple[UploadedBatch, ...] = ()
    for minute in range(30):
        part = target.group(batch, f"{minute}".encode(), ahead_s=6 * 3600)
        uploads += part.uploads
        target.runtime.advance(60)
        collector.run_once()
    txn = None if batch is None else Transaction("q", batch)
    assert target.driver().append(Group(planned, uploads, txn))
    target.drain()
    assert target.read == [b"before", *(f"{minute}".encode() for minute in range(30))]
    # After the write, none of its objects is kept forever.
    target.runtime.advance(6 * 3600 + 601)
    collector.run_once()
    assert not batches_in(target.store)


@pytest.mark.parametrize("own_ms", [None, 60_000_000])
def test_f5_a_write_uses_the_grace_period_of_its_queue(own_ms: int | None) -> None:
    target = TargetQueue()
    change_grace_period(target.store, CONFIG, target.runtime, 100_000)
    options = SinkOptions(queue=CONFIG, grace_ms=own_ms)
    driver = QueueCommitter(target.store, options, target.runtime)
    assert driver.append(target.group(0, b"young"))
    old = target.group(1, b"old")
    target.runtime.advance(51)
    with pytest.raises(TransientStorageError, match="Nothing was appended"):
        driver.append(old)
    # An append that loses races for longer would land after the grace period.
    assert driver._queues[CONFIG.manifest_path]._config.timeout_ms == 50_000


# How long uploads are safe by the rules of the collector.


def ages(target: TargetQueue) -> UploadAges:
    return UploadAges(target.store, SinkOptions(queue=CONFIG), target.runtime)


@pytest.mark.parametrize("grace_periods", [1, 3, 6])
def test_f5_a_write_of_several_grace_periods_is_safe_until_the_time_in_its_names(
    grace_periods: int,
) -> None:
    target = TargetQueue()
    group = target.group(None, b"a", ahead_s=3_600)
    target.runtime.advance(grace_periods * 600)
    oldest = ages(target).oldest(group)
    # The collector applies the same limit, until the moment when they expire.
    for seconds, collected in ((3_600 + 600 - grace_periods * 600, 0), (1, 1)):
        target.runtime.advance(seconds)
        assert ages(target).has_expired(oldest) == collected
        page = target.store.list(f"{PREFIX}/")
        found = plan(Queued(), page, own_ms=page.now_ms, data_path_prefix=PREFIX, grace_ms=600_000)
        assert len(found.delete) == collected


def test_uploads_are_found_page_by_page_and_no_page_after_them_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("buffer_sink.committer._PAGE", 2)
    target = TargetQueue()
    keys = sorted(target.group(1, *[b"a"] * 7).locations)
    asked: list[str] = []
    real = target.store.list

    def watched(prefix: str, **options: Any) -> Any:
        asked.append(prefix)
        return real(prefix, **options)

    target.store.list = watched
    assert ages(target).oldest_ms(keys[1:4]) == 0
    assert asked == [f"{PREFIX}/app=q/batch=1/"] * 2
    target.store.delete_many([keys[2]])
    assert ages(target).oldest_ms(keys[1:4]) is None


def test_f52_a_write_that_a_rebuild_found_half_uploaded_is_complete_after_its_repeat() -> None:
    target = TargetQueue()
    assert target.driver().append(target.group(0, b"a"))
    target.drain()
    target.group(1, b"b")  # The driver dies before the other task's upload.
    target.store.delete_many(["p/manifest"])
    rebuild(Target(target.store, CONFIG, target.runtime))
    assert target.driver().append(target.group(1, b"b", b"c"))
    target.drain()
    assert {*target.read} == {b"a", b"b", b"c"}
    assert target.read[-2:] == [b"b", b"c"]
