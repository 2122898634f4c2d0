"""Bodies that end where they may not be longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opendata_buffer.stores.http import TooLong, limited


def test_what_is_not_too_long_is_passed_on() -> None:
    assert list(limited([b"ab", b"", b"c"], 3)) == [b"ab", b"", b"c"]


def test_a_body_without_end_is_read_no_further_than_shows_it() -> None:
    read: list[bytes] = []

    def endless() -> Iterator[bytes]:
        while True:
            read.append(b"abc")
            yield b"abc"

    with pytest.raises(TooLong, match="more than the 10 bytes"):
        list(limited(endless(), 10))
    assert len(read) == 4
