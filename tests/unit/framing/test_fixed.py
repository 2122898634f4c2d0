"""Gazette's fixed framing: every stream of the vectors, and streams cut anywhere."""

from __future__ import annotations

import gzip
import json
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing import FixedSplitter, join_fixed, unpack_fixed

VECTORS = Path(__file__).parents[2] / "golden" / "gazette" / "vectors.json.gz"
STREAMS = json.loads(gzip.decompress(VECTORS.read_bytes()))["fixed_framing"]


@pytest.mark.parametrize("vector", STREAMS)
def test_every_stream_is_unpacked_as_gazette_does(vector: dict) -> None:  # type: ignore[type-arg]
    stream = bytes.fromhex(vector["stream_hex"])
    found = list(unpack_fixed(BytesIO(stream)))
    assert [kind for kind, _ in found] == [each["kind"] for each in vector["unpacked"]]
    for (kind, data), expected in zip(found, vector["unpacked"], strict=True):
        if kind != "error":
            assert data.hex() == expected["hex"]
    assert b"".join(data for _, data in found) == stream
    assert list(unpack_fixed(stream)) == found


def test_the_vectors_have_frames_gaps_and_errors() -> None:
    kinds = {each["kind"] for vector in STREAMS for each in vector["unpacked"]}
    assert kinds == {"frame", "desync", "error"}


@given(st.lists(st.binary(max_size=30)), st.integers(1, 7))
def test_records_come_back_whatever_pieces_the_stream_comes_in(
    records: list[bytes], size: int
) -> None:
    stream = join_fixed(records)
    splitter = FixedSplitter(max_bytes=100)
    found = []
    for begin in range(0, len(stream), size):
        found += splitter.feed(stream[begin : begin + size])
    assert found + splitter.finish() == records


def test_garbage_longer_than_one_read_is_reported_and_the_next_frame_found() -> None:
    garbage = b"\x66\x33\x93" * 100_000
    found = list(unpack_fixed(BytesIO(garbage + join_fixed([b"found"]))))
    assert b"".join(data for kind, data in found if kind == "desync") == garbage
    assert found[-1] == ("frame", join_fixed([b"found"]))


def test_a_frame_longer_than_allowed_is_an_error_before_it_is_read() -> None:
    stream = b"\x66\x33\x93\x36\xff\xff\xff\xff" + bytes(50)
    assert [kind for kind, _ in unpack_fixed(stream, max_bytes=1000)] == ["error"]
    splitter = FixedSplitter(max_bytes=1000)
    assert splitter.feed(stream) == []
    with pytest.raises(InvalidInput, match="4294967295 bytes or more, and a record may have 1000"):
        splitter.feed(b"")


def test_the_records_before_a_broken_one_are_given_first_and_the_error_says_where() -> None:
    splitter = FixedSplitter(max_bytes=1000)
    assert splitter.feed(join_fixed([b"one", b"two"]) + b"garbage!garbage!") == [b"one", b"two"]
    with pytest.raises(InvalidInput, match="record 3, at byte 22 of the input: no magic word"):
        splitter.finish()


def test_a_stream_that_ends_in_a_frame_is_an_error() -> None:
    splitter = FixedSplitter(max_bytes=1000)
    assert splitter.feed(join_fixed([b"one", b"two"])[:-1]) == [b"one"]
    with pytest.raises(InvalidInput, match="record 2, at byte 11 of the input: the input ends 10"):
        splitter.finish()
