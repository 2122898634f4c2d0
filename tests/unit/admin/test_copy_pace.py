"""How many batches of a copy go into one append."""

from __future__ import annotations

from opendata_buffer.admin.copy_pace import MOST_AT_ONCE, QUICK_MS, SLOW_MS, CopyPace


def test_slow_uploads_halve_what_is_taken_at_once_down_to_one_and_quick_ones_double_it() -> None:
    pace = CopyPace()
    assert pace.most == MOST_AT_ONCE
    seen = []
    while pace.most > 1:
        pace.took(SLOW_MS + 1)
        seen.append(pace.most)
    assert seen == [50, 25, 12, 6, 3, 1]
    pace.took(SLOW_MS + 1)
    assert pace.most == 1
    for _ in range(20):
        pace.took(QUICK_MS - 1)
    assert pace.most == MOST_AT_ONCE


def test_what_is_neither_slow_nor_quick_changes_nothing() -> None:
    pace = CopyPace()
    pace.took(SLOW_MS + 1)
    for milliseconds in (QUICK_MS, SLOW_MS):
        pace.took(milliseconds)
    assert pace.most == MOST_AT_ONCE // 2
