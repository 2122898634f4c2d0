"""Length-prefixed records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing import LengthSplitter, join_length


@given(st.lists(st.binary(max_size=30)), st.integers(1, 7))
def test_records_come_back_whatever_pieces_the_stream_comes_in(
    records: list[bytes], size: int
) -> None:
    stream = join_length(records)
    splitter = LengthSplitter(max_bytes=100)
    found = []
    for begin in range(0, len(stream), size):
        found += splitter.feed(stream[begin : begin + size])
    assert found + splitter.finish() == records


def test_a_length_above_the_limit_is_refused_before_it_is_read() -> None:
    splitter = LengthSplitter(max_bytes=10)
    assert splitter.feed(join_length([b"fits"]) + b"\xff\xff\xff\x7f") == [b"fits"]
    with pytest.raises(InvalidInput, match=r"record 2, at byte 8 .* 2147483647 bytes or more"):
        splitter.feed(b"x")


def test_a_stream_that_ends_in_a_record_is_an_error_that_says_where() -> None:
    splitter = LengthSplitter(max_bytes=10)
    assert splitter.feed(join_length([b"fits", b"not"])[:-1]) == [b"fits"]
    with pytest.raises(InvalidInput, match="record 2, at byte 8 of the input: the input ends 6"):
        splitter.finish()
