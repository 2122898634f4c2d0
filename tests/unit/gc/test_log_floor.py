"""What the collector does for a log: the floor, readers that expire, and what the metrics say."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import metrics
from tests.unit.queue.test_log import DAY_S, WEEK_MS, House, read, small

__all__ = ["small"]


def test_the_metrics_say_how_far_each_reader_is(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    slow, done = house.reader("slow"), house.reader("done")
    house.append(40)
    read(slow, 10)
    read(done)
    house.runtime.advance(3_600)
    told: dict[str, Any] = {}
    for name in ("reader_lag", "reader_lag_seconds", "reader_expires_seconds"):
        monkeypatch.setattr(
            getattr(metrics, name),
            "set",
            lambda value, labels, name=name: told.update({(name, labels["reader"]): value}),
        )
    house.collector().run_once()
    assert told["reader_lag", "slow"] == 30
    assert told["reader_lag", "done"] == 0
    assert told["reader_lag_seconds", "slow"] == pytest.approx(3_600.3, abs=0.1)
    assert told["reader_lag_seconds", "done"] == 0
    for reader in ("slow", "done"):
        assert told["reader_expires_seconds", reader] == pytest.approx(7 * DAY_S - 3_600, abs=1)


def test_f44_a_reader_expires_after_its_time_and_not_at_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    house = House()
    house.append(40)
    away = house.reader("away")
    read(away, 10)
    moved_ms = house.runtime.now_ms()
    house.runtime.set_wall_clock(moved_ms + WEEK_MS)
    house.collector().run_once()
    assert house.index().readers == ("away",)
    house.runtime.set_wall_clock(moved_ms + WEEK_MS + 1)
    house.collector().run_once()
    assert house.index().readers == ()
    assert (
        "reader 'away' of ingest/manifest has expired: it was last heard of 7.0 days ago, at "
        "sequence 10"
    ) in caplog.text


def test_f44_a_reader_whose_clock_is_behind_does_not_expire_while_the_store_sees_it_move() -> None:
    house = House()
    house.append(40)
    slow, other = house.reader("slow"), house.reader("other")
    read(slow, 10)
    read(other)
    # A position that a deletion has left behind is nobody's.
    house.store.put("ingest/_readers/deleted.json", b"{}")
    now_ms = house.runtime.now_ms()
    house.store._now_ms = lambda: now_ms + 2 * WEEK_MS
    for reader in (slow, other):
        house.append(1)
        read(reader, 1)
    house.runtime.set_wall_clock(now_ms + 2 * WEEK_MS)
    house.collector().run_once()
    assert house.index().readers == ("other", "slow")


def test_a_cycle_that_changes_nothing_does_not_write_the_index() -> None:
    house = House()
    house.append(40)
    read(house.reader("reader"), 10)
    house.collect()
    before = house.index()
    assert before.floor == 10
    house.collect()
    assert house.index() == before


def test_a_dry_run_plans_with_the_floor_that_a_cycle_would_write() -> None:
    house = House()
    house.append(40)
    read(house.reader("reader"))
    house.runtime.advance(3_600)
    before = house.index()
    planned = house.collector().run_once(dry_run=True)
    assert house.index() == before
    report = house.collector().run_once()
    assert report.deleted == len(planned.plan.delete) > 0
    assert house.index().floor == 40


def test_a_reader_without_a_position_is_noted_with_the_time_at_which_it_was_first_missed() -> None:
    house = House()
    house.append(40)
    for name in ("here", "away"):
        house.reader(name)
    house.store.delete_many(["ingest/_readers/away.json"])
    house.collect()
    missed_ms = house.runtime.now_ms()
    assert house.index().missing == {"away": missed_ms}
    house.runtime.advance(DAY_S)
    house.collect()
    assert house.index().missing == {"away": missed_ms}
    assert house.index().readers == ("away", "here")
