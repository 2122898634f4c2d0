"""What partitions are called: ``p-00003-04vf``, a number and four letters.

The number says which partition it is, and is never given twice. The letters say where it lies.
Rendezvous hashing gives a key to the partition whose name's hash differs from the key's in the
highest bits, so it divides the keys as a binary tree over the names' hashes does. Of names like
``p-00000`` and ``p-00001`` those hashes are nearly the same, and the tree is lopsided. So the
letters are searched for: behind three zeros the hash of the whole name has the ten bits of the
partition's **place**, the lowest bit first::

    place   0               1               2               3               4
    hash    000 0000000000  000 1000000000  000 0100000000  000 1100000000  000 0010000000

However many of the lowest places are taken, the tree is as full as it can be: all partitions have
the same share of the keys if there is a power of two of them, and otherwise none has more than
twice the share of another. A partition that is added takes half of one other's keys.

The three zeros leave out of account the bits in which FNV-1a hardly tells short keys apart: of
all keys of one letter the highest three bits are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from opendata_buffer.mapping import PRIME, fnv1a
from opendata_buffer.queue.nesting import PARTITION_NAME

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "PLACES",
    "free_places",
    "has_letters",
    "is_abbreviated",
    "name_of",
    "number_meant",
    "number_of",
    "place_of",
]

_ZEROS = 3
_BITS = 10
PLACES = 1 << _BITS
"""More than a topic has partitions, so that there is always a free one."""

_LETTERS = "0123456789bcdfghjkmnpqrstvwxyz"
"""No vowels, so that no words come out; no l, which looks like a 1. Four of them have 810,000
possibilities, to find one of 8,192 beginnings of a hash with."""

_SHORT = re.compile(r"(?:p-)?(?P<number>[0-9]{1,5})")


def name_of(number: int, place: int) -> str:
    """The name of a new partition; always the same for the same arguments.

    The letters are the first that do, in the order of :data:`_LETTERS`.
    """
    import numpy as np

    shift = np.uint32(32 - _ZEROS - _BITS)
    for first in _LETTERS:
        stem = f"p-{number:05}-{first}"
        found = np.flatnonzero(_behind(stem) >> shift == _reversed(place))
        if len(found):
            return stem + "".join(_LETTERS[each] for each in _digits(int(found[0])))
    raise AssertionError(f"no name for partition {number} at place {place}")


def place_of(name: str) -> int:
    """Where a partition lies, by its name. Names without letters lie anywhere, often together."""
    bits = fnv1a(name.encode()) >> (32 - _ZEROS - _BITS)
    return _reversed(bits & (PLACES - 1))


def free_places(names: Iterable[str]) -> Iterator[int]:
    """The places that none of these partitions has, the lowest first."""
    taken = {place_of(name) for name in names}
    return (place for place in range(PLACES) if place not in taken)


def number_of(name: str) -> int | None:
    """The number in a partition's name; None if it is no such name.

    Partitions of topics that were made before there were letters have names like ``p-00003``.
    """
    found = PARTITION_NAME.fullmatch(name)
    return int(found["number"]) if found else None


def has_letters(name: str) -> bool:
    """Whether this is the whole name of a partition, and not what may be an abbreviation."""
    found = PARTITION_NAME.fullmatch(name)
    return found is not None and found["letters"] is not None


def number_meant(given: str) -> int | None:
    """The number in a name or an abbreviation of one: ``3``, ``p-3``, ``p-00003``."""
    found = _SHORT.fullmatch(given)
    return int(found["number"]) if found else number_of(given)


def is_abbreviated(given: str, name: str) -> bool:
    """Whether somebody who writes ``3``, ``p-3`` or ``p-00003`` means this partition."""
    found = _SHORT.fullmatch(given)
    return found is not None and int(found["number"]) == number_of(name)


def _reversed(bits: int) -> int:
    return int(f"{bits:0{_BITS}b}"[::-1], 2)


def _behind(stem: str) -> npt.NDArray[np.uint32]:
    """The hashes of a stem with any three letters behind it, in their order."""
    import numpy as np

    letters = np.frombuffer(_LETTERS.encode(), np.uint8)
    hashes = np.array([fnv1a(stem.encode())], np.uint32)
    for _ in range(3):
        hashes = ((hashes[:, None] ^ letters) * np.uint32(PRIME)).ravel()
    return hashes


def _digits(number: int) -> tuple[int, int, int]:
    high, low = divmod(number, len(_LETTERS))
    return (*divmod(high, len(_LETTERS)), low)
