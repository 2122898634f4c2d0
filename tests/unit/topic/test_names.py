"""Names that divide the keys evenly."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import numpy as np
import pytest

from opendata_buffer.topic.description import (
    MAX_PARTITIONS,
    PLACES,
    free_places,
    has_letters,
    is_abbreviated,
    name_of,
    number_meant,
    number_of,
    place_of,
)
from opendata_buffer.topic.partitioner import fnv1a, rendezvous


def pairs(letters: str) -> list[str]:
    return [a + b for a in letters for b in letters]


NAMES = [name_of(number, number) for number in range(129)]
DRAWN = random.Random(7)
KEYS = [DRAWN.randbytes(8) for _ in range(1 << 16)]
CHANCE = 0.08
"""How far a share may be off, of so many keys that are drawn at random."""


def indices(partitions: int) -> np.ndarray:
    return rendezvous(KEYS, NAMES[:partitions])


def shares(partitions: int) -> np.ndarray:
    """Of each partition, in multiples of the even share."""
    return np.bincount(indices(partitions), minlength=partitions) * partitions / len(KEYS)


@pytest.mark.parametrize("partitions", [1, 2, 4, 8, 16, 32, 64])
def test_a_power_of_two_of_partitions_have_the_same_share(partitions: int) -> None:
    assert np.abs(shares(partitions) - 1).max() < CHANCE


@pytest.mark.parametrize("partitions", [3, 5, 6, 7, 9, 12, 17, 24, 31, 33, 48, 63])
def test_of_any_number_none_has_more_than_twice_the_share_of_another(partitions: int) -> None:
    found = shares(partitions)
    assert found.max() / found.min() < 2 * (1 + CHANCE) ** 2
    assert found.max() < 2


@pytest.mark.parametrize("partitions", [1, 2, 3, 4, 7, 15, 16, 17, 31, 63])
def test_a_new_partition_takes_half_of_the_keys_of_one_other(partitions: int) -> None:
    before, after = indices(partitions), indices(partitions + 1)
    moved = before != after
    assert set(after[moved]) == {partitions}
    (split,) = set(before[moved])
    assert abs(moved.sum() / (before == split).sum() - 0.5) < CHANCE


@pytest.mark.parametrize("partitions", [1, 2, 3, 16, 24, 64])
def test_doubling_moves_half_of_the_keys(partitions: int) -> None:
    assert abs((indices(partitions) != indices(2 * partitions)).mean() - 0.5) < CHANCE


def test_a_partition_that_takes_another_ones_place_takes_exactly_its_keys() -> None:
    names = [*NAMES[:3], *NAMES[4:16], name_of(16, 3)]
    chosen = rendezvous(KEYS, names)
    assert [names[each] for each in chosen] == [
        names[-1] if each == 3 else NAMES[each] for each in indices(16)
    ]


def test_the_hash_of_a_name_begins_with_the_bits_of_the_place_in_reverse() -> None:
    firsts = [f"{fnv1a(name.encode()):032b}"[:6] for name in NAMES[:8]]
    assert firsts == [
        f"000{bits}" for bits in ("000", "100", "010", "110", "001", "101", "011", "111")
    ]


def test_a_name_is_a_function_of_number_and_place() -> None:
    """Never to change: two processes that add the same partition must agree on its name."""
    assert NAMES[:4] == ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb", "p-00003-04vf"]
    assert name_of(16, 3) == name_of(16, 3) != name_of(16, 16)
    for number, place in ((0, 0), (7, 1023), (999, 5), (99_999, 511)):
        name = name_of(number, place)
        assert (number_of(name), place_of(name)) == (number, place)


@pytest.mark.parametrize("number", [0, 2_047, 3_332, 99_999])
def test_every_number_finds_every_place(number: int) -> None:
    """Those in the middle have the fewest names to choose from."""
    places = range(number % 8, PLACES, 8)
    names = [name_of(number, place) for place in places]
    assert [place_of(name) for name in names] == list(places)
    assert {number_of(name) for name in names} == {number}


@pytest.mark.parametrize("keys", [string.ascii_uppercase, pairs(string.ascii_uppercase)])
def test_short_keys_are_not_all_in_one_partition(keys: Sequence[str]) -> None:
    counts = np.bincount(rendezvous(keys, NAMES[:8]), minlength=8)
    assert counts.max() * 8 / len(keys) < 1.5


def test_there_is_always_a_free_place() -> None:
    assert PLACES > MAX_PARTITIONS
    assert list(free_places([])) == list(range(PLACES))
    assert next(free_places([*NAMES[:3], NAMES[4]])) == 3


@pytest.mark.parametrize(
    ("given", "number"),
    [("p-00003", 3), ("p-00003-04vf", 3), ("p-99999", 99_999), ("p-00830-00bc", 830)],
)
def test_a_name_has_its_number(given: str, number: int) -> None:
    assert number_of(given) == number_meant(given) == number
    assert has_letters(given) == (len(given) > len("p-00003"))


@pytest.mark.parametrize(
    "given", ["", "ingest", "3", "p-3", "p-00003-", "p-00003-AB9", "p-00003-12", "p-00003-04vf/x"]
)
def test_what_is_no_name_has_no_number(given: str) -> None:
    assert number_of(given) is None
    assert not has_letters(given)


def test_an_abbreviation_means_one_partition() -> None:
    for given in ("3", "03", "p-3", "p-00003"):
        assert number_meant(given) == 3
        assert is_abbreviated(given, "p-00003-04vf")
        assert not is_abbreviated(given, "p-00030-0w11")
    for given in ("p-00003-04vf", "p-00003-", "-3", "3x", "123456", "\u0663"):
        assert not is_abbreviated(given, "p-00003-04vf")
