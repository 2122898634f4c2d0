"""A writer that never stops leaves gaps, and one that stops by itself does not."""

from __future__ import annotations

from opendata_buffer.producer.group_commit import ALONE_S, BESIDE_S, KNOWN_S, Gaps

WRITE_S = 0.06


def gaps_of(seconds: float, idle_s: float, raced_at: float | None = None) -> list[float]:
    """When gaps came while something was written all the time, but for so long before each."""
    gaps, now, found = Gaps(), 0.0, []
    while now < seconds:
        began = now
        now += WRITE_S
        if raced_at is not None and began <= raced_at < now:
            gaps.lost(now)
        gap = gaps.wrote(began, now)
        if gap:
            assert 2.9 * WRITE_S <= gap <= 3.1 * WRITE_S
            found.append(now)
        now += gap + idle_s
    return found


def test_who_writes_all_the_time_leaves_a_gap_now_and_then() -> None:
    found = gaps_of(6 * ALONE_S, idle_s=0.003)
    assert 4 <= len(found) <= 6
    assert found[0] < ALONE_S + 2 * WRITE_S


def test_after_a_lost_race_gaps_come_every_second_for_a_minute() -> None:
    found = gaps_of(20 + KNOWN_S + 7 * ALONE_S, idle_s=0.003, raced_at=20.0)
    beside = [at for at in found if 20 < at < 20 + KNOWN_S]
    assert len(beside) >= KNOWN_S / (BESIDE_S + 5 * WRITE_S)
    after = [at for at in found if at > 20 + KNOWN_S + ALONE_S]
    assert 5 <= len(after) <= 6


def test_who_has_nothing_to_write_for_a_while_leaves_no_gaps_beside() -> None:
    assert gaps_of(6 * ALONE_S, idle_s=0.04) == []


def test_a_write_that_hung_makes_no_long_gap() -> None:
    gaps = Gaps()
    assert gaps.wrote(0, 60) == 0
    assert 0 < gaps.wrote(60, 120) <= 0.5
