"""Times in whole ticks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulation import TICK_S, later, up_to_tick

SECONDS = st.floats(min_value=0, max_value=10**9)


@given(SECONDS)
def test_a_time_is_rounded_up_to_the_next_tick(seconds: float) -> None:
    rounded = up_to_tick(seconds)
    assert 0 <= rounded - seconds <= TICK_S
    assert (rounded / TICK_S).is_integer()
    assert up_to_tick(rounded) == rounded


@given(SECONDS, SECONDS)
def test_the_way_from_one_time_to_another_leads_there(start: float, end: float) -> None:
    start, end = up_to_tick(start), up_to_tick(end)
    assert start + (end - start) == end


@given(SECONDS.map(up_to_tick))
def test_any_wait_moves_the_clock(now: float) -> None:
    shortest = math.nextafter(0, 1)
    assert later(now, shortest) == now + TICK_S > now
    assert later(now, 3) == now + 3
    assert later(now, 0) == now
