"""Framings: records survive any split of a stream, and errors name the record and byte."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import struct
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.cli import options
from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing import (
    FRAMINGS,
    LineSplitter,
    NdjsonSplitter,
    Splitter,
    join_lines,
    unpack_fixed,
)

ANY = [b"", b"\n", b"a\nb", b"\r\n", b"\x00\xff", b"x" * 1000, b"\x66\x33\x93\x36"]
VALUES = {
    "lines": [b"", b"a\r", b"\x00\xff", b" "],
    "ndjson": [b'{"a": 1}', b"2", b'"\\n"'],
    "protobuf-fixed": ANY,
    "length": ANY,
}


def framed(name: str, records: list[bytes]) -> bytes:
    return bytes(FRAMINGS[name].framed(pa.array(records, pa.binary()), 7))


def cut(splitter: Splitter, stream: bytes, size: int = 5) -> list[bytes]:
    found = []
    for begin in range(0, len(stream), size):
        found += splitter.feed(stream[begin : begin + size])
    return found + splitter.finish()


def test_the_command_line_offers_all_framings() -> None:
    @options.framing
    def command() -> None: ...

    (option,) = command.__click_params__  # type: ignore[attr-defined]
    assert list(option.type.choices) == list(FRAMINGS) == list(VALUES)
    assert [framing.name for framing in FRAMINGS.values()] == list(FRAMINGS)


@pytest.mark.parametrize("name", FRAMINGS)
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_written_records_can_be_read(name: str, step: int) -> None:
    assert cut(FRAMINGS[name].splitter(1000), framed(name, VALUES[name]), step) == VALUES[name]


def test_each_framing_writes_the_expected_bytes() -> None:
    assert framed("lines", [b"a", b""]) == b"a\n\n"
    assert framed("ndjson", [b"1"]) == b"1\n"
    assert framed("length", [b"ab"]) == struct.pack("<I", 2) + b"ab"
    assert framed("protobuf-fixed", [b"ab"]) == b"\x66\x33\x93\x36" + struct.pack("<I", 2) + b"ab"
    assert {framed(name, []) for name in FRAMINGS} == {b""}


@pytest.mark.parametrize(
    ("name", "record"),
    [("ndjson", b"no json"), ("ndjson", b'{"a":\n1}'), ("ndjson", b""), ("ndjson", b"1\r")],
)
def test_a_record_that_would_be_read_as_another_one_is_not_written(
    name: str, record: bytes
) -> None:
    good = VALUES[name][0]
    with pytest.raises(
        InvalidInput, match=rf"^record 1 of batch 7 cannot be written as {name}.*--framing length"
    ):
        framed(name, [good, record, good])


def split(*chunks: bytes, max_bytes: int = 100) -> list[bytes]:
    splitter = LineSplitter(max_bytes)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


def test_lines_are_returned_as_soon_as_they_are_complete() -> None:
    splitter = LineSplitter(100)
    assert splitter.feed(b"one\ntwo\nthr") == [b"one", b"two"]
    assert splitter.feed(b"ee\nrest") == [b"three"]
    assert splitter.finish() == [b"rest"]
    assert splitter.finish() == []


def test_the_lines_before_one_that_is_too_long_are_returned_first() -> None:
    splitter = LineSplitter(4)
    assert splitter.feed(b"1\n2\n12345\n3\n") == [b"1", b"2"]
    for _ in range(2):
        with pytest.raises(InvalidInput, match="line 3 "):
            splitter.feed(b"4\n")
        with pytest.raises(InvalidInput, match="line 3 "):
            splitter.finish()


@pytest.mark.parametrize("chunks", [(b"12345\n",), (b"12345",), (b"123", b"45"), (b"1\n12345\n",)])
def test_a_line_longer_than_the_limit_is_refused(chunks: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"more than 4 bytes.*shorter lines"):
        split(*chunks, max_bytes=4)
    assert split(b"1234\n1234", max_bytes=4) == [b"1234", b"1234"]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_a_stream_that_is_split_anywhere_has_the_same_lines(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    chunks = [data[start:end] for start, end in itertools.pairwise(edges)]
    # BytesIO is the reference for "lines end at \n and only there".
    assert split(*chunks, max_bytes=1000) == [line.removesuffix(b"\n") for line in io.BytesIO(data)]


def test_join_accepts_a_slice_of_an_array() -> None:
    records = pa.array([b"a", b"bb", b"c", b"d"], pa.binary())
    assert [bytes(join_lines(each)) for each in (records[1:3], records[4:])] == [b"bb\nc\n", b""]


def test_json_values_are_records_and_keep_their_bytes() -> None:
    stream = b'{"a": 1}\n\n[1,  2]\r\n"\xc3\xbc"\nnull'
    records = [b'{"a": 1}', b"[1,  2]", b'"\xc3\xbc"', b"null"]
    for size in (1, 3, 100):
        assert cut(NdjsonSplitter(100), stream, size) == records
    many_digits = b'{"a":' + b"1" * 5_000 + b"}"
    assert cut(NdjsonSplitter(10_000), many_digits + b"\n", 1_000) == [many_digits]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": }', "it is not a JSON value: Expecting value at character 6"),
        (b'"\xff"', "it is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_the_error_about_a_line_that_is_not_json_has_its_record_and_byte(
    line: bytes, says: str
) -> None:
    splitter = NdjsonSplitter(1_000_000)
    assert splitter.feed(b"1\n22\n" + line + b"\n3\n") == [b"1", b"22"]
    with pytest.raises(InvalidInput, match=f"record 3, at byte 5 of the input: .*{says}"):
        splitter.feed(b"4\n")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_record_above_the_limit_is_refused_before_its_end(end: bytes) -> None:
    splitter = NdjsonSplitter(10)
    assert splitter.feed(b"1234567890\r\n1234567890123" + end) == [b"1234567890"]
    with pytest.raises(InvalidInput, match=r"record 2, at byte 12 .* a record may have at most 10"):
        splitter.finish()


VECTORS = Path(__file__).parents[1] / "golden" / "gazette" / "vectors.json.gz"
STREAMS = json.loads(gzip.decompress(VECTORS.read_bytes()))["fixed_framing"]


@pytest.mark.parametrize("vector", STREAMS)
def test_every_stream_is_unpacked_as_in_gazette(vector: dict) -> None:  # type: ignore[type-arg]
    stream = bytes.fromhex(vector["stream_hex"])
    found = list(unpack_fixed(BytesIO(stream)))
    assert [kind for kind, _ in found] == [each["kind"] for each in vector["unpacked"]]
    for (kind, data), expected in zip(found, vector["unpacked"], strict=True):
        if kind != "error":
            assert data.hex() == expected["hex"]
    assert b"".join(data for _, data in found) == stream
    assert list(unpack_fixed(stream)) == found


def test_garbage_longer_than_one_read_is_reported_and_the_next_frame_is_found() -> None:
    garbage = b"\x66\x33\x93" * 100_000
    frame = framed("protobuf-fixed", [b"found"])
    found = list(unpack_fixed(BytesIO(garbage + frame)))
    assert b"".join(data for kind, data in found if kind == "desync") == garbage
    assert found[-1] == ("frame", frame)


@pytest.mark.parametrize(
    ("name", "prefix", "at"), [("length", b"", 8), ("protobuf-fixed", b"\x66\x33\x93\x36", 12)]
)
def test_the_records_before_a_broken_one_are_returned_before_its_error(
    name: str, prefix: bytes, at: int
) -> None:
    too_long = prefix + b"\xff\xff\xff\x7f"
    for broken, says in [
        (too_long, "2147483647 bytes or more, and a record may have at most 10"),
        (framed(name, [b"not"])[:-1], f"the input ends {len(prefix) + 6} bytes into the record"),
    ]:
        splitter = FRAMINGS[name].splitter(10)
        assert splitter.feed(framed(name, [b"fits"]) + broken) == [b"fits"]
        with pytest.raises(InvalidInput, match=rf"record 2, at byte {at} of the input: .*{says}"):
            splitter.finish()
    found = [kind for kind, _ in unpack_fixed(b"\x66\x33\x93\x36" + b"\xff" * 50, max_bytes=10)]
    assert found == ["error"]


def test_a_frame_without_its_magic_word_is_an_error() -> None:
    splitter = FRAMINGS["protobuf-fixed"].splitter(1000)
    frames = framed("protobuf-fixed", [b"one", b"two"])
    assert splitter.feed(frames + b"garbage!garbage!") == [b"one", b"two"]
    with pytest.raises(InvalidInput, match="record 3, at byte 22 of the input: it starts with"):
        splitter.finish()
