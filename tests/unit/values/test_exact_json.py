from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.values.exact_json import ExactJson
from opendata_buffer.values.options import ValueOptions

FIELDS = [
    pa.field("a", pa.int32()),
    pa.field("c", pa.string()),
    pa.field("n", pa.list_(pa.int32())),
    pa.field("o", pa.struct([("x", pa.int32()), ("y", pa.string())])),
    pa.field("p", pa.map_(pa.string(), pa.int32())),
]


def row(record: bytes, **options: Any) -> tuple[dict[str, Any], str]:
    read = ExactJson(FIELDS, ValueOptions(**options)).read(record)
    pairs = zip(FIELDS, read.values, strict=True)
    return {each.name: value for each, value in pairs if value is not None}, read.problem


def test_fields_are_found_by_their_exact_names_and_the_last_of_two_counts() -> None:
    assert row(b'{"A":5,"a":1,"z":{"a":3},"a":2}') == ({"a": 2}, "")


@pytest.mark.parametrize("record", [b"", b" \n", b"{}", b'{"a":null}'])
def test_nothing_is_no_mistake(record: bytes) -> None:
    assert row(record) == ({}, "")


def test_what_fits_of_a_record_is_kept() -> None:
    values, problem = row(b'{"a":"x","c":"y","o":{"x":"bad","y":"z"},"n":[1,"x"],"p":{"k":1}}')
    assert values == {"c": "y", "o": {"x": None, "y": "z"}, "p": [("k", 1)]}
    assert problem == "field 'a': an integer is expected and 'x' found"


def test_of_text_that_is_no_json_nothing_is_kept() -> None:
    assert row(b'{"a":1,"c":"x"') == ({}, "it ends too early (character 14)")
    assert row(b"[1]")[1] == "it is no JSON object but begins with '['"


def test_what_follows_the_object_is_ignored() -> None:
    assert row(b'{"a":1} and more') == ({"a": 1}, "")


def test_a_string_column_takes_any_value_as_its_text() -> None:
    assert row(b'{"c":{"x" : 1.50,"y":[NaN,"\\u0001"]}}') == (
        {"c": '{"x":1.5,"y":["NaN","\\u0001"]}'},
        "",
    )


def test_bytes_that_are_not_utf8_become_replacement_characters() -> None:
    assert row(b'{"c":"a\xff"}') == ({"c": "a\ufffd"}, "")


def test_rescued_is_what_the_schema_has_no_place_for() -> None:
    fields = [pa.field("a", pa.int32()), pa.field("b", pa.int32())]
    exact = ExactJson(fields, ValueOptions(rescued_column="_rescued"))
    read = exact.read(b'{"a":"x", "z": {"y": [1]}, "b":2, "w":"\\u0041"}')
    assert read.values == [None, 2]
    assert read.problem == ""
    assert read.rescued == '{"a":"x","z":{"y": [1]},"w":"\\u0041"}'
    assert exact.read(b'{"a":1}').rescued is None


def test_deep_nesting_ends_in_an_answer() -> None:
    assert row(b'{"c":' + b"[" * 998 + b"]" * 998 + b"}")[1] == ""
    assert "nested deeper" in row(b'{"z":' + b"[" * 5000)[1]
