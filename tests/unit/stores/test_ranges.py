"""Ranges and size limits."""

from __future__ import annotations

import io

import pytest

from opendata_buffer.errors import CorruptData, InvalidInput, TransientStorageError
from opendata_buffer.stores.base import (
    ObjectInfo,
    check_goes_on,
    check_limit,
    check_range,
    check_size,
    cut,
    listed,
    read_part,
)


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


def test_a_range_has_no_more_bytes_than_it_has() -> None:
    body = io.BytesIO(b"123456")
    with pytest.raises(TransientStorageError, match="bytes 10 to 15 of 'k': the answer has 6"):
        read_part("k", body.read, 6, (10, 15), None, whole=False)
    assert read_part("k", body.read, 6, (10, 16), None, whole=False) == b"123456"


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize(
    ("whole", "byte_range", "max_bytes", "most"),
    [(True, (1, 3), None, 3), (False, (0, 3), None, 4), (False, None, 4, 5)],
)
def test_no_more_is_read_than_tells_that_it_is_too_much(
    told: bool,
    whole: bool,
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
    most: int,
) -> None:
    body = io.BytesIO(b"x" * 1_000)
    size = 1_000 if told else None
    try:
        found = read_part("k", body.read, size, byte_range, max_bytes, whole=whole)
        assert found == b"xx", "of the whole object"
    except (CorruptData, TransientStorageError):
        assert not whole
    assert body.tell() == (0 if told and not whole else most)


def test_a_listing_is_in_order_and_cut_at_its_limit() -> None:
    found = [ObjectInfo("b", 1, 20), ObjectInfo("a", 1, 10)]
    whole = listed(found, 30, None, more=False)
    assert ([each.key for each in whole.objects], whole.now_ms, whole.truncated) == (
        ["a", "b"],
        30,
        False,
    )
    assert listed(found, 30, None, more=True).truncated
    cut_short = listed(found, 30, 1, more=False)
    assert [each.key for each in cut_short.objects] == ["a"]
    assert cut_short.truncated


def test_f6_without_the_stores_clock_its_newest_object_is_the_bound() -> None:
    found = [ObjectInfo("a", 1, 20), ObjectInfo("b", 1, 10)]
    assert listed(found, None, 1, more=False).now_ms == 20
    assert listed([], None, None, more=False).now_ms == 0


def test_a_page_that_is_followed_by_itself_ends_the_listing() -> None:
    with pytest.raises(TransientStorageError, match="'p/' in s3://b: the listing goes on where"):
        check_goes_on("here", "here", "p/", "s3://b")
    for token, following in [(None, None), ("", ""), (None, "here"), ("here", "there")]:
        check_goes_on(token, following, "p/", "s3://b")
