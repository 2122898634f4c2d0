"""Lines to records and back."""

from __future__ import annotations

import io
import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing import LineSplitter, join_lines


def split(*chunks: bytes, max_bytes: int = 100) -> list[bytes]:
    splitter = LineSplitter(max_bytes)
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + splitter.finish()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ((), []),
        ((b"",), []),
        ((b"a\n",), [b"a"]),
        ((b"a",), [b"a"]),
        ((b"a\nb",), [b"a", b"b"]),
        ((b"\n",), [b""]),
        ((b"\n\n",), [b"", b""]),
        ((b"a\r\n",), [b"a\r"]),
        ((b"\x00\xff\r",), [b"\x00\xff\r"]),
        ((b"a", b"b", b"\nc", b"\n"), [b"ab", b"c"]),
        ((b"a\n", b"\n", b"b"), [b"a", b"", b"b"]),
        (("€\n".encode()[:1], "€\n".encode()[1:]), ["€".encode()]),
    ],
)
def test_lines_of_chunks(chunks: tuple[bytes, ...], lines: list[bytes]) -> None:
    assert split(*chunks) == lines


def test_lines_are_returned_as_soon_as_they_are_complete() -> None:
    splitter = LineSplitter(100)
    assert splitter.feed(b"one\ntwo\nthr") == [b"one", b"two"]
    assert splitter.feed(b"ee\n") == [b"three"]
    assert splitter.finish() == []


def test_the_lines_before_one_that_is_too_long_are_returned_first() -> None:
    splitter = LineSplitter(4)
    assert splitter.feed(b"1\n2\n12345\n3\n") == [b"1", b"2"]
    for _ in range(2):
        with pytest.raises(InvalidInput, match="line 3 "):
            splitter.feed(b"4\n")
        with pytest.raises(InvalidInput, match="line 3 "):
            splitter.finish()


def test_a_line_that_never_ends_is_not_held() -> None:
    splitter = LineSplitter(4)
    assert splitter.feed(b"123") == []
    assert splitter.feed(b"45") == []
    with pytest.raises(InvalidInput, match="line 1 "):
        splitter.feed(b"6")


def test_finish_leaves_nothing_behind() -> None:
    splitter = LineSplitter(100)
    splitter.feed(b"rest")
    assert splitter.finish() == [b"rest"]
    assert splitter.finish() == []


@pytest.mark.parametrize("chunks", [(b"12345\n",), (b"12345",), (b"123", b"45"), (b"1\n12345\n",)])
def test_a_line_longer_than_the_limit_is_refused(chunks: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"more than 4 bytes.*--max-batch-bytes"):
        split(*chunks, max_bytes=4)
    assert split(b"1234\n1234", max_bytes=4) == [b"1234", b"1234"]


def test_the_refusal_counts_lines_from_one() -> None:
    with pytest.raises(InvalidInput, match="line 3 "):
        split(b"1\n", b"2\n1234567\n", max_bytes=4)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_any_cut_gives_the_lines_of_the_whole(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    chunks = [data[start:end] for start, end in itertools.pairwise(edges)]
    # BytesIO is the reference for "lines end at \n and only there".
    assert split(*chunks, max_bytes=1000) == [line.removesuffix(b"\n") for line in io.BytesIO(data)]


def join(records: list[bytes]) -> bytes:
    return bytes(join_lines(pa.array(records, pa.binary())))


def test_join_ends_every_record_with_a_newline() -> None:
    assert join([]) == b""
    assert join([b""]) == b"\n"
    assert join([b"a", b"", b"b"]) == b"a\n\nb\n"


def test_join_takes_a_slice_of_an_array() -> None:
    assert bytes(join_lines(pa.array([b"a", b"bb", b"c", b"d"], pa.binary())[1:3])) == b"bb\nc\n"
    assert bytes(join_lines(pa.array([b"a"], pa.binary())[1:])) == b""


@given(st.lists(st.binary(max_size=20).filter(lambda record: b"\n" not in record)))
def test_joined_records_split_back(records: list[bytes]) -> None:
    assert split(join(records), max_bytes=1000) == records
