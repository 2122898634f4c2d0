"""The rules for how long writers wait for each other.

tests/simulation/test_write_fairness.py simulates many writers on virtual time.
"""

from __future__ import annotations

import pytest

from opendata_buffer.formats.batch import batch_key, tagged_ulid, ulid_tag
from opendata_buffer.producer.fairness import (
    ALONE_S,
    CONTENDED_S,
    CYCLES_EACH,
    KNOWN_S,
    MAX_PAUSE_S,
    MAX_TAGS,
    MAX_UNKNOWN_PAUSE_S,
    WINDOW_S,
    WriteFairness,
)
from opendata_buffer.testing.runtime import ManualRuntime

RUNTIME = ManualRuntime()
OWN = ulid_tag(RUNTIME.ulid())
CYCLE_S = 0.12


def location(tag: str | None = None) -> str:
    ulid = RUNTIME.ulid()
    return batch_key("ingest", ulid if tag is None else tagged_ulid(ulid, tag))


def tags(count: int) -> list[str]:
    return [ulid_tag(RUNTIME.ulid()) for _ in range(count)]


def fairness(draw: float = 0.5) -> WriteFairness:
    return WriteFairness(lambda: draw, OWN)


def test_a_single_writer_neither_reads_first_nor_pauses() -> None:
    ours = fairness()
    for now in range(100):
        assert not ours.begins(now)
        ours.won(now + 0.06)
        assert ours.pause(now + 0.06) <= 0


def test_after_a_win_a_writer_pauses_for_one_and_a_half_cycles_of_each_other_writer() -> None:
    ours = fairness()
    for tag in tags(3):
        ours.saw([location(tag), location(tag)], 1.0)
    assert ours.begins(1.0)
    ours.won(1.0 + CYCLE_S)
    assert ours.pause(1.0 + CYCLE_S) == pytest.approx(3 * 1.5 * CYCLE_S)


@pytest.mark.parametrize("draw", [0.0, 0.999])
def test_the_pause_varies_by_at_most_five_percent(draw: float) -> None:
    ours = fairness(draw)
    ours.saw([location(tag) for tag in tags(1) * 2], 1.0)
    ours.begins(1.0)
    ours.won(2.0)
    assert 0.95 * 1.5 - 1e-9 <= ours.pause(2.0) <= 1.05 * 1.5


def test_a_lost_race_is_retried_within_half_a_cycle_and_counts_as_another_writer() -> None:
    ours = fairness(0.999)
    assert not ours.begins(0.0)
    wait = ours.lost(0.06)
    assert 0 < wait <= 0.05
    assert ours.others(0.06) == 1
    ours.won(0.06 + wait + CYCLE_S)
    assert ours.pause(0.06 + wait + CYCLE_S) == pytest.approx(1.05 * 1.5 * CYCLE_S, rel=0.01)


@pytest.mark.parametrize("write_s", [0.001, 0.06, 0.4])
def test_the_pause_after_the_first_lost_race_is_at_most_the_time_of_a_write(write_s: float) -> None:
    """On a disk, a longer pause delayed records by 50 ms, which was the 99th percentile."""
    ours = fairness(0.999)
    for number in range(3):
        assert not ours.begins(float(number))
        ours.won(number + write_s)
    ours.begins(4.0)
    wait = ours.lost(4.0 + write_s)
    assert 0.9 * write_s < wait <= write_s, "the pause is a random share of a write"


def test_other_writers_are_forgotten_when_they_stop_writing() -> None:
    ours = fairness()
    ours.lost(1.0)
    ours.saw([location(tag) for tag in tags(4) * 2], 1.0)
    assert ours.others(1.0 + WINDOW_S) == 4
    assert ours.others(1.1 + WINDOW_S) == 0
    assert not ours.begins(1.1 + WINDOW_S)


def test_own_batches_and_batches_without_tags_are_not_counted() -> None:
    ours = fairness()
    ours.saw([location(OWN) for _ in range(10)], 1.0)
    ours.saw([location() for _ in range(1_000)], 1.0)
    ours.saw(["ingest/somebody-elses-name", "", "/"], 1.0)
    assert ours.others(1.0) == 0


def test_a_run_of_the_go_producer_counts_as_one_writer() -> None:
    ours, run = fairness(), RUNTIME.ulid()
    ours.saw([f"ingest/{run}/{n:016x}" for n in range(10)], 1.0)
    assert ours.others(1.0) == 1


def test_pause_and_memory_are_bounded_for_any_manifest() -> None:
    ours = fairness()
    for now in range(5):
        ours.saw([location(tag) for tag in tags(2_000) for _ in range(2)], now)
    assert len(ours._seen) == MAX_TAGS
    ours.begins(5.0)
    ours.won(10.0)
    assert ours.pause(10.0) == MAX_PAUSE_S


def test_one_write_that_hung_does_not_lengthen_the_next_pauses() -> None:
    ours, tag = fairness(), tags(1)[0]
    now = 0.0
    for takes in (CYCLE_S, CYCLE_S, 9.0, CYCLE_S):
        ours.saw([location(tag), location(tag)], now)
        ours.begins(now)
        now += takes
        ours.saw([location(tag), location(tag)], now)
        ours.won(now)
        assert ours.pause(now) == pytest.approx(1.5 * CYCLE_S)


WRITE_S = 0.06


def pauses_of(seconds: float, idle_s: float, raced_at: float | None = None) -> list[float]:
    """Return the times of pauses of a busy writer that is idle for ``idle_s`` before each write."""
    ours, now, found = WriteFairness(lambda: 0.5), 0.0, []
    while now < seconds:
        began = now
        ours.begins(now)
        now += WRITE_S
        if raced_at is not None and began <= raced_at < now:
            ours.lost(now)
        ours.won(now)
        pause = ours.pause(now)
        if pause > 1e-9:
            assert pause == pytest.approx(CYCLES_EACH * 2 * WRITE_S)
            found.append(now)
        now += max(0.0, pause) + idle_s
    return found


def test_a_writer_that_writes_all_the_time_pauses_sometimes() -> None:
    found = pauses_of(6 * ALONE_S, idle_s=0.003)
    assert 4 <= len(found) <= 6
    assert found[0] < ALONE_S + 2 * WRITE_S


def test_after_a_lost_race_there_is_a_pause_every_second_for_a_minute() -> None:
    found = pauses_of(20 + KNOWN_S + 7 * ALONE_S, idle_s=0.003, raced_at=20.0)
    beside = [at for at in found if 20 < at < 20 + KNOWN_S]
    assert len(beside) >= KNOWN_S / (CONTENDED_S + 5 * WRITE_S)
    after = [at for at in found if at > 20 + KNOWN_S + ALONE_S]
    assert 5 <= len(after) <= 6


def test_idle_time_counts_as_a_pause() -> None:
    assert pauses_of(6 * ALONE_S, idle_s=2.1 * WRITE_S) == []


def test_a_write_that_hung_does_not_cause_a_long_pause() -> None:
    ours = WriteFairness(lambda: 0.5)
    assert not ours.begins(0.0)
    ours.won(60.0)
    assert not ours.begins(60.0)
    ours.won(120.0)
    assert ours.pause(120.0) == MAX_UNKNOWN_PAUSE_S


def test_a_requested_pause_lasts_for_the_requested_number_of_writes() -> None:
    ours = WriteFairness(lambda: 0.5)
    assert not ours.begins(0.0)
    ours.won(WRITE_S)
    assert ours.let_in(3, WRITE_S) == pytest.approx(3 * CYCLES_EACH * 2 * WRITE_S)
    assert ours.let_in(1_000_000, WRITE_S) == MAX_UNKNOWN_PAUSE_S
    # The others have written, so only the next write reads first.
    assert ours.begins(1.0)
    ours.won(1.0 + 2 * WRITE_S)
    assert not ours.begins(1.2)
