"""Framings: records come back from a stream cut anywhere, and errors name record and byte."""

from __future__ import annotations

import csv
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
    CsvSplitter,
    FixedSplitter,
    LengthSplitter,
    LineSplitter,
    NdjsonSplitter,
    Splitter,
    join_fixed,
    join_length,
    join_lines,
    unpack_fixed,
)

ANY = [b"", b"\n", b"a\nb", b"\r\n", b"\x00\xff", b"x" * 1000, b"\x66\x33\x93\x36"]
VALUES = {
    "lines": [b"", b"a\r", b"\x00\xff", b" "],
    "ndjson": [b'{"a": 1}', b"2", b'"\\n"'],
    "csv": [b"a,b", b'"a\nb",c', b"\xc3\xa4"],
    "protobuf-fixed": ANY,
    "length": ANY,
}


def framed(name: str, records: list[bytes]) -> bytes:
    return bytes(FRAMINGS[name].framed(pa.array(records, pa.binary()), 7))


def test_the_command_line_offers_all_of_them() -> None:
    @options.framing
    def command() -> None: ...

    (option,) = command.__click_params__  # type: ignore[attr-defined]
    assert list(option.type.choices) == list(FRAMINGS) == list(VALUES)
    assert [framing.name for framing in FRAMINGS.values()] == list(FRAMINGS)


@pytest.mark.parametrize("name", FRAMINGS)
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_what_goes_out_comes_in(name: str, step: int) -> None:
    data = framed(name, VALUES[name])
    splitter = FRAMINGS[name].splitter(1000)
    found = []
    for begin in range(0, len(data), step):
        found += splitter.feed(data[begin : begin + step])
    assert found + splitter.finish() == VALUES[name]


def test_bytes_on_the_wire() -> None:
    assert framed("lines", [b"a", b""]) == b"a\n\n"
    assert framed("ndjson", [b"1"]) == b"1\n"
    assert framed("csv", [b"1,2"]) == b"1,2\r\n"
    assert framed("length", [b"ab"]) == struct.pack("<I", 2) + b"ab"
    assert framed("protobuf-fixed", [b"ab"]) == b"\x66\x33\x93\x36" + struct.pack("<I", 2) + b"ab"


@pytest.mark.parametrize("name", FRAMINGS)
def test_no_records_are_no_bytes(name: str) -> None:
    assert framed(name, []) == b""


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("ndjson", b"no json"),
        ("ndjson", b'{"a":\n1}'),
        ("ndjson", b""),
        ("ndjson", b"1\r"),
        ("csv", b""),
        ("csv", b"a\nb"),
        ("csv", b'"open'),
        ("csv", b"\xff"),
    ],
)
def test_a_record_that_would_come_back_as_another_is_not_written(name: str, record: bytes) -> None:
    good = VALUES[name][0]
    with pytest.raises(
        InvalidInput, match=rf"^record 1 of batch 7 cannot be written as {name}.*--framing length"
    ):
        framed(name, [good, record, good])


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


def cut(splitter: Splitter, stream: bytes, size: int = 5) -> list[bytes]:
    found = []
    for begin in range(0, len(stream), size):
        found += splitter.feed(stream[begin : begin + size])
    return found + splitter.finish()


def test_a_number_of_json_may_have_as_many_digits_as_its_writer_liked() -> None:
    record = b'{"a":' + b"1" * 5_000 + b"}"
    assert cut(NdjsonSplitter(10_000), record + b"\n", 1_000) == [record]


def test_json_values_are_records_and_keep_their_bytes() -> None:
    stream = b'{"a": 1}\n\n[1,  2]\r\n"\xc3\xbc"\nnull'
    records = [b'{"a": 1}', b"[1,  2]", b'"\xc3\xbc"', b"null"]
    for size in (1, 3, 100):
        assert cut(NdjsonSplitter(100), stream, size) == records


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": }', "no JSON value: Expecting value at character 6"),
        (b'"\xff"', "no UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_line_that_is_no_json_is_named_by_record_and_byte(line: bytes, says: str) -> None:
    splitter = NdjsonSplitter(1_000_000)
    assert splitter.feed(b"1\n22\n" + line + b"\n3\n") == [b"1", b"22"]
    with pytest.raises(InvalidInput, match=f"record 3, at byte 5 of the input: .*{says}"):
        splitter.feed(b"4\n")


@given(st.lists(st.lists(st.text(), min_size=2, max_size=4)), st.integers(1, 7))
def test_rows_come_back_as_the_library_wrote_them(rows: list[list[str]], size: int) -> None:
    written = io.StringIO(newline="")
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows(rows)
    stream = written.getvalue().encode()
    records = cut(CsvSplitter(10_000), stream, size)
    joined = b"".join(record + b"\r\n" for record in records)
    assert joined == stream
    assert list(csv.reader(io.StringIO(joined.decode(), newline=""))) == rows


def test_a_quoted_field_may_hold_newlines_and_quotes() -> None:
    stream = b'a,"one\ntwo ""x""\n\nthree"\nb,c\n'
    assert cut(CsvSplitter(100), stream) == [b'a,"one\ntwo ""x""\n\nthree"', b"b,c"]


@pytest.mark.parametrize(
    ("row", "says"),
    [(b'"a"b,c\n', "no CSV row"), (b'\xff,"a"\n', "no UTF-8 text")],
)
def test_a_row_that_is_no_csv_is_named_by_record_and_byte(row: bytes, says: str) -> None:
    splitter = CsvSplitter(100)
    assert splitter.feed(b"a,b\n" + row + b"c\n") == [b"a,b"]
    with pytest.raises(InvalidInput, match=f"record 2, at byte 4 of the input: {says}"):
        splitter.finish()


def test_an_input_that_ends_in_a_quoted_field_is_an_error() -> None:
    splitter = CsvSplitter(100)
    assert splitter.feed(b'a\n"b\n') == [b"a"]
    with pytest.raises(InvalidInput, match=r"record 2, at byte 2 .* inside a quoted field"):
        splitter.finish()


@pytest.mark.parametrize("kind", [NdjsonSplitter, CsvSplitter])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_record_beyond_the_limit_is_refused_also_before_its_end(
    kind: type[NdjsonSplitter | CsvSplitter], end: bytes
) -> None:
    splitter = kind(10)
    assert splitter.feed(b"1234567890\r\n1234567890123" + end) == [b"1234567890"]
    with pytest.raises(InvalidInput, match=r"record 2, at byte 12 .* a record may have 10"):
        splitter.finish()


def test_a_field_of_many_lines_is_not_parsed_at_each_of_them() -> None:
    lines = 20_000
    stream = b'"' + b"x\n" * lines + b'"\n'
    parsed = 0

    class Counting(CsvSplitter):
        def _check(self, data: bytes) -> None:
            nonlocal parsed
            parsed += len(data)
            super()._check(data)

    splitter = Counting(1_000_000)
    assert splitter.feed(stream) == [stream[:-1]]
    assert parsed == len(stream)


VECTORS = Path(__file__).parents[1] / "golden" / "gazette" / "vectors.json.gz"
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
def test_fixed_frames_come_back_whatever_pieces_the_stream_comes_in(
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


@given(st.lists(st.binary(max_size=30)), st.integers(1, 7))
def test_length_prefixed_records_come_back_whatever_pieces_the_stream_comes_in(
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
