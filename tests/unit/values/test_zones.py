# ruff: noqa: E501
from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from opendata_buffer.values.zones import MICROS, civil_days, instant_micros, zone_of

HOUR = 3600 * MICROS


@pytest.mark.parametrize(
    ("name", "hours"),
    [("Z", 0), ("UTC", 0), ("+02:00", 2), ("-3", -3), ("+0530", 5.5), ("UTC+2", 2), ("GMT-01:00", -1),
     ("+5:30", 5.5), ("EST", -5), ("+18:00", 18), ("+01:30:30", 1.5 + 30 / 3600)],
)  # fmt: skip
def test_offsets_have_many_spellings(name: str, hours: float) -> None:
    zone = zone_of(name)
    assert zone is not None
    assert zone.utcoffset(datetime(2020, 1, 1)) == timedelta(hours=hours)


@pytest.mark.parametrize(
    "name", ["", "z", "+19:00", "+1:2:3", "Nowhere/City", "America", "../etc", "+99"]
)
def test_what_nobody_knows_is_no_zone(name: str) -> None:
    assert zone_of(name) is None


def test_days_are_counted_in_years_that_datetime_does_not_have() -> None:
    assert civil_days(1970, 1, 1) == 0
    assert civil_days(2000, 2, 29) == 11_016
    assert civil_days(2001, 2, 29) is None
    assert civil_days(0, 1, 1) == -719_528
    assert civil_days(-1, 12, 31) == -719_529
    assert civil_days(10_000, 1, 1) == 2_932_897


def test_a_time_that_comes_twice_is_the_first_and_one_that_is_left_out_moves() -> None:
    berlin = zone_of("Europe/Berlin")
    assert berlin is not None
    autumn, spring = civil_days(2020, 10, 25), civil_days(2020, 3, 29)
    assert autumn is not None
    assert spring is not None
    half_past_two = int(2.5 * HOUR)
    assert instant_micros(autumn, half_past_two, berlin) == (autumn * 24 * HOUR) + HOUR // 2
    assert instant_micros(spring, half_past_two, berlin) == (spring * 24 * HOUR) + 3 * HOUR // 2
    assert instant_micros(spring, 0, UTC) == spring * 24 * HOUR


def test_zones_hold_in_any_year() -> None:
    berlin = zone_of("Europe/Berlin")
    assert berlin is not None
    for year in (-5000, 0, 10_000, 12_000, 12_345, 294_000):
        for month, day in ((7, 1), (12, 31)):
            days = civil_days(year, month, day)
            assert days is not None
            assert 0 < days * 24 * HOUR - instant_micros(days, 0, berlin) <= 2 * HOUR
