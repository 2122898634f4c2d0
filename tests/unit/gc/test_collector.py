"""The collector's cycle: pages, the cursor between runs, fencing, and store failures."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import gc as module
from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, QueueConfig
from opendata_buffer.errors import (
    CorruptManifest,
    Fenced,
    PermanentStorageError,
    PrefixConflict,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.batch import Transaction, batch_key, name_time_ms
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector, GcCursor
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.ownership import change_grace_period, claim_queue
from opendata_buffer.stores.base import DeleteFailure, Listing, PutOutcome, read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

MINUTE = 60_000
NOW = 1_767_225_600_000


class Fixture:
    """A queue with one entry and orphans, and a collector for it."""

    def __init__(self, store: MemoryStore | None = None, orphans: int = 2) -> None:
        self.runtime = ManualRuntime(NOW - 60 * MINUTE)
        self.store = store or MemoryStore(now_ms=self.runtime.now_ms)
        self.store._now_ms = self.runtime.now_ms
        self.config = ConsumerConfig(store="memory://gc")
        self.orphans = sorted(batch_key("ingest", self.runtime.ulid()) for _ in range(orphans))
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


def test_a_collector_without_a_runtime_uses_the_system_s_clock() -> None:
    store = MemoryStore()
    store.put("ingest/manifest", Manifest.starting_at(7, 0).raw)
    report = GarbageCollector(store, ConsumerConfig(store="memory://gc")).run_once()
    assert (report.deleted, report.plan.held) == (0, None)


def test_a_collector_names_a_new_queue_by_its_own_clock() -> None:
    queue = Fixture()
    queue.collector().run_once()
    marker = json.loads(read_bytes(queue.store, "ingest/_owner.json"))
    assert name_time_ms(f"ingest/{marker['id']}.batch") == queue.runtime.now_ms()


def test_a_cycle_that_deletes_everything_logs_how_much_and_warns_of_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="opendata_buffer")
    monkeypatch.setattr(module, "_PAGE", 3)
    queue = Fixture(orphans=5)
    assert queue.collector().run_once().deleted == 5
    assert caplog.messages == ["deleted 5 orphans below ingest"]


def test_a_cycle_notes_in_the_marker_how_far_the_manifest_has_got() -> None:
    queue = Fixture()
    collector = queue.collector()
    collector.run_once()
    queue.write(Manifest.starting_at(9, 3))
    for dry_run, next_sequence in ((True, 1), (False, 9)):
        collector.run_once(dry_run=dry_run)
        marker = json.loads(read_bytes(queue.store, "ingest/_owner.json"))
        assert marker["next_sequence"] == next_sequence


def test_a_dry_run_reports_the_bytes_of_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[Any, ...]] = []
    monkeypatch.setattr(metrics.stored_bytes, "set", lambda *values: reported.append(values))
    monkeypatch.setattr(module, "_PAGE", 3)
    queue = Fixture(orphans=5)
    for key in (queue.queued, *queue.orphans):
        queue.store.put(key, bytes(1_000))
    queue.runtime.advance(3_600)
    assert len(queue.collector().run_once(dry_run=True).plan.delete) == 5
    labels = {"queue": metrics.queue_label(queue.store.url, "ingest/manifest")}
    assert reported == [(sum(info.size for info in queue.store.list("").objects), labels)]


def test_only_a_complete_cycle_reports_the_stored_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[float] = []
    monkeypatch.setattr(metrics.stored_bytes, "set", lambda size, _: reported.append(size))
    monkeypatch.setattr(module, "_PAGE", 3)
    queue = Fixture(orphans=5)
    queue.store.put(queue.queued, bytes(5_000))
    queue.store.put(queue.orphans[0], bytes(5_000))
    queue.runtime.advance(3_600)
    collector = queue.collector()
    collector.run_once()
    assert reported == [pytest.approx(5_500, abs=500)]  # including the small objects next to it
    queue.store.delete_many(["ingest/manifest"])
    with pytest.raises(QueueReset):
        collector.run_once()
    assert len(reported) == 1


class RecordedMetrics:
    """Records every value that the collector reports to its metrics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, list[Any]] = {}
        for name, method in (
            ("gc_files_deleted", "add"),
            ("gc_files_failed", "add"),
            ("gc_cycles_held", "add"),
            ("gc_duration_seconds", "record"),
            ("gc_clock_difference_seconds", "set"),
        ):
            recorded = self.values.setdefault(name, [])
            monkeypatch.setattr(
                getattr(metrics, name), method, lambda *values, to=recorded: to.append(values)
            )


def test_the_metrics_report_the_deletes_and_the_duration_of_a_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stubborn(MemoryStore):
        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            first, *rest = keys
            super().delete_many(rest)
            runtime.advance(2)
            return (DeleteFailure(first, "503"),)

    queue = Fixture(Stubborn(), orphans=4)
    runtime = queue.runtime
    queue.store._now_ms = lambda: runtime.now_ms() + 7_500
    told = RecordedMetrics(monkeypatch)
    queue.collector().run_once()
    labels = {"queue": metrics.queue_label(queue.store.url, "ingest/manifest")}
    assert told.values == {
        "gc_files_deleted": [(3,)],
        "gc_files_failed": [(1,)],
        "gc_cycles_held": [],
        "gc_duration_seconds": [(2.0,)],
        "gc_clock_difference_seconds": [(7.5, labels)],
    }


def test_the_metrics_report_a_cycle_that_deletes_nothing_for_safety(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Fixture()
    queue.store.delete_many(["ingest/manifest"])
    told = RecordedMetrics(monkeypatch)
    queue.collector().run_once()
    assert told.values["gc_cycles_held"] == [(1,)]
    assert told.values["gc_files_deleted"] == []


def test_up_to_ten_failed_deletes_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ReadOnly(MemoryStore):
        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            return tuple(DeleteFailure(key, "403") for key in keys)

    queue = Fixture(ReadOnly(), orphans=12)
    report = queue.collector().run_once()
    assert (report.deleted, len(report.failed), report.abandoned) == (0, 12, 0)
    said = [record.message for record in caplog.records if "could not delete" in record.message]
    assert said == [
        f"could not delete {key}, next cycle tries again: 403" for key in queue.orphans[:10]
    ]


def test_f5_a_longer_grace_period_applies_from_the_next_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PAGE", 10)
    queue = Fixture(orphans=20)

    delete_many = queue.store.delete_many

    def delete_and_lengthen(keys: Sequence[str]) -> list[DeleteFailure]:
        change_grace_period(queue.store, queue.config, queue.runtime, 2 * 60 * MINUTE)
        return delete_many(keys)

    monkeypatch.setattr(queue.store, "delete_many", delete_and_lengthen)
    assert queue.collector().run_once().deleted == 10


def test_a_dry_run_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 100)
    queue = Fixture(orphans=250)
    before = queue.names()
    report = queue.collector().run_once(dry_run=True)
    assert {info.key for info in report.plan.delete} == set(queue.orphans)
    assert (report.deleted, queue.names()) == (0, before)


def test_f4_without_a_marker_the_collector_still_detects_a_manifest_that_went_backwards() -> None:
    queue = Fixture()
    collector = queue.collector()
    collector.run_once(dry_run=True)  # The collector claims nothing, so no marker exists.
    queue.write(Manifest.empty().with_epoch(3))
    with pytest.raises(
        QueueReset, match=r"in memory://\S* went backwards: .* 1 -> 0, .*fsck .* --repair"
    ):
        collector.run_once(dry_run=True)


def test_f4_without_a_manifest_nothing_is_deleted() -> None:
    queue = Fixture()
    queue.store.delete_many(["ingest/manifest"])
    report = queue.collector().run_once()
    assert report.deleted == 0
    assert report.plan.held is not None
    assert "does not exist" in report.plan.held
    assert queue.names() >= {*queue.orphans, queue.queued}


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (Manifest.empty().with_epoch(3), "collector ends: "),
        (Manifest.empty().with_epoch(3), "went backwards: next sequence 1 -> 0"),
        (Manifest.starting_at(1, 4), "collector ends: consumer with epoch 3 was fenced by epoch 4"),
    ],
)
def test_f4_f9_a_manifest_that_went_backwards_or_a_fence_ends_the_loop(
    manifest: Manifest, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="opendata_buffer")
    queue = Fixture()
    collector = queue.collector(epoch=3)
    collector.start()
    queue.runtime.await_waits(1)
    for key in queue.orphans:
        queue.store.put(key, b"")
    queue.write(manifest)
    queue.runtime.advance(3_600)
    assert collector._task is not None
    collector._task.join(30)
    assert not collector._task.is_alive()
    assert says in caplog.text
    assert queue.names() >= set(queue.orphans)


class Enqueues(MemoryStore):
    """Enqueues an orphan right after the first listing that contains it."""

    late: tuple[Fixture, int] | None = None

    def list(self, prefix: str, **options: Any) -> Listing:
        listing = super().list(prefix, **options)
        if self.late is not None and listing.objects:
            queue, index = self.late
            if queue.orphans[index] in {each.key for each in listing.objects}:
                self.late = None
                entries = [NewEntry(queue.orphans[index]), NewEntry(queue.queued)]
                queue.write(Manifest.empty().append(entries).with_epoch(3))
        return listing


def test_f5_a_batch_enqueued_between_listing_and_manifest_read_is_kept() -> None:
    store = Enqueues()
    queue = Fixture(store)
    store.late = queue, 0
    queue.collector().run_once()
    assert queue.orphans[0] in queue.names()


class Slow(MemoryStore):
    """Spends the time that the collector may use one manifest on each request of one kind."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.slow = slow
        self.runtime = ManualRuntime()

    def get(self, key: str, **options: Any) -> Any:
        found = super().get(key, **options)
        if self.slow == key:
            self.runtime.advance(151)  # the manifest that was read lacks later appends
        return found

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        if self.slow == "delete":
            self.runtime.advance(151)
        return super().delete_many(keys)


def test_f5_a_slow_cycle_abandons_its_remaining_deletes(caplog: pytest.LogCaptureFixture) -> None:
    store = Slow("delete")
    queue = Fixture(store, orphans=2_500)
    store.runtime = queue.runtime
    report = queue.collector().run_once()
    assert (report.deleted, report.abandoned) == (1_000, 1_500)
    assert "deleting below ingest was too slow: 1500 orphans wait for the next cycle" in caplog.text
    assert queue.collector().run_once().deleted == 1_000, "the next cycle goes on"


def test_f5_a_manifest_may_be_used_for_a_quarter_of_the_grace_period() -> None:
    queue = Fixture()
    get = queue.store.get

    def late(key: str, **options: Any) -> Any:
        found = get(key, **options)
        if key == "ingest/manifest":
            queue.runtime.advance(150)
        return found

    queue.store.get = late  # type: ignore[method-assign]
    assert queue.collector().run_once().deleted == 2


def test_the_failures_of_every_bulk_delete_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BULK", 2)
    queue = Fixture(orphans=5)
    asked: list[list[str]] = []

    def refuse_first(keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        asked.append(list(keys))
        return (DeleteFailure(asked[-1][0], "503"),)

    queue.store.delete_many = refuse_first  # type: ignore[method-assign]
    report = queue.collector().run_once()
    assert [len(keys) for keys in asked] == [2, 2, 1]
    assert [failure.key for failure in report.failed] == queue.orphans[::2]
    assert (report.deleted, report.abandoned) == (2, 0)


def test_f5_nothing_is_deleted_by_a_manifest_that_took_too_long_to_read() -> None:
    store = Slow("ingest/manifest")
    queue = Fixture(store)
    store.runtime = queue.runtime
    report = queue.collector().run_once()
    assert (report.deleted, report.abandoned) == (0, 2)
    assert queue.names() >= set(queue.orphans)


@pytest.mark.parametrize("minutes", [11, -11])
def test_f6_nothing_is_collected_when_the_clocks_are_far_apart(
    minutes: int, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Fixture()
    queue.store._now_ms = lambda: queue.runtime.now_ms() + minutes * MINUTE
    before = queue.names()
    report = queue.collector().run_once()
    assert report.plan.held is not None
    assert "the store's clock is 660 s" in report.plan.held
    assert queue.names() - before == {"ingest/_owner.json"}
    assert f"nothing collected below ingest: {report.plan.held}" in caplog.text


def test_f7_with_two_queues_in_one_prefix_nothing_is_deleted_and_both_manifests_are_named() -> None:
    queue = Fixture()
    claim_queue(queue.store, QueueConfig(store="memory://x", manifest_path="other/manifest"))
    before = queue.names()
    for dry_run in (False, True):
        with pytest.raises(PrefixConflict, match=r"'other/manifest'.*'ingest/manifest'"):
            queue.collector().run_once(dry_run=dry_run)
    assert queue.names() == before


def test_f9_a_fenced_collector_deletes_nothing() -> None:
    queue = Fixture()
    before = queue.names()
    with pytest.raises(Fenced, match="epoch 2 was fenced by epoch 3") as fenced:
        queue.collector(epoch=2).run_once()
    (hint,) = fenced.value.hints
    assert hint.queue == queue_name(queue.store.url, queue.config)
    assert queue.names() - before == {"ingest/_owner.json"}
    assert queue.collector(epoch=3).run_once().deleted == 2


def test_failed_deletes_are_reported_and_retried() -> None:
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


def test_the_loop_runs_every_interval_and_survives_errors(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "collection failed, next cycle tries again: 503" in caplog.text
    assert "ZeroDivisionError: bug" in caplog.text


@pytest.mark.parametrize(
    ("interval_ms", "grace_ms", "wait_s"),
    [(None, 10 * MINUTE, 300.0), (None, 1, 0.05), (7_000, 10 * MINUTE, 7.0)],
)
def test_the_loop_waits_for_its_interval_or_half_of_the_grace_period(
    interval_ms: int | None, grace_ms: int, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Fixture()
    gc = GarbageCollectorConfig(interval_ms=interval_ms, grace_period_ms=grace_ms)
    collector = GarbageCollector(queue.store, replace(queue.config, gc=gc), runtime=queue.runtime)
    waits: list[float] = []
    wait = collector._condition.wait

    def noted(seconds: float) -> bool:
        waits.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(collector._condition, "wait", noted)
    collector.start()
    queue.runtime.await_waits(1)
    collector.stop()
    assert waits == [wait_s]


def test_an_empty_queue_has_its_orphans_collected() -> None:
    queue = Fixture()
    queue.write(Manifest.starting_at(1, 3))
    queue.runtime.advance(3_600)
    assert queue.collector().run_once().deleted == 3


def test_orphans_newer_than_the_oldest_queued_batch_are_kept() -> None:
    # The upload of the queued batch took an hour. The orphan may have got its name meanwhile,
    # and may still be queued after it.
    queue = Fixture()
    slow = batch_key("ingest", queue.runtime.ulid_at(NOW - 120 * MINUTE))
    queue.store.put(slow, b"")
    queue.write(Manifest.empty().append([NewEntry(slow), NewEntry(queue.queued)]).with_epoch(3))
    queue.runtime.advance(3_600)
    report = queue.collector().run_once()
    assert (report.deleted, report.plan.waiting, report.plan.referenced) == (0, 2, 2)


def test_only_segments_that_end_before_the_remembered_range_are_deleted() -> None:
    queue = Fixture()
    names = [f"ingest/_log/{first:020d}-{first + 8:020d}-x.segment" for first in (0, 8, 16)]
    page = f"ingest/_log/{0:020d}-{16:020d}-x.page"
    for key in (*names, page, "ingest/_log/note"):
        queue.store.put(key, b"")
    queue.collector()._delete_parts(16)
    left = {key for key in queue.names() if key.startswith("ingest/_log/")}
    assert left == {names[2], "ingest/_log/note"}


def test_a_segment_whose_deletion_failed_is_deleted_later_and_then_no_more_is_listed() -> None:
    class Refuses(MemoryStore):
        asked: list[str]
        refuses = True

        def list(self, prefix: str, **options: Any) -> Listing:
            self.asked.append(prefix)
            return super().list(prefix, **options)

        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            if self.refuses:
                return tuple(DeleteFailure(key, "SlowDown") for key in keys)
            return super().delete_many(keys)

    store = Refuses()
    store.asked = []
    queue = Fixture(store)
    segment = f"ingest/_log/{0:020d}-{8:020d}-x.segment"
    store.put(segment, b"")
    collector = queue.collector()
    collector._delete_parts(8)
    assert segment in queue.names()
    store.refuses = False
    collector._delete_parts(8)
    assert segment not in queue.names()
    store.asked.clear()
    collector._delete_parts(8)
    assert store.asked == []


def test_a_full_page_of_segments_is_listed_again_only_while_there_are_some_to_delete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counts(MemoryStore):
        listings = 0

        def list(self, prefix: str, **options: Any) -> Listing:
            self.listings += 1
            return super().list(prefix, **options)

    monkeypatch.setattr(module, "_PAGE", 2)
    store = Counts()
    queue = Fixture(store)
    for first in range(0, 40, 8):
        store.put(f"ingest/_log/{first:020d}-{first + 8:020d}-x.segment", b"")
    collector = queue.collector()
    for _ in range(4):
        collector._delete_parts(16)
    left = [name for name in queue.names() if name.startswith("ingest/_log/")]
    assert len(left) == 3
    assert store.listings == 2 + 1, "one of them is by names()"


def test_stop_does_not_wait_forever_for_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_STOP_TIMEOUT_S", 0.05)
    asked, answer = threading.Event(), threading.Event()

    class Silent(MemoryStore):
        def list(self, prefix: str, **options: Any) -> Listing:
            asked.set()
            assert answer.wait(30)
            return super().list(prefix, **options)

    collector = Fixture(Silent()).collector()
    collector.start()
    assert asked.wait(30)
    collector.stop()
    assert "the store still holds a request of the stopped collector" in caplog.text
    answer.set()
    assert collector._task is not None
    collector._task.join(30)
    assert not collector._task.is_alive()


def test_f9_a_stopped_collector_starts_no_further_delete(caplog: pytest.LogCaptureFixture) -> None:
    class Stops(MemoryStore):
        collector: GarbageCollector

        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            self.collector.abandon()
            return super().delete_many(keys)

    store = Stops()
    queue = Fixture(store, orphans=1_001)
    store.collector = queue.collector()
    report = store.collector.run_once()
    assert (report.deleted, report.abandoned) == (1_000, 1)
    assert "too slow" not in caplog.text
    store.collector.stop()  # no thread was started
    store.collector = queue.collector()
    store.collector.start()
    store.collector._task.join(30)
    assert not store.collector._task.is_alive()


def test_an_unreadable_manifest_deletes_nothing() -> None:
    queue = Fixture()
    before = queue.names()
    queue.store.put("ingest/manifest", b"nothing")
    with pytest.raises(CorruptManifest):
        queue.collector().run_once()
    assert queue.names() - before == {"ingest/_owner.json"}


# Cycles over several pages.


class Counting(MemoryStore):
    """Counts listings, and kills the process at the listing after ``lives`` pages."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[str] = []
        self.lives = 10**9

    def list(self, prefix: str, **options: Any) -> Listing:
        if prefix == "ingest/":
            self.starts.append(options["start_after"])
            self.lives -= 1
            if self.lives < 0:
                raise Killed
        return super().list(prefix, **options)


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 100)


@pytest.mark.usefixtures("small_pages")
def test_a_cycle_lists_all_pages_and_resets_its_cursor() -> None:
    store = Counting()
    queue = Fixture(store, orphans=450)
    report = queue.collector().run_once()
    assert (report.deleted, report.plan.referenced, len(report.plan.delete)) == (450, 1, 450)
    assert store.starts == ["", *queue.orphans[99::100]]
    assert queue.collector()._cursor.load() == ""


@pytest.mark.usefixtures("small_pages")
def test_a_dry_run_lists_each_page_once_from_the_first_object_on() -> None:
    store = Counting()
    queue = Fixture(store, orphans=450)
    GcCursor(store, queue.config, queue.runtime).save(queue.orphans[200])
    report = queue.collector().run_once(dry_run=True)
    assert [info.key for info in report.plan.delete] == queue.orphans
    assert store.starts == ["", *queue.orphans[99::100]]


@pytest.mark.usefixtures("small_pages")
def test_a_cycle_that_is_held_ends_at_the_page_and_lists_it_again_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Counting()
    queue = Fixture(store, orphans=450)
    told = RecordedMetrics(monkeypatch)
    store.delete_many(["ingest/manifest"])
    collector = queue.collector()
    for cycle in (1, 2):
        report = collector.run_once()
        assert (report.deleted, report.plan.delete, report.abandoned) == (0, (), 0)
        assert report.plan.held is not None
        assert store.starts == [""] * cycle
        assert told.values["gc_cycles_held"] == [(1,)] * cycle


@pytest.mark.usefixtures("small_pages")
def test_a_cycle_that_is_too_slow_ends_at_the_page_and_lists_it_again_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BULK", 40)
    store = Counting()
    queue = Fixture(store, orphans=250)
    delete_many = store.delete_many

    def slow(keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        queue.runtime.advance(151)
        return delete_many(keys)

    store.delete_many = slow  # type: ignore[method-assign]
    collector = queue.collector()
    report = collector.run_once()
    assert (report.deleted, report.abandoned) == (40, 60)
    assert store.starts == [""]
    collector.run_once()
    assert store.starts == ["", ""]


@pytest.mark.usefixtures("small_pages")
def test_an_interrupted_run_is_continued_where_it_stopped() -> None:
    store = Counting()
    queue = Fixture(store, orphans=450)
    # Young objects are kept, so a run that starts at the front would list them again each time.
    queue.store._now_ms = lambda: NOW
    queue.runtime.set_wall_clock(NOW)
    for key in queue.orphans[:300]:
        queue.store.put(key, b"")
    for _ in range(2):
        store.lives = 2
        with pytest.raises(Killed):
            queue.collector().run_once()
    left = set(queue.orphans) & queue.names()
    assert left == {*queue.orphans[:300], *queue.orphans[400:]}
    # The third run continues at the end, and then lists the front.
    store.lives = 10**9
    store.starts.clear()
    report = queue.collector().run_once()
    assert report.deleted == 50
    assert (report.plan.waiting, report.plan.referenced) == (300, 1), "no object counts twice"
    assert store.starts == [queue.orphans[399], "", *queue.orphans[99:300:100]]
    assert queue.collector()._cursor.load() == ""


@pytest.mark.parametrize("where", ["at the first orphan", "after all objects"])
def test_a_cycle_lists_every_object_wherever_it_starts(where: str) -> None:
    queue = Fixture()
    key = queue.orphans[0] if where == "at the first orphan" else "ingest/~"
    GcCursor(queue.store, queue.config, queue.runtime).save(key)
    assert queue.collector().run_once().deleted == 2
    assert queue.collector()._cursor.load() == ""


@pytest.mark.usefixtures("small_pages")
def test_f5_each_page_is_compared_with_a_manifest_that_was_read_after_it() -> None:
    store = Enqueues()
    queue = Fixture(store, orphans=200)
    store.late = queue, 150
    report = queue.collector().run_once()
    assert queue.orphans[150] in queue.names()
    assert report.deleted == 100, (
        "only the first page's; the others are not older than the queued batch"
    )


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("cursor_inside", [False, True])
def test_f7_the_marker_of_a_queue_inside_the_prefix_protects_it_on_every_page(
    cursor_inside: bool,
) -> None:
    queue = Fixture()
    queue.runtime.set_wall_clock(NOW - 60 * MINUTE)
    inner = [batch_key("ingest/app=a/batch=1", queue.runtime.ulid()) for _ in range(250)]
    for key in inner:
        queue.store.put(key, b"")
    claim_queue(queue.store, QueueConfig(store="m", data_path_prefix="ingest/app=a/batch=1"))
    queue.runtime.set_wall_clock(NOW)
    if cursor_inside:
        # The cycle ends at this key, before the marker: '_' sorts after all ULIDs.
        GcCursor(queue.store, queue.config, queue.runtime).save(sorted(inner)[149])
    report = queue.collector().run_once()
    assert report.deleted == 2
    assert queue.names() >= set(inner)


def test_consumed_batches_of_a_go_producer_do_not_stall_the_collector() -> None:
    queue = Fixture(orphans=1)
    run = queue.orphans[0][7:33]
    queue.runtime.set_wall_clock(NOW - 60 * MINUTE)
    consumed = [f"ingest/{run}/{number:016x}" for number in range(3)]
    for key in consumed:
        queue.store.put(key, b"batch")
    queue.runtime.set_wall_clock(NOW)
    waiting = f"ingest/{run}/{3:016x}"
    queue.store.put(waiting, b"batch")
    queue.write(Manifest.empty().append([NewEntry(waiting)]).with_epoch(3))
    report = queue.collector().run_once()
    assert (report.plan.held, report.deleted) == (None, 1 + len(consumed))
    assert queue.names() >= {waiting, queue.queued}


@pytest.mark.parametrize("waiting", [True, False])
def test_f7_nothing_is_deleted_if_the_batches_of_the_queue_lie_in_a_prefix_inside_this_one(
    waiting: bool,
) -> None:
    queue = Fixture()
    inner = batch_key("ingest/inner", queue.runtime.ulid())
    manifest = Manifest.empty().append([NewEntry(inner)])
    claim = claim_queue(queue.store, queue.config, runtime=queue.runtime)
    if waiting:
        queue.write(manifest)
    else:  # The marker still has the location of the batch that was acknowledged last.
        queue.write(manifest.drop_through(0))
        claim.note(manifest.drop_through(0), now=True, acked_location=inner)
    queue.runtime.advance(3_600)
    report = queue.collector().run_once()
    assert (report.deleted, report.plan.delete) == (0, ())
    assert report.plan.held is not None
    assert "Its batches lie in 'ingest/inner'" in report.plan.held
    assert (
        f"'opendata-buffer fsck {queue.store.url} --data-path-prefix ingest/inner "
        in report.plan.held
    )
    assert queue.names() >= {*queue.orphans, queue.queued}


def test_nothing_is_deleted_when_the_oldest_batch_is_gone_and_its_name_has_no_time() -> None:
    queue = Fixture()
    queue.write(Manifest.empty().append([NewEntry("ingest/old-name.batch")]).with_epoch(3))
    report = queue.collector().run_once()
    assert report.deleted == 0
    assert report.plan.held is not None
    assert "oldest queued batch 0 at 'ingest/old-name.batch' is gone" in report.plan.held
    (hint,) = report.plan.held.hints
    assert hint.sequence == 0
    assert "'opendata-buffer skip memory://" in report.plan.held


# The cursor is saved and shared, and its errors never fail a cycle.

CURSOR_CONFIG = QueueConfig(store="memory://x", data_path_prefix="p")
CURSOR_KEY = "p/_gc.json"


def saved(store: Any) -> GcCursor:
    return GcCursor(store, CURSOR_CONFIG, ManualRuntime())


def test_a_cursor_at_the_beginning_is_not_written() -> None:
    store = MemoryStore()
    saved(store).save("")
    assert store.list("").objects == ()


def test_no_more_than_a_small_object_is_read_as_a_cursor() -> None:
    limits: list[int | None] = []

    class Watched(MemoryStore):
        def get(self, key: str, **options: Any) -> Any:
            limits.append(options["max_bytes"])
            return super().get(key, **options)

    assert saved(Watched()).load() == ""
    assert limits == [64 * 1024]


@pytest.mark.parametrize("after", ["q/z", "p/\udc80", "p/" + "k" * 1024])
def test_a_cursor_outside_the_prefix_restarts_at_the_beginning(after: str) -> None:
    store = MemoryStore()
    store.put(CURSOR_KEY, json.dumps({"version": 1, "after": after}).encode())
    assert saved(store).load() == ""


def test_the_longest_key_can_be_a_cursor() -> None:
    store = MemoryStore()
    saved(store).save("p/" + "k" * 1022)
    assert saved(store).load() == "p/" + "k" * 1022


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"\xff", b'{"version": 2, "after": "p/b"}', b"[" * 50_000, b"x" * 70_000]
)
def test_an_unreadable_cursor_restarts_at_the_beginning_and_is_replaced(
    raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.put(CURSOR_KEY, raw)
    cursor = saved(store)
    assert cursor.load() == ""
    cursor.save("p/a")
    assert saved(store).load() == "p/a"
    warning = (
        "first object: 'p/_gc.json' in memory://: the garbage collector's cursor is not readable: "
    )
    assert warning in caplog.text


def test_a_cursor_that_was_deleted_meanwhile_is_saved_again() -> None:
    store = MemoryStore()
    cursor = saved(store)
    cursor.save("p/a")
    store.delete_many([CURSOR_KEY])
    cursor.save("p/b")  # fails, because the object is gone
    cursor.save("p/c")
    assert saved(store).load() == "p/c"
    store.delete_many([CURSOR_KEY])
    assert cursor.load() == ""
    cursor.save("p/c")
    assert saved(store).load() == "p/c"


def test_a_cursor_that_cannot_be_saved_does_not_fail_the_cycle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class ReadOnly(MemoryStore):
        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            raise PermanentStorageError("403")

    saved(ReadOnly()).save("p/a")
    assert "the collector's cursor was not saved: 403" in caplog.text


# A collector that runs for one minute per hour.


class Job:
    """Produces and consumes half an hour of batches, then gives the collector one minute.

    A request takes 200 ms, and a bulk delete takes one second.
    """

    def __init__(self, txn: bool) -> None:
        self.runtime = ManualRuntime(NOW)
        self.store = self.Slow(self)
        self.config = ConsumerConfig(store="memory://job")
        self.manifest = Manifest.starting_at(1, 0)  # the first batch was consumed
        self.dies_at = float("inf")
        self.txn = txn
        self.runs = 0

    class Slow(MemoryStore):
        def __init__(self, job: Job) -> None:
            super().__init__(now_ms=job.runtime.now_ms)
            self._job = job

        def _takes(self, seconds: float) -> None:
            self._job.runtime.advance(seconds)
            if self._job.runtime.monotonic() > self._job.dies_at:
                raise Killed

        def list(self, prefix: str, **options: Any) -> Listing:
            listing = super().list(prefix, **options)
            self._takes(0.2 * max(1, len(listing.objects) / 10))
            return listing

        def get(self, key: str, **options: Any) -> Any:
            self._takes(0.2)
            return super().get(key, **options)

        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            self._takes(1)
            return super().delete_many(keys)

    def hour(self, batches: int) -> None:
        for number in range(batches):
            txn = Transaction("q", 100 * self.runs + number) if self.txn else None
            self.store.put(batch_key("ingest", self.runtime.ulid(), txn), b"")
        self.manifest = self.manifest.with_epoch(self.manifest.epoch + 1)
        self.store.put("ingest/manifest", self.manifest.raw)
        self.runtime.advance(3_540)
        self.runs += 1
        self.dies_at = self.runtime.monotonic() + 60
        collector = GarbageCollector(
            self.store, self.config, runtime=self.runtime, epoch=self.manifest.epoch
        )
        with contextlib.suppress(Killed):
            collector.run_once()
        self.dies_at = float("inf")
        self.runtime.advance(60)

    @property
    def objects(self) -> int:
        return len(self.store._objects)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("txn", [False, True])
def test_one_minute_of_collection_per_hour_keeps_storage_bounded_over_weeks(txn: bool) -> None:
    job = Job(txn)
    # More than one minute can list, as after a job that was down or never collected.
    job.hour(4_000)
    most = job.objects
    assert most > 2_000, "the first run cannot list it, let alone delete it"
    sizes = []
    for _ in range(3 * 7 * 24):
        job.hour(50)
        sizes.append(job.objects)
    assert max(sizes) <= most + 100
    # One hour of batches, and the three small objects of the queue.
    assert max(sizes[-24:]) <= 2 * 50 + 3
