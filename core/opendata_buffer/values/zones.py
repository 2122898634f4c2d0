"""Time zones by the names Java knows, and the instant of a local time in one."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

__all__ = ["MICROS", "civil_days", "instant_micros", "zone_of"]

MICROS = 1_000_000
_DAY = 24 * 60 * 60
_OFFSET = re.compile(
    r"([+-])(?:(\d)|(\d\d)|(\d\d)(\d\d)|(\d\d):(\d\d)|(\d\d)(\d\d)(\d\d)|(\d\d):(\d\d):(\d\d))",
    re.ASCII,
)
_ONE_HOUR_DIGIT = re.compile(r"([+-])(\d):", re.ASCII)
_ONE_MINUTE_DIGIT = re.compile(r"([+-])(\d\d):(\d)$", re.ASCII)
_PREFIXES = ("UTC", "GMT", "UT")
# What java.time.ZoneId.SHORT_IDS stands for.
_SHORT = {
    "ACT": "Australia/Darwin", "AET": "Australia/Sydney", "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo", "AST": "America/Anchorage", "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka", "CAT": "Africa/Harare", "CNT": "America/St_Johns",
    "CST": "America/Chicago", "CTT": "Asia/Shanghai", "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris", "IET": "America/Indiana/Indianapolis", "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo", "MIT": "Pacific/Apia", "NET": "Asia/Yerevan", "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi", "PNT": "America/Phoenix", "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles", "SST": "Pacific/Guadalcanal", "VST": "Asia/Ho_Chi_Minh",
    "EST": "-05:00", "MST": "-07:00", "HST": "-10:00",
}  # fmt: skip


@lru_cache(maxsize=1024)
def zone_of(name: str) -> tzinfo | None:
    """The zone of a name such as ``Europe/Berlin``, ``+02:00``, ``UTC+2`` or ``PST``; else None."""
    name = _ONE_HOUR_DIGIT.sub(r"\g<1>0\2:", name, count=1)
    name = _ONE_MINUTE_DIGIT.sub(r"\1\2:0\3", name, count=1)
    name = _SHORT.get(name, name)
    if name == "Z" or name in _PREFIXES:
        return UTC
    if name.startswith(("+", "-")):
        return _offset(name)
    for prefix in _PREFIXES:
        if name.startswith((f"{prefix}+", f"{prefix}-")):
            return _offset(name[len(prefix) :])
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):  # also names that lead out of the directory
        return None


def _offset(text: str) -> tzinfo | None:
    found = _OFFSET.fullmatch(text)
    if found is None:
        return None
    sign, *numbers = (each for each in found.groups() if each is not None)
    hours, minutes, seconds = ([int(each) for each in numbers] + [0, 0])[:3]
    total = hours * 3600 + minutes * 60 + seconds
    if minutes > 59 or seconds > 59 or total > 18 * 3600:
        return None
    return timezone(timedelta(seconds=-total if sign == "-" else total))


def civil_days(year: int, month: int, day: int) -> int | None:
    """Days since 1970-01-01 of a date of any year; None where the calendar does not have it."""
    cycle, within = divmod(year - 1, 400)
    try:
        ordinal = datetime(within + 1, month, day).toordinal()
    except ValueError:
        return None
    return ordinal + cycle * 146_097 - 719_163


def instant_micros(days: int, micros_of_day: int, zone: tzinfo) -> int:
    """Microseconds since the Unix epoch of a local time.

    A local time that a clock going forward leaves out is moved by as much; of one that comes
    twice the first counts.
    """
    local = days * _DAY * MICROS + micros_of_day
    if zone is UTC:
        return local
    # Rules of zones repeat every 400 years beyond what datetime holds.
    ordinal = days + 719_163
    if not 2 <= ordinal <= 3_652_058:
        # Of the last 400 years that it holds whole: 10000 is the end of the next.
        ordinal = ordinal % 146_097 + (23 * 146_097 if ordinal > 0 else 146_097)
    at = datetime.fromordinal(ordinal) + timedelta(microseconds=micros_of_day)
    offset = zone.utcoffset(at.replace(tzinfo=zone))
    assert offset is not None
    return local - (offset.days * _DAY + offset.seconds) * MICROS
