"""JSON lines and CSV rows as records."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing import CsvSplitter, NdjsonSplitter, Splitter, join_csv, join_ndjson


def split(splitter: Splitter, stream: bytes, size: int = 5) -> list[bytes]:
    found = []
    for begin in range(0, len(stream), size):
        found += splitter.feed(stream[begin : begin + size])
    return found + splitter.finish()


def test_a_number_of_json_may_have_as_many_digits_as_its_writer_liked() -> None:
    record = b'{"a":' + b"1" * 5_000 + b"}"
    assert split(NdjsonSplitter(10_000), record + b"\n", 1_000) == [record]
    assert join_ndjson([record]) == record + b"\n"


def test_json_values_are_records_and_keep_their_bytes() -> None:
    stream = b'{"a": 1}\n\n[1,  2]\r\n"\xc3\xbc"\nnull'
    records = [b'{"a": 1}', b"[1,  2]", b'"\xc3\xbc"', b"null"]
    for size in (1, 3, 100):
        assert split(NdjsonSplitter(100), stream, size) == records
    assert join_ndjson(records) == b'{"a": 1}\n[1,  2]\n"\xc3\xbc"\nnull\n'


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
    records = split(CsvSplitter(10_000), stream, size)
    assert join_csv(records) == stream
    assert list(csv.reader(io.StringIO(join_csv(records).decode(), newline=""))) == rows


def test_a_quoted_field_may_hold_newlines_and_quotes() -> None:
    stream = b'a,"one\ntwo ""x""\n\nthree"\nb,c\n'
    assert split(CsvSplitter(100), stream) == [b'a,"one\ntwo ""x""\n\nthree"', b"b,c"]


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
