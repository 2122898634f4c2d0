from __future__ import annotations

from datetime import UTC, datetime

import pytest

from opendata_buffer.values.times import days_of, julian_days, micros_of
from opendata_buffer.values.zones import zone_of


def micros(*fields: int) -> int:
    return round(datetime(*fields, tzinfo=UTC).timestamp() * 1_000_000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["2020-01-01", " 2020-1-1 ", "2020", "2020-01", "+2020-01-01", "2020-01-01 any", "2020-1-1T"],
)
def test_dates_have_many_spellings(text: str) -> None:
    assert days_of(text) == 18_262


@pytest.mark.parametrize(
    "text", ["", " ", "202", "2020-13-01", "2020-02-30", "20-1-1", "2020-1 x", "x", "2020--1"]
)
def test_what_is_no_date_is_none(text: str) -> None:
    assert days_of(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2020", micros(2020, 1, 1)),
        ("2020-1-2", micros(2020, 1, 2)),
        ("2020-01-02T03", micros(2020, 1, 2, 3)),
        ("2020-01-02 3:4", micros(2020, 1, 2, 3, 4)),
        ("2020-01-02 03:04:05", micros(2020, 1, 2, 3, 4, 5)),
        ("2020-01-02T03:04:05.5Z", micros(2020, 1, 2, 3, 4, 5, 500_000)),
        ("2020-01-02T03:04:05.123456789", micros(2020, 1, 2, 3, 4, 5, 123_456)),
        ("2020-01-02T03:04:05.", micros(2020, 1, 2, 3, 4, 5)),
        ("2020-01-02T03:04:05+01:00", micros(2020, 1, 2, 2, 4, 5)),
        ("2020-01-02T03:04:05 Europe/Berlin", micros(2020, 1, 2, 2, 4, 5)),
    ],
)
def test_timestamps_have_many_spellings(text: str, expected: int) -> None:
    assert micros_of(text, UTC) == expected


@pytest.mark.parametrize(
    "text",
    ["", "10:20:30", "T10:20", "2020-01-02T", "2020-01-02T24:00:00", "2020-01-02T10:20:60", "x",
     "2020-01-02T10Z", "2020-01-02T10:20Z", "2020-01-02T10:20:30Nowhere", "2020-01-02t10:20:30",
     "999999-01-01"],
)  # fmt: skip
def test_what_is_no_timestamp_is_none(text: str) -> None:
    assert micros_of(text, UTC) is None


def test_a_local_time_may_not_name_a_zone() -> None:
    assert micros_of("2020-01-02T03:04:05", None) == micros(2020, 1, 2, 3, 4, 5)
    assert micros_of("2020-01-02T03:04:05Z", None) is None


def test_a_time_without_a_zone_is_in_the_one_that_is_given() -> None:
    assert micros_of("2020-01-02T03:04:05", zone_of("+02:00")) == micros(2020, 1, 2, 1, 4, 5)


def test_days_before_the_gregorian_calendar_are_moved() -> None:
    assert julian_days(-141_427) == -141_427
    # 1582-10-04 in the Julian calendar is the day before; its date in ours lies ten days earlier.
    assert julian_days(-141_428) == -141_438
    assert julian_days(-719_164) == -719_162
