# ruff: noqa: E501
from __future__ import annotations

import pyarrow as pa
import pytest

from opendata_buffer.values.lines import Lines
from opendata_buffer.values.options import ValueOptions

FIELDS = [
    pa.field("a", pa.int32()), pa.field("b", pa.string()), pa.field("c", pa.float64()),
    pa.field("d", pa.bool_()), pa.field("e", pa.date32()), pa.field("f", pa.decimal128(5, 2)),
]  # fmt: skip
GOOD = b"1,x,2.5,true,1970-01-02,1.5"


def read(*lines: bytes, **options: str) -> tuple[list[dict[str, object]], list[bool]]:
    arrays, doubtful = Lines(FIELDS, ValueOptions(format="csv", **options)).columns(  # type: ignore[arg-type]
        pa.array(lines, pa.binary())
    )
    return pa.table(arrays, schema=pa.schema(FIELDS)).to_pylist(), doubtful.tolist()


def test_lines_are_cut_at_once_and_an_empty_field_is_null() -> None:
    rows, doubtful = read(GOOD, b",,,,,", b"-7,longer than twelve bytes,1e3,false,,2")
    assert doubtful == [False] * 3
    assert (rows[0]["a"], rows[0]["b"], rows[0]["c"], rows[0]["d"]) == (1, "x", 2.5, True)
    assert set(rows[1].values()) == {None}
    assert (rows[2]["b"], rows[2]["e"]) == ("longer than twelve bytes", None)


@pytest.mark.parametrize(
    "line",
    [b"", b"1,x", GOOD + b",", b'1,"x",2.5,true,1970-01-02,1.5', b"1,x,2.5,true,1970-01-02,1.5\n", b"1,x,2.5,true,none,1.5",
     b"null,x,2.5,true,1970-01-02,1.5", b"1,x,NaN,true,1970-01-02,1.5", b"+1,x,2.5,true,1970-01-02,1.5",
     b"1,x,2.5,TRUE,1970-01-02,1.5", b"1,x,2.5,true,1970-01-02,1000"],
)  # fmt: skip
def test_a_line_that_may_be_read_otherwise_is_doubtful_and_its_neighbours_are_not(
    line: bytes,
) -> None:
    rows, doubtful = read(GOOD, line, GOOD)
    assert doubtful == [False, True, False]
    assert rows[0] == rows[2]


def test_a_text_stands_for_null() -> None:
    rows, doubtful = read(b"-,-,-,-,-,-", sep=",", null_value="-")
    assert doubtful == [False]
    assert set(rows[0].values()) == {None}
