"""Ranges, size limits and small JSON objects, the same for every store."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.formats.sidecar import Sidecar
from opendata_buffer.stores.base import check_limit, check_range, check_size, cut, read_sidecar
from opendata_buffer.stores.memory import MemoryStore


@pytest.mark.parametrize("byte_range", [None, (0, 1), (7, 8), (0, 2**63)])
def test_ranges_with_bytes_in_them_are_fine(byte_range: tuple[int, int] | None) -> None:
    check_range(byte_range)


@pytest.mark.parametrize("byte_range", [(0, 0), (2, 1), (-1, 1)])
def test_others_are_named(byte_range: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match=r"byte_range is \(.*\): use \(start, end\)"):
        check_range(byte_range)


@pytest.mark.parametrize(
    ("byte_range", "size", "expected"),
    [
        (None, 5, (0, 5)),
        ((0, 5), 5, (0, 5)),
        ((1, 9), 5, (1, 5)),
        ((5, 9), 5, (5, 5)),
        ((7, 9), 5, (5, 5)),
        ((0, 1), 0, (0, 0)),
    ],
)
def test_cut(byte_range: tuple[int, int] | None, size: int, expected: tuple[int, int]) -> None:
    assert cut(byte_range, size) == expected


def test_a_size_up_to_the_limit_is_fine() -> None:
    check_size("k", 10, 10)
    check_size("k", 10, None)


def test_f21_a_size_beyond_the_limit_names_object_size_and_limit() -> None:
    with pytest.raises(CorruptData, match="'k' has 11 bytes to read, more than the limit of 10"):
        check_size("k", 11, 10)


@pytest.mark.parametrize("limit", [None, 1, 10**9])
def test_limits_that_let_something_through_are_fine(limit: int | None) -> None:
    check_limit(limit)


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_of_nothing_is_named(limit: int) -> None:
    with pytest.raises(InvalidInput, match=f"limit is {limit}: use a whole number of at least 1"):
        check_limit(limit)


NOTE = Sidecar("the note", "Delete it.", max_bytes=30)


def decode(data: bytes) -> int:
    return NOTE.decode(data).number("a")


def test_an_object_is_read_as_its_value() -> None:
    store = MemoryStore()
    store.put("in/_note.json", NOTE.encode({"a": 7}))
    assert read_sidecar(store, "in/_note.json", NOTE, decode) == 7


def test_a_missing_one_is_not_found() -> None:
    with pytest.raises(ObjectNotFound):
        read_sidecar(MemoryStore(), "in/_note.json", NOTE, decode)


@pytest.mark.parametrize("data", [b"{}", b"x" * 31])
def test_one_that_cannot_be_read_is_named_by_its_key(data: bytes) -> None:
    store = MemoryStore()
    store.put("in/_note.json", data)
    with pytest.raises(CorruptData, match=r"'in/_note\.json': the note is not .* Delete it\."):
        read_sidecar(store, "in/_note.json", NOTE, decode)
