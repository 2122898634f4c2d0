"""The framings by name: what goes out comes in, and what would not is not written."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from opendata_buffer.cli.options import framing_option
from opendata_buffer.errors import InvalidInput
from opendata_buffer.framing import FRAMINGS

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
    @framing_option
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
