"""What the collector deletes, and above all what it leaves."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.errors import CorruptManifest, Fenced, PrefixConflict, TransientStorageError
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector, GcPlan, plan
from opendata_buffer.queue.owner import check_owner, claim_queue
from opendata_buffer.stores import DeleteFailure, Listing, ObjectInfo
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

MINUTE = 60_000
NOW = 1_767_225_600_000
GRACE = 10 * MINUTE
_ulids = ManualRuntime(NOW)


def _key(age_ms: int, prefix: str = "ingest", txn: Transaction | None = None) -> str:
    return batch_key(prefix, _ulids.ulid_at(NOW - age_ms), txn)


def _object(key: str, age_ms: int = 60 * MINUTE, size: int = 7) -> ObjectInfo:
    return ObjectInfo(key, size, NOW - age_ms)


def _plan(queued: Iterable[str], objects: Iterable[ObjectInfo], grace_ms: int = GRACE) -> GcPlan:
    manifest = Manifest.empty().append([NewEntry(location) for location in queued])
    listing = Listing(tuple(objects), NOW)
    return plan(manifest, listing, NOW, data_path_prefix="ingest", grace_ms=grace_ms)


def _keys(made: GcPlan) -> list[str]:
    return [info.key for info in made.delete]


def test_an_old_orphan_is_deleted() -> None:
    orphan, queued = _key(60 * MINUTE), _key(30 * MINUTE)
    made = _plan([queued], [_object(orphan, size=11), _object(queued)])
    assert (_keys(made), made.delete_bytes, made.referenced) == ([orphan], 11, 1)


def test_a_queued_batch_is_never_deleted() -> None:
    queued = [_key(90 * MINUTE), _key(120 * MINUTE)]
    assert _plan(queued, map(_object, queued)).delete == ()


def test_an_orphan_newer_than_the_oldest_queued_batch_waits() -> None:
    # Its producer may be about to enqueue it.
    made = _plan([_key(60 * MINUTE)], [_object(_key(60 * MINUTE)), _object(_key(30 * MINUTE))])
    assert (made.delete, made.waiting) == ((), 2)


def test_an_empty_queue_leaves_the_grace_period_alone_to_decide() -> None:
    old, young = _key(GRACE + 1), _key(GRACE)
    assert _keys(_plan([], [_object(old), _object(young)])) == [old]


def test_f6_a_slow_producer_clock_does_not_make_an_upload_old() -> None:
    # The name says one hour ago, the store says one minute ago.
    just_uploaded = _object(_key(60 * MINUTE), age_ms=MINUTE)
    assert _plan([], [just_uploaded]).delete == ()
    assert _plan([], [_object(just_uploaded.key, age_ms=GRACE)]).delete == ()
    assert _keys(_plan([], [_object(just_uploaded.key, age_ms=GRACE + 1)])) == [just_uploaded.key]


def test_f6_a_fast_producer_clock_keeps_a_batch_longer_and_no_more() -> None:
    assert _plan([], [_object(_key(-15 * MINUTE), age_ms=60 * MINUTE)]).delete == ()


def test_an_oldest_batch_without_a_ulid_holds_everything() -> None:
    made = _plan(["ingest/old-name.batch"], [_object(_key(60 * MINUTE))])
    assert (made.delete, made.waiting) == ((), 1)
    assert made.held is not None
    assert "'ingest/old-name.batch' has no ULID name" in made.held


@pytest.mark.parametrize(
    "key",
    [
        "ingest/manifest",
        "ingest/_owner.json",
        "ingest/notes.batch",
        "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP",
        "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.parquet",
        "ingest/01j5t4r3kxbmz7qv9n2wg8ydhp.batch",
        "ingest/tenant/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/app=a/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/app=a/batch=01/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest2/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
    ],
)
def test_f7_names_this_queue_does_not_make_are_left_alone(key: str) -> None:
    made = _plan([], [_object(key)])
    assert (made.delete, made.ignored) == ((), 1)


def test_batches_of_transactions_are_collected_too() -> None:
    orphan = _key(60 * MINUTE, txn=Transaction("query", 3))
    assert _keys(_plan([], [_object(orphan)])) == [orphan]


def test_f7_a_queue_inside_a_transaction_directory_is_left_alone() -> None:
    foreign = _key(60 * MINUTE, "ingest/app=a/batch=1")
    marker = "ingest/app=a/batch=1/_owner.json"
    assert _keys(_plan([], [_object(foreign)])) == [foreign], "the shape alone does not tell"
    assert _plan([], [_object(foreign), _object(marker)]).delete == ()


def test_deletes_come_oldest_first() -> None:
    keys = [_key(age * MINUTE) for age in (30, 90, 60)]
    assert _keys(_plan([], map(_object, keys))) == [keys[1], keys[2], keys[0]]


def test_an_unreadable_manifest_deletes_nothing() -> None:
    raw = Manifest.empty().append([NewEntry("ingest/a"), NewEntry("ingest/b")]).raw
    broken = Manifest.parse(raw.replace(b"\x01\0\0\0\0\0\0\0\x08\0", b"\x07\0\0\0\0\0\0\0\x08\0"))
    with pytest.raises(CorruptManifest, match="has sequence 7, expected 1"):
        plan(broken, Listing((), NOW), NOW, data_path_prefix="ingest", grace_ms=GRACE)


@given(
    st.lists(st.integers(-20, 60), max_size=6),
    st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 60), st.booleans()), max_size=12),
)
def test_the_plan_obeys_every_rule_at_once(
    queued_ages: list[int], orphan_ages: list[tuple[int, int, bool]]
) -> None:
    # Ages in minutes: by the name, and by the store. The rules, written down a second time.
    queued = [_key(age * MINUTE) for age in queued_ages]
    objects = [_object(key, age_ms=0) for key in queued]
    expected = set()
    for named, stored, in_transaction in orphan_ages:
        key = _key(named * MINUTE, txn=Transaction("a", 1) if in_transaction else None)
        objects.append(_object(key, age_ms=stored * MINUTE))
        if min(named, stored) > 10 and (not queued_ages or named > queued_ages[0]):
            expected.add(key)
    made = _plan(queued, objects)
    assert set(_keys(made)) == expected
    assert made.referenced + made.waiting + len(made.delete) == len(objects)


# The cycle around the plan.


class Fixture:
    """A queue with one entry and orphans, and a collector for it."""

    def __init__(self, store: MemoryStore | None = None, orphans: int = 2) -> None:
        self.runtime = ManualRuntime(NOW - 60 * MINUTE)
        self.store = store or MemoryStore(now_ms=self.runtime.now_ms)
        self.store._now_ms = self.runtime.now_ms
        self.config = ConsumerConfig(store="memory://gc")
        self.orphans = [batch_key("ingest", self.runtime.ulid()) for _ in range(orphans)]
        for key in self.orphans:
            self.store.put(key, b"")
        self.runtime.advance(3_600)
        self.queued = batch_key("ingest", self.runtime.ulid())
        self.store.put(self.queued, b"")
        self.write(Manifest.empty().append([NewEntry(self.queued)]).with_epoch(3))

    def write(self, manifest: Manifest) -> None:
        self.store.put("ingest/manifest", manifest.raw)

    def collector(self, epoch: int | None = None) -> GarbageCollector:
        return GarbageCollector(self.store, self.config, runtime=self.runtime, epoch=epoch)

    def names(self) -> set[str]:
        return {info.key for info in self.store.list("").objects}


def test_a_cycle_deletes_orphans_and_nothing_else() -> None:
    queue = Fixture()
    report = queue.collector().run_once()
    assert (report.deleted, report.failed, report.abandoned) == (2, (), 0)
    assert queue.names() == {queue.queued, "ingest/manifest", "ingest/_owner.json"}


def test_a_dry_run_writes_nothing() -> None:
    queue = Fixture()
    before = queue.names()
    report = queue.collector().run_once(dry_run=True)
    assert {info.key for info in report.plan.delete} == set(queue.orphans)
    assert (report.deleted, queue.names()) == (0, before)


def test_f4_without_a_manifest_nothing_is_deleted() -> None:
    queue = Fixture()
    queue.store.delete_many(["ingest/manifest"])
    report = queue.collector().run_once()
    assert report.deleted == 0
    assert report.plan.held is not None
    assert "does not exist" in report.plan.held
    assert queue.names() >= {*queue.orphans, queue.queued}


def test_f4_a_manifest_that_went_backwards_deletes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = Fixture()
    collector = queue.collector(epoch=3)
    collector.start()
    queue.runtime.await_waits(1)
    for key in queue.orphans:
        queue.store.put(key, b"")
    queue.write(Manifest.empty().with_epoch(3))
    queue.runtime.advance(3_600)
    assert collector._task is not None
    collector._task.join(30)
    assert not collector._task.is_alive()
    assert "went backwards: next sequence 1 -> 0" in caplog.text
    assert queue.names() >= set(queue.orphans)


def test_f5_a_batch_enqueued_between_listing_and_manifest_stays() -> None:
    class Enqueues(MemoryStore):
        late: Fixture | None = None

        def list(self, prefix: str, **options: Any) -> Listing:
            listing = super().list(prefix, **options)
            if self.late is not None:
                queue, self.late = self.late, None
                new = [NewEntry(queue.orphans[0]), NewEntry(queue.queued)]
                queue.write(Manifest.empty().append(new).with_epoch(3))
            return listing

    store = Enqueues()
    queue = Fixture(store)
    store.late = queue
    queue.collector().run_once()
    assert queue.orphans[0] in queue.names()


def test_f5_a_slow_cycle_gives_up_its_remaining_deletes() -> None:
    class Slow(MemoryStore):
        queue: Fixture

        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            self.queue.runtime.advance(151)
            return super().delete_many(keys)

    store = Slow()
    queue = store.queue = Fixture(store, orphans=2_500)
    report = queue.collector().run_once()
    assert (report.deleted, report.abandoned) == (1_000, 1_500)
    assert queue.collector().run_once().deleted == 1_000, "the next cycle goes on"


def test_f6_a_fast_clock_of_the_collector_makes_nothing_old() -> None:
    queue = Fixture()
    uploaded_ms = queue.runtime.now_ms() - 3_600_000
    # By the collector's clock the orphans are an hour old, by the store's a minute.
    queue.store._now_ms = lambda: uploaded_ms + MINUTE
    report = queue.collector().run_once()
    assert (report.deleted, report.plan.waiting) == (0, 2)


def test_f7_two_queues_with_one_prefix_name_both_manifests_and_delete_nothing() -> None:
    queue = Fixture()
    claim_queue(queue.store, QueueConfig(store="memory://x", manifest_path="other/manifest"))
    before = queue.names()
    for dry_run in (False, True):
        with pytest.raises(PrefixConflict, match=r"'other/manifest'.*'ingest/manifest'"):
            queue.collector().run_once(dry_run=dry_run)
    assert queue.names() == before


def test_f7_the_first_cycle_claims_the_prefix() -> None:
    queue = Fixture()
    queue.collector().run_once()
    assert check_owner(queue.store, QueueConfig(store="memory://x"))


def test_f9_a_fenced_collector_deletes_nothing() -> None:
    queue = Fixture()
    before = queue.names()
    with pytest.raises(Fenced, match="epoch 2 was fenced by epoch 3"):
        queue.collector(epoch=2).run_once()
    assert queue.names() - before == {"ingest/_owner.json"}
    assert queue.collector(epoch=3).run_once().deleted == 2


def test_failed_deletes_are_reported_and_tried_again() -> None:
    class Stubborn(MemoryStore):
        stubborn = True

        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            first, *rest = keys
            if not self.stubborn:
                rest.append(first)
            super().delete_many(rest)
            return (DeleteFailure(first, "503"),) if self.stubborn else ()

    store = Stubborn()
    queue = Fixture(store)
    report = queue.collector().run_once()
    assert (report.deleted, [each.reason for each in report.failed]) == (1, ["503"])
    store.stubborn = False
    assert queue.collector().run_once().deleted == 1


def test_the_loop_runs_every_interval_and_survives_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Flaky(MemoryStore):
        errors: list[Exception] = []  # noqa: RUF012

        def list(self, prefix: str, **options: Any) -> Listing:
            if prefix and self.errors:
                raise self.errors.pop(0)
            return super().list(prefix, **options)

    store = Flaky()
    queue = Fixture(store)
    store.errors = [TransientStorageError("503"), ZeroDivisionError("bug")]
    collector = queue.collector(epoch=3)
    collector.start()
    collector.start()
    for cycle in (1, 2):
        queue.runtime.await_waits(cycle)
        assert queue.names() >= set(queue.orphans)
        queue.runtime.advance(300)
    queue.runtime.await_waits(3)
    assert not queue.names() & set(queue.orphans)
    collector.stop()
    collector.stop()
    assert [record.levelname for record in caplog.records if "fail" in record.message] == [
        "WARNING",
        "ERROR",
    ]


def test_f9_the_loop_ends_when_fenced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="opendata_buffer")
    queue = Fixture()
    collector = queue.collector(epoch=2)
    collector.start()
    assert collector._task is not None
    collector._task.join(30)
    assert not collector._task.is_alive()
    assert "collector ends: consumer with epoch 2 was fenced by epoch 3" in caplog.text
    assert queue.names() >= set(queue.orphans)


def test_f9_a_stopped_collector_begins_no_further_delete() -> None:
    class Stops(MemoryStore):
        collector: GarbageCollector

        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            self.collector.stop()
            return super().delete_many(keys)

    store = Stops()
    queue = Fixture(store, orphans=1_001)
    store.collector = queue.collector()
    report = store.collector.run_once()
    assert (report.deleted, report.abandoned) == (1_000, 1)
