"""Single values as the Java classes behind Spark read and write them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation, Overflow

import numpy as np
import pyarrow as pa

from opendata_buffer.values.options import JSON, ValueOptions
from opendata_buffer.values.times import days_of, julian_days, micros_of

__all__ = [
    "Unfit",
    "base64_bytes",
    "date_reader",
    "decimal_of",
    "float32_of",
    "java_double",
    "java_string",
    "java_text",
    "json_string",
    "timestamp_reader",
]

# Digits are taken in one way only: with a second one, a long text that is none takes for ever.
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,10})?", re.ASCII)
_HALF_PAIR = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_INT = re.compile(r"[+-]?\d{1,30}", re.ASCII)
_EXACT = Context(prec=2000, Emax=999_999_999, Emin=-999_999_999)
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r",
            "\t": "\\t"}  # fmt: skip
_TO_ESCAPE = re.compile('["\\\\\x00-\x1f\ud800-\udfff]')


class Unfit(Exception):
    """A value that is not of its column's type."""


def decimal_of(text: str, precision: int, scale: int) -> Decimal:
    """The number, rounded half up to the scale.

    Raises:
        Unfit: It is none, or has more digits than the precision.
    """
    if _DECIMAL.fullmatch(text) is None:
        raise Unfit(f"{text[:40]!r} is no decimal number")
    try:
        number = _EXACT.create_decimal(text)
        if number and number.adjusted() > 100:
            raise Unfit(f"{text[:40]!r} has more than {precision} digits")
        rounded = number.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP, _EXACT)
    except (InvalidOperation, Overflow) as error:
        raise Unfit(f"{text[:40]!r} has too many digits") from error
    if rounded and rounded.adjusted() + 1 + scale > precision:
        raise Unfit(f"{text[:40]!r} has more than {precision} digits")
    return rounded if rounded else abs(rounded)  # There is no negative zero.


def float32_of(text: str) -> float:
    """The nearest number of 32 bits, rounded once."""
    wide = float(text)
    with np.errstate(over="ignore"):
        narrow = np.float32(wide)
    if not np.isfinite(narrow) or float(narrow) == wide:
        return float(narrow)
    # Rounded twice, a number beside the middle of two may go to the wrong one.
    other = np.nextafter(narrow, np.float32(np.inf if wide > float(narrow) else -np.inf))
    if np.isfinite(other) and abs(wide - float(narrow)) == abs(wide - float(other)):
        exact, middle = Decimal(text), Decimal(wide)  # Fractions have a limit of digits.
        if exact != middle and (exact > middle) == (float(other) > float(narrow)):
            return float(other)
    return float(narrow)


def java_double(value: float) -> str:
    """A number as ``Double.toString`` of Java 19 and later writes it, the words in quotes."""
    if value != value:
        return '"NaN"'
    if value in (float("inf"), float("-inf")):
        return '"Infinity"' if value > 0 else '"-Infinity"'
    sign = "-" if np.signbit(value) else ""
    if value == 0:
        return f"{sign}0.0"
    _, digits, _ = Decimal(repr(abs(value))).as_tuple()
    text = "".join(map(str, digits)).rstrip("0") or "0"
    point = Decimal(repr(abs(value))).adjusted()
    if -3 <= point < 7:
        if point < 0:
            return f"{sign}0.{'0' * (-point - 1)}{text}"
        whole = text[: point + 1].ljust(point + 1, "0")
        return f"{sign}{whole}.{text[point + 1 :] or '0'}"
    return f"{sign}{text[0]}.{text[1:] or '0'}E{point}"


def java_string(text: str) -> str:
    """The text as UTF-8 can hold it: halves of a pair are joined, a half alone is ``?``."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "replace").decode()


def java_text(record: bytes) -> str:
    """The text of bytes as Java decodes UTF-8: U+FFFD for what is wrong."""
    try:
        return record.decode()
    except UnicodeDecodeError:
        # Half a surrogate pair is one mistake to Java, and three to Python.
        return _HALF_PAIR.sub(b"\xef\xbf\xbd", record).decode("utf-8", "replace")


def json_string(text: str) -> str:
    """The text as a JSON string; half a surrogate pair is an escape."""
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return '"' + _TO_ESCAPE.sub(_escape, joined) + '"'


def _escape(found: re.Match[str]) -> str:
    char = found.group()
    return _ESCAPED.get(char) or f"\\u{ord(char):04X}"


def base64_bytes(text: str) -> bytes:
    """The bytes.

    Raises:
        Unfit: It is not base64 with its padding.
    """
    try:
        if len(text) % 4:
            raise ValueError(text)
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unfit("it is not base64") from error


def timestamp_reader(dtype: pa.TimestampType, options: ValueOptions) -> Callable[[str], int]:
    """A function from text to microseconds, which raises :class:`Unfit`."""
    ntz = dtype.tz is None
    zone = None if ntz else options.zone
    pattern = options.pattern("timestampNTZFormat" if ntz else "timestampFormat")

    def read(text: str) -> int:
        found = micros_of(text, zone) if pattern is None else pattern.micros(text, zone)
        if found is None and pattern is None and not ntz and "GMT" in text:
            found = micros_of(text.replace("GMT", ""), zone)
        if found is None:
            raise Unfit(f"{text!r} is no timestamp")
        return found

    return read


def date_reader(options: ValueOptions) -> Callable[[str], int]:
    """A function from text to days since 1970-01-01, which raises :class:`Unfit`."""
    pattern = options.pattern("dateFormat")
    counted = options.format == JSON  # As days since 1970, which CSV does not take.

    def read(text: str) -> int:
        if pattern is not None:
            found = pattern.days(text)
        else:
            found = days_of(text)
            if found is None:
                found = days_of(text.replace("GMT", ""))
                if found is None and counted and _INT.fullmatch(text) and abs(int(text)) < 1 << 31:
                    found = julian_days(int(text))
        if found is None or not -(1 << 31) <= found < 1 << 31:
            raise Unfit(f"{text!r} is no date")
        return found

    return read
