"""The collector of a log: its floor, expired readers, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from opendata_buffer import Consumer, CorruptData, metrics
from opendata_buffer import gc as module
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.gc import GarbageCollector, GcReport
from opendata_buffer.queue.log import Log
from tests.support.log_fixture import DAY_S, KEY, WEEK_MS, LogFixture, read, small

__all__ = ["small"]


def test_the_metrics_report_the_lag_of_each_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = LogFixture()
    slow, done = fixture.reader("slow"), fixture.reader("done")
    fixture.append(40)
    read(slow, 10)
    read(done)
    fixture.runtime.advance(3_600)
    told: dict[str, Any] = {}
    for name in ("reader_lag", "reader_lag_seconds", "reader_expires_seconds"):
        monkeypatch.setattr(
            getattr(metrics, name),
            "set",
            lambda value, labels, name=name: told.update({(name, labels["reader"]): value}),
        )
    fixture.collector().run_once()
    assert told["reader_lag", "slow"] == 30
    assert told["reader_lag", "done"] == 0
    assert told["reader_lag_seconds", "slow"] == pytest.approx(3_600.3, abs=0.1)
    assert told["reader_lag_seconds", "done"] == 0
    for reader in ("slow", "done"):
        assert told["reader_expires_seconds", reader] == pytest.approx(7 * DAY_S - 3_600, abs=1)


def test_f44_a_reader_expires_after_the_expiry_time_and_not_at_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = LogFixture()
    fixture.append(40)
    away = fixture.reader("away")
    read(away, 10)
    moved_ms = fixture.runtime.now_ms()
    fixture.runtime.set_wall_clock(moved_ms + WEEK_MS)
    fixture.collector().run_once()
    assert fixture.index().readers == ("away",)
    fixture.runtime.set_wall_clock(moved_ms + WEEK_MS + 1)
    fixture.collector().run_once()
    assert fixture.index().readers == ()
    assert (
        "reader 'away' of ingest/manifest has expired: it was last heard of 7.0 days ago, at "
        "sequence 10"
    ) in caplog.text


def test_f44_a_reader_whose_clock_is_behind_does_not_expire_while_the_store_sees_it_move() -> None:
    fixture = LogFixture()
    fixture.append(40)
    slow, other = fixture.reader("slow"), fixture.reader("other")
    read(slow, 10)
    read(other)
    # A position that an interrupted deletion left does not belong to a reader.
    fixture.store.put("ingest/_readers/deleted.json", b"{}")
    now_ms = fixture.runtime.now_ms()
    fixture.store._now_ms = lambda: now_ms + 2 * WEEK_MS
    for reader in (slow, other):
        fixture.append(1)
        read(reader, 1)
    fixture.runtime.set_wall_clock(now_ms + 2 * WEEK_MS)
    fixture.collector().run_once()
    assert fixture.index().readers == ("other", "slow")


def test_a_cycle_that_changes_nothing_does_not_write_the_index() -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("reader"), 10)
    fixture.collect()
    before = fixture.index()
    assert before.floor == 10
    fixture.collect()
    assert fixture.index() == before


def test_a_dry_run_uses_the_floor_that_a_real_cycle_would_write() -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("reader"))
    fixture.runtime.advance(3_600)
    before = fixture.index()
    planned = fixture.collector().run_once(dry_run=True)
    assert fixture.index() == before
    report = fixture.collector().run_once()
    assert report.deleted == len(planned.plan.delete) > 0
    assert fixture.index().floor == 40


def test_the_index_notes_when_the_position_of_a_reader_was_first_missing() -> None:
    fixture = LogFixture()
    fixture.append(40)
    for name in ("here", "away"):
        fixture.reader(name)
    fixture.store.delete_many(["ingest/_readers/away.json"])
    fixture.collect()
    missed_ms = fixture.runtime.now_ms()
    assert fixture.index().missing == {"away": missed_ms}
    fixture.runtime.advance(DAY_S)
    fixture.collect()
    assert fixture.index().missing == {"away": missed_ms}
    assert fixture.index().readers == ("away", "here")


# The index and the manifest that a cycle reads.


def objects(fixture: LogFixture) -> dict[str, bytes]:
    return {info.key: fixture.store.get(info.key).data for info in fixture.store.list("").objects}


def dry_run(fixture: LogFixture) -> GcReport:
    """Plan a cycle, and check that it writes nothing."""
    before = objects(fixture)
    report = fixture.collector().run_once(dry_run=True)
    assert objects(fixture) == before
    return report


def test_f45_a_log_whose_index_is_gone_is_not_collected_like_a_plain_queue() -> None:
    fixture = LogFixture()
    fixture.append(60)
    assert fixture.manifest().first_sequence > 0, "no batch is only in a segment"
    fixture.store.delete_many(["ingest/_log.json"])
    fixture.runtime.advance(3_600)
    before = objects(fixture)
    with pytest.raises(CorruptData, match=r"'ingest/_log.json' in memory://log is gone"):
        fixture.collector().run_once()
    assert objects(fixture) == before


def test_a_dry_run_of_a_log_without_an_owner_marker_uses_the_index() -> None:
    fixture = LogFixture()
    fixture.append(60)
    read(fixture.reader("reader"), 50)
    fixture.runtime.advance(3_600)
    fixture.store.delete_many(["ingest/_owner.json"])
    planned = dry_run(fixture).plan
    assert 0 < len(planned.delete) <= 50
    fixture.store.delete_many([KEY])
    held = dry_run(fixture).plan.held
    assert held is not None
    assert "does not exist" in held


def test_a_log_is_collected_although_its_oldest_batch_is_gone_and_its_name_has_no_time() -> None:
    """The collector of a plain queue would hold, and would say how to skip the batch."""
    fixture = LogFixture()
    fixture.queue.append([NewEntry("ingest/by hand")])
    fixture.append(3)
    fixture.runtime.advance(3_600)
    report = fixture.collector().run_once()
    assert (report.plan.held, report.deleted) == (None, 0)


def test_the_collector_moves_the_entries_of_a_long_manifest_and_then_raises_the_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = LogFixture()
    monkeypatch.setattr(Log, "most_entries", 1_000)
    fixture.append(40)
    assert read(fixture.reader("reader"), 38) == [*range(38)]
    monkeypatch.setattr(Log, "most_entries", 16)
    fixture.runtime.advance(3_600)
    planned = dry_run(fixture)
    assert (fixture.index().end, fixture.manifest().first_sequence) == (0, 0)
    report = fixture.collector().run_once()
    assert report.deleted == len(planned.plan.delete) == 38
    assert (fixture.index().end, fixture.index().floor) == (36, 38)
    assert fixture.manifest().first_sequence == 36


def test_a_move_that_fails_does_not_fail_the_cycle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = LogFixture()
    monkeypatch.setattr(Log, "most_entries", 1_000)
    fixture.append(40)
    read(fixture.reader("reader"), 30)
    monkeypatch.setattr(Log, "most_entries", 16)

    def full(key: str, data: bytes) -> None:
        raise PermanentStorageError("507")

    monkeypatch.setattr(fixture.store, "put", full)
    assert fixture.collect() == 30
    assert "the oldest entries of ingest/manifest were not moved: 507" in caplog.text
    assert (fixture.index().end, fixture.index().floor) == (0, 30)


@pytest.mark.parametrize("sees_positions", [True, False])
def test_a_reader_that_registers_while_the_floor_is_raised_keeps_what_it_may_read(
    sees_positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = LogFixture()
    fixture.append(40)
    read(fixture.reader("reader"))
    read_positions, late = module.read_positions, []

    def then_register(log: Any, index: Any) -> Any:
        found = read_positions(log, index)
        if not late:
            late.append(fixture.reader("late"))
        return found

    monkeypatch.setattr(module, "read_positions", then_register)
    # Each of the two defenses is enough: the position without a name, and the changed index.
    if not sees_positions:
        monkeypatch.setattr(GarbageCollector, "_unnamed_readers", lambda *_: {})
    assert fixture.collect() == 0
    assert (fixture.index().readers, fixture.index().floor) == (("late", "reader"), 0)
    assert read(late[0]) == [*range(40)]


def test_f44_a_reader_does_not_expire_while_it_moves_by_its_own_clock() -> None:
    fixture = LogFixture()
    fixture.append(40)
    away, here = fixture.reader("away"), fixture.reader("here")
    read(away, 10)
    read(here, 10)
    now_ms = fixture.runtime.now_ms()
    fixture.store._now_ms = lambda: now_ms
    fixture.runtime.set_wall_clock(now_ms + 2 * WEEK_MS)
    read(here, 10)
    fixture.store._now_ms = fixture.runtime.now_ms
    fixture.collector().run_once()
    assert fixture.index().readers == ("here",)


# A retention by bytes.


def test_a_cycle_counts_the_bytes_of_all_pages_by_the_minute_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[Mapping[int, int]] = []
    full_since = module.full_since

    def noted(sizes: Mapping[int, int], wanted: int) -> int | None:
        counted.append(dict(sizes))
        return full_since(sizes, wanted)

    monkeypatch.setattr(module, "full_since", noted)
    monkeypatch.setattr(module, "_PAGE", 2)
    fixture = LogFixture(retention_bytes=10**9)
    written: dict[int, int] = {}
    for _ in range(3):
        for _ in range(3):
            fixture.append(1)
            minute = fixture.runtime.now_ms() // 60_000
            size = len(fixture.store.get(fixture.locations[-1]).data)
            written[minute] = written.get(minute, 0) + size
        fixture.runtime.advance(60)
    fixture.collector().run_once()
    assert counted == [written]
    assert len(written) == 3


def test_a_dry_run_of_a_log_with_a_retention_by_bytes_writes_nothing() -> None:
    fixture = LogFixture(retention_bytes=100)
    for _ in range(40):
        fixture.append(1)
        fixture.runtime.advance(600)
    read(fixture.reader("reader"))
    assert dry_run(fixture).plan.held is None
    assert fixture.collect() == 0
    assert fixture.index().floor > 0, "the retention keeps everything"


def test_a_cycle_reads_the_position_of_a_reader_again_only_for_a_retention_by_bytes() -> None:
    for retention_bytes, reads in ((None, 1), (10**9, 2)):
        fixture = LogFixture(retention_bytes=retention_bytes)
        fixture.append(3)
        fixture.reader("reader")
        fixture.store.requests.clear()
        fixture.collector().run_once()
        assert fixture.store.requests["get", "ingest/_readers/reader.json"] == reads


def test_f46_an_index_and_a_marker_that_are_restored_together_lose_no_batch_of_a_new_reader() -> (
    None
):
    """No segment was cut since the backup, so the two of them look like an earlier state."""
    fixture = LogFixture()
    fixture.append(5)
    done = fixture.reader("done")
    backup = {
        key: fixture.store.get(key).data for key in ("ingest/_log.json", "ingest/_owner.json")
    }
    new = fixture.reader("new")
    fixture.append(5)
    read(new, 3)
    read(done)
    new.close()
    for key, data in backup.items():
        fixture.store.put(key, data)
    assert fixture.index().readers == ("done",), "nobody notices that the index is an old copy"
    fixture.runtime.advance(3_600)
    fixture.collector().run_once()
    assert fixture.index().floor == 3
    again = fixture.reader("new")
    assert read(again) == [*range(3, 10)]
    assert fixture.index().readers == ("done", "new")


def test_f46_a_reader_that_an_old_index_does_not_name_expires_like_any_other() -> None:
    fixture, done = with_a_position_without_a_name()
    fixture.runtime.advance(7 * DAY_S + 1)
    read(done)
    fixture.store.put("ingest/_readers/unreadable.json", b"{}")
    fixture.collector().run_once()
    assert fixture.index().floor == 10


def with_a_position_without_a_name() -> tuple[LogFixture, Consumer]:
    """Return a log of 10 batches, and its reader, which has read nothing.

    The index does not name a second reader, which has read 3 batches.
    """
    fixture = LogFixture()
    fixture.append(10)
    done, new = fixture.reader("done"), fixture.reader("new")
    read(new, 3)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    log.change(lambda index: index and index.without_readers(["new"]))
    return fixture, done


def test_f46_a_position_without_a_name_counts_up_to_the_expiry_time() -> None:
    for late_ms, floor in ((0, 3), (1, 10)):
        fixture, done = with_a_position_without_a_name()
        moved_ms = fixture.runtime.now_ms()
        fixture.runtime.set_wall_clock(moved_ms + WEEK_MS + late_ms)
        read(done)
        fixture.collector().run_once()
        assert fixture.index().floor == floor


def test_f46_an_unreadable_position_without_a_name_does_not_hide_the_next_one() -> None:
    fixture, done = with_a_position_without_a_name()
    read(done)
    fixture.store.put("ingest/_readers/a-damaged-one.json", b"{}")
    fixture.runtime.advance(3_600)
    fixture.collector().run_once()
    assert fixture.index().floor == 3


def test_f46_a_position_without_a_name_that_lost_its_batches_keeps_nothing() -> None:
    fixture, done = with_a_position_without_a_name()
    read(done, 5)
    log = Log(fixture.store, fixture.config, fixture.runtime)
    log.change(lambda index: index and index.with_floor(5))
    read(done)
    fixture.runtime.advance(3_600)
    fixture.collector().run_once()
    assert fixture.index().floor == 10


@pytest.mark.parametrize("has_reader", [True, False])
def test_a_part_of_what_all_readers_have_read_is_within_the_retention(has_reader: bool) -> None:
    fixture = LogFixture(retention_ms=3_600_000)
    fixture.append(20)
    fixture.runtime.advance(7_200)
    fixture.append(20)
    if has_reader:
        read(fixture.reader("reader"))
    fixture.collector().run_once()
    assert fixture.index().floor == 20


def test_a_cycle_that_raises_no_floor_does_not_look_for_positions_without_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture = LogFixture()
    fixture.append(10)
    reader = fixture.reader("reader")
    listed: list[int] = []
    stored_readers = module.stored_readers

    def noted(log: Log) -> Any:
        listed.append(1)
        return stored_readers(log)

    monkeypatch.setattr(module, "stored_readers", noted)
    fixture.collector().run_once()
    assert listed == []
    read(reader, 5)
    fixture.collector().run_once()
    assert listed == [1]
