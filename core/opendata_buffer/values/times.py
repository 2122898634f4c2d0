"""Dates and times in the many spellings that Spark takes when no format is given."""

from __future__ import annotations

from datetime import tzinfo

from opendata_buffer.values.zones import MICROS, civil_days, instant_micros, zone_of

__all__ = ["MAX_LONG", "MIN_LONG", "days_of", "julian_days", "micros_of"]

MIN_LONG, MAX_LONG = -(1 << 63), (1 << 63) - 1
_TRIMMED = "".join(map(chr, range(0x21))) + "\x7f"
_FIRST_GREGORIAN = -141_427  # 1582-10-15
_MAX_DAYS = (1 << 31) - 1


def days_of(text: str) -> int | None:
    """Days since 1970-01-01 of ``[+-]yyyy[-m[-d]]``; behind a day and a space or T is anything."""
    text = text.strip(_TRIMMED)
    if not text:
        return None
    sign = -1 if text[0] == "-" else 1
    if text[0] in "+-":
        text = text[1:]
    end = min((text.find(each) for each in " T" if each in text), default=len(text))
    parts = text[:end].split("-", 2)
    if end < len(text) and len(parts) < 3:
        return None
    if not _digits(parts[0], 4, 7) or not all(_digits(each, 1, 2) for each in parts[1:]):
        return None
    year, month, day = ([int(each) for each in parts] + [1, 1])[:3]
    return civil_days(sign * year, month, day)


def julian_days(days: int) -> int:
    """The day of our calendar with the date that the Julian one had so many days from 1970."""
    if days >= _FIRST_GREGORIAN:
        return days
    # Counted from March of the year 0, so that the leap day ends a cycle of four years.
    cycles, day = divmod(days + 719_470, 1461)
    year = min(day // 365, 3)
    day -= 365 * year
    month = (5 * day + 2) // 153
    date = day - (153 * month + 2) // 5 + 1
    year += 4 * cycles + (month >= 10)
    found = civil_days(year, month + 3 if month < 10 else month - 9, date)
    return days if found is None else found


def micros_of(text: str, zone: tzinfo | None) -> int | None:
    """Microseconds since the Unix epoch, or None for what is no date and time.

    Args:
        text: ``[+-]yyyy[-m[-d[( |T)h:m:s[.ffffff][zone]]]]``.
        zone: Of a text that names none; None for local times, which may name none.
    """
    text = text.strip(_TRIMMED)
    segments, named = _segments(text)
    if segments is None:
        return None
    if named is not None:
        if zone is None:
            return None
        zone = zone_of(named.strip(_TRIMMED))
        if zone is None:
            return None
    year, month, day, hour, minute, second, micros = segments
    days = civil_days(year, month, day)
    if days is None or hour > 23 or minute > 59 or second > 59:
        return None
    of_day = ((hour * 60 + minute) * 60 + second) * MICROS + micros
    found = days * 86_400 * MICROS + of_day if zone is None else instant_micros(days, of_day, zone)
    return found if MIN_LONG <= found <= MAX_LONG else None


def _segments(text: str) -> tuple[list[int] | None, str | None]:
    """Year, month, day, hour, minute, second and microsecond; and what names a zone.

    A text with a time and no date is none here: Spark adds the day on which it is read.
    """
    none = (None, None)
    if not text:
        return none
    sign = -1 if text[0] == "-" else 1
    rest = text[1:] if text[0] in "+-" else text
    date, separator, time = rest, "", ""
    for at, char in enumerate(rest):
        if not ("0" <= char <= "9" or char == "-"):
            if char not in " T":
                return none
            date, separator, time = rest[:at], char, rest[at + 1 :]
            break
    parts = date.split("-")
    if len(parts) > 3 or (separator and len(parts) < 3):
        return none
    if not _digits(parts[0], 4, 6) or not all(_digits(each, 1, 2) for each in parts[1:]):
        return none
    year, month, day = ([int(each) for each in parts] + [1, 1])[:3]
    segments = [sign * year, month, day, 0, 0, 0, 0]
    if not separator:
        return segments, None
    # Hours and minutes end with a colon; what follows the seconds and is no fraction is a zone.
    at = 0
    for segment in (3, 4, 5):
        end = _end_of_digits(time, at)
        if not 1 <= end - at <= 2:
            return none
        segments[segment] = int(time[at:end])
        at = end
        if at == len(time):
            return segments, None
        if segment < 5:
            if time[at] != ":":
                return none
            at += 1
    if time[at] == ".":
        end = _end_of_digits(time, at + 1)
        segments[6] = int(time[at + 1 : end][:6].ljust(6, "0"))
        at = end
    return segments, time[at:] if at < len(time) else None


def _end_of_digits(text: str, at: int) -> int:
    while at < len(text) and "0" <= text[at] <= "9":
        at += 1
    return at


def _digits(text: str, least: int, most: int) -> bool:
    return least <= len(text) <= most and text.isascii() and text.isdigit()
