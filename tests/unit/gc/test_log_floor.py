"""The collector of a log: its floor, expired readers, and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import metrics
from tests.unit.queue.test_log import DAY_S, WEEK_MS, LogFixture, read, small

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
