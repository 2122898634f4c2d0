"""Patterns such as ``yyyy-MM-dd HH:mm:ss`` for reading dates and times, as Spark's options take."""

from __future__ import annotations

import re
from datetime import tzinfo
from functools import lru_cache

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.times import MAX_LONG, MIN_LONG
from opendata_buffer.values.zones import MICROS, civil_days, instant_micros, zone_of

__all__ = ["Pattern"]

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_LETTERS = "y M L d D E a H k K h m s S X x Z VV"
_OFFSETS = {
    1: r"[+-]\d\d(?:\d\d)?",
    2: r"[+-]\d{4}",
    3: r"[+-]\d\d:\d\d",
    4: r"[+-]\d{4}(?:\d\d)?",
    5: r"[+-]\d\d:\d\d(?::\d\d)?",
}
_TWO = {"d": "day", "H": "hour", "k": "hour24", "K": "hour12", "h": "clock", "m": "minute",
        "s": "second"}  # fmt: skip


class Pattern:
    """One pattern, ready to read texts.

    Args:
        pattern: Letters as in Java's ``DateTimeFormatter``.
        option: What it was given as, for messages.

    Raises:
        InvalidInput: A letter that is not read here, or quotes or brackets without an end.
    """

    def __init__(self, pattern: str, option: str) -> None:
        self._pattern = pattern
        self._option = option
        self._names: list[str] = []
        body = self._compile()
        self._regex = re.compile(body, re.IGNORECASE | re.ASCII)

    def days(self, text: str) -> int | None:
        """Days since 1970-01-01, or None for a text that the pattern does not fit."""
        fields = self._fields(text)
        return None if fields is None else _days(fields)

    def micros(self, text: str, zone: tzinfo | None) -> int | None:
        """Microseconds since the Unix epoch, or None for a text that the pattern does not fit.

        Args:
            text: What to read.
            zone: Of a pattern or text without one; None for local times.
        """
        fields = self._fields(text)
        if fields is None:
            return None
        days, of_day = _days(fields), _micros_of_day(fields)
        if days is None or of_day is None:
            return None
        if zone is None:
            found = days * 86_400 * MICROS + of_day
        else:
            named = fields.get("zone")
            if named is not None:
                zone = zone_of("Z" if named in ("z", "Z") else named)
                if zone is None:
                    return None
            found = instant_micros(days, of_day, zone)
        return found if MIN_LONG <= found <= MAX_LONG else None

    def _fields(self, text: str) -> dict[str, str] | None:
        found = self._regex.fullmatch(text)
        if found is None:
            return None
        fields: dict[str, str] = {}
        for name, value in zip(self._names, found.groups(), strict=True):
            if value is not None and fields.setdefault(name, value) != value:
                return None  # The same field twice, and they differ.
        return fields

    def _compile(self) -> str:
        parts, at, depth, text = [], 0, 0, self._pattern
        while at < len(text):
            char = text[at]
            if char == "'":
                end = text.find("'", at + 1)
                if end < 0:
                    raise self._refused("a quote has no end")
                parts.append(re.escape(text[at + 1 : end] or "'"))
                at = end + 1
            elif char in "[]":
                depth += 1 if char == "[" else -1
                if depth < 0:
                    raise self._refused("a bracket closes nothing")
                parts.append("(?:" if char == "[" else ")?")
                at += 1
            elif char.isascii() and char.isalpha():
                end = at
                while end < len(text) and text[end] == char:
                    end += 1
                parts.append(self._letters(char, end - at))
                at = end
            else:
                parts.append(re.escape(char))
                at += 1
        if depth:
            raise self._refused("a bracket is not closed")
        return "".join(parts)

    def _letters(self, char: str, count: int) -> str:
        name, regex = self._meaning(char, count)
        self._names.append(name)
        return f"({regex})"

    def _meaning(self, char: str, count: int) -> tuple[str, str]:
        if char == "y" and count == 2:
            return "year2", r"\d\d"
        if char == "y" and count <= 6:
            return "year", rf"-?\d{{{count}}}|\+\d{{{count + 1},9}}" if count > 2 else r"-?\d{1,9}"
        if char in "ML" and count <= 2:
            return "month", r"\d\d" if count == 2 else r"\d{1,2}"
        if char in "ML" and count <= 4:
            return "month_name", "|".join(each[: 3 if count == 3 else None] for each in _MONTHS)
        if char == "E" and count <= 4:
            return "weekday", "|".join(each[: None if count == 4 else 3] for each in _DAYS)
        if char == "D" and count <= 3:
            return "day_of_year", rf"\d{{{count},3}}"
        if char in _TWO and count <= 2:
            return _TWO[char], r"\d\d" if count == 2 else r"\d{1,2}"
        if char == "S" and count <= 9:
            return "fraction", rf"\d{{1,{count}}}"
        if char == "a" and count == 1:
            return "half", "AM|PM"
        if char == "X" and count <= 5:
            return "zone", f"Z|{_OFFSETS[count]}"
        if char == "x" and count <= 5:
            return "zone", _OFFSETS[count]
        if char == "Z" and count <= 3:
            return "zone", _OFFSETS[2]
        if char == "Z" and count == 5:
            return "zone", f"Z|{_OFFSETS[5]}"
        if char == "V" and count == 2:
            return "zone", r"[A-Za-z][A-Za-z0-9~/._+:-]*|[+-][0-9:]+"
        raise self._refused(f"{char * count!r} is not read here")

    def _refused(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"option {self._option} is {self._pattern!r}: {why}. Letters: {_LETTERS}, text in "
            "single quotes, optional parts in brackets, for example "
            "yyyy-MM-dd'T'HH:mm:ss[.SSS]XXX. Or read the column as STRING and convert it with "
            "to_timestamp after loading"
        )


@lru_cache(maxsize=4096)
def _date(year: int, month: int, day: int) -> int | None:
    return civil_days(year, month, day)


def _days(fields: dict[str, str]) -> int | None:
    year = int(fields["year"]) if "year" in fields else 1970
    if "year2" in fields:
        year = 2000 + int(fields["year2"])
    if "day_of_year" in fields:
        begin, end = _date(year, 1, 1), _date(year + 1, 1, 1)
        assert begin is not None
        assert end is not None
        number = int(fields["day_of_year"])
        days = begin + number - 1 if 1 <= number <= end - begin else None
    else:
        month = int(fields.get("month", 1))
        if "month_name" in fields:
            named = fields["month_name"][:3].title()
            month = next(at for at, each in enumerate(_MONTHS, 1) if each.startswith(named))
        days = _date(year, month, int(fields.get("day", 1)))
    if days is not None and "weekday" in fields:
        return days if _DAYS[(days + 3) % 7].startswith(fields["weekday"][:3].title()) else None
    return days


def _micros_of_day(fields: dict[str, str]) -> int | None:
    hour = int(fields.get("hour", 0))
    if "hour24" in fields:
        hour = int(fields["hour24"])
        if not 1 <= hour <= 24:
            return None
        hour %= 24
    if "clock" in fields or "hour12" in fields:
        half = int(fields.get("hour12", fields.get("clock", "0")))
        if ("clock" in fields and not 1 <= half <= 12) or ("hour12" in fields and half > 11):
            return None
        hour = half % 12 + (12 if fields.get("half", "AM").upper() == "PM" else 0)
    minute, second = int(fields.get("minute", 0)), int(fields.get("second", 0))
    if hour > 23 or minute > 59 or second > 59:
        return None
    micros = int(fields.get("fraction", "").ljust(9, "0")[:6])
    return ((hour * 60 + minute) * 60 + second) * MICROS + micros
