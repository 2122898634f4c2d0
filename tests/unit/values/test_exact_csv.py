from __future__ import annotations

import time

import pyarrow as pa
import pytest

from opendata_buffer.values.exact_csv import ExactCsv
from opendata_buffer.values.options import ValueOptions

FIELDS = [pa.field("a", pa.int32()), pa.field("b", pa.string()), pa.field("c", pa.float64())]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("1,x,2", ["1", "x", "2"]),
        ("1,,", ["1", None, None]),
        (",", [None, None]),
        ('"a,b",c', ["a,b", "c"]),
        ('"a\\"b",c', ['a"b', "c"]),
        ('"a\nb",c', ["a\nb", "c"]),
        ('"a"  ,c', ["a", "c"]),
        ('"a"b,c', ['"a"b', "c"]),
        ("a\nb,c", ["a\nb", "c"]),
        ('a,"', ["a", '"']),
        ('a"b,c', ['a"b', "c"]),
    ],
)
def test_a_record_is_cut_into_its_fields(text: str, fields: list[str | None]) -> None:
    assert ExactCsv([], ValueOptions(format="csv")).cut(text) == fields


def test_separator_quote_and_escape_are_what_is_asked_for() -> None:
    options = ValueOptions(format="csv", sep="\t", quote="'", escape="'")
    assert ExactCsv([], options).cut("'it''s'\tb,c") == ["it's", "b,c"]
    assert ExactCsv([], ValueOptions(format="csv", quote="")).cut('"a,b"') == ['"a', 'b"']


def test_what_fits_is_kept_and_a_wrong_number_of_fields_is_malformed() -> None:
    exact = ExactCsv(FIELDS, ValueOptions(format="csv"))
    assert exact.read(b"1,x,2.5").values == [1, "x", 2.5]
    few = exact.read(b"1,x")
    assert (few.values, few.problem) == ([1, "x", None], "it has 2 fields and the schema 3")
    assert exact.read(b"1,x,2,more").values == [1, "x", 2.0]
    wrong = exact.read(b"z,x, 3 ")
    assert wrong.values == [None, "x", 3.0]
    assert wrong.problem == "field 'a': an integer is expected and 'z' found"
    assert exact.read(b"").problem == ""


def test_a_text_stands_for_null() -> None:
    exact = ExactCsv(FIELDS, ValueOptions(format="csv", null_value="-"))
    assert exact.read(b"-,,NaN").values[:2] == [None, None]
    assert exact.read(b'1,"",2').values == [1, "", 2.0]


def test_a_long_field_that_is_no_number_is_malformed_at_once() -> None:
    exact = ExactCsv([pa.field("a", pa.float64())], ValueOptions(format="csv"))
    began = time.process_time()
    assert exact.read(b"1" * 100_000 + b"x").problem.startswith("field 'a': a number is expected")
    assert time.process_time() - began < 10
