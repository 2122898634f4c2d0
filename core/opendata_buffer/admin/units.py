"""Read durations and sizes as an operator writes them."""

from __future__ import annotations

import re
from operator import mul

from opendata_buffer.errors import InvalidInput

_DURATION = re.compile(r"P?(?:(\d{1,6})D)?T?(?:(\d{1,6})H)?(?:(\d{1,6})M)?(?:(\d{1,9})S)?", re.I)


def duration_ms(text: str) -> int:
    """Parse a duration: ``7d``, ``1d12h``, ``90m``, ``30s``, or ``P7DT12H``.

    Args:
        text: A duration.

    Returns:
        Milliseconds.

    Raises:
        InvalidInput: The text is not a duration.
    """
    found = _DURATION.fullmatch(text)
    if found is None or not any(found.groups()):
        raise InvalidInput(f"invalid duration {text!r}: use one such as 7d, 12h, 90m or 1d12h")
    counts = [int(each or 0) for each in found.groups()]
    return sum(map(mul, counts, (86_400_000, 3_600_000, 60_000, 1_000)))


_SIZE = re.compile(r"(\d{1,18})(?:([kKMGTP])(i?)B|B)?")


def size_bytes(text: str) -> int:
    """Parse a size such as ``500GB``, ``64MiB`` or ``1000``.

    Args:
        text: A size.

    Returns:
        Bytes.

    Raises:
        InvalidInput: The text is not a size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InvalidInput(f"invalid size {text!r}: use one such as 500GB, 64MiB or 1000")
    count, unit, binary = found.groups()
    power = " KMGTP".index(unit.upper()) if unit else 0
    return int(count) * int((1024 if binary else 1000) ** power)
