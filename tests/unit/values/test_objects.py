# ruff: noqa: E501
from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.values.objects import Objects
from opendata_buffer.values.options import ValueOptions

FIELDS = [
    pa.field("a", pa.int32()),
    pa.field("g", pa.decimal128(10, 2)),
    pa.field("k", pa.timestamp("us", "UTC")),
    pa.field("n", pa.list_(pa.list_(pa.int32()))),
    pa.field("o", pa.struct([("x", pa.date32()), ("y", pa.float32())])),
    pa.field("p", pa.map_(pa.string(), pa.struct([("z", pa.string())]))),
]

both = pytest.mark.parametrize("library", ["msgspec", "json"])


def read(library: str, *records: bytes, **options: Any) -> tuple[list[dict[str, Any]], list[bool]]:
    arrays, doubtful = Objects(FIELDS, ValueOptions(**options), library).columns(
        pa.array(records, pa.binary())
    )
    return pa.table(arrays, schema=pa.schema(FIELDS)).to_pylist(), doubtful.tolist()


@both
def test_nested_values_become_nested_columns(library: str) -> None:
    record = b'{"a":1,"n":[[1,null],null,[]],"o":{"y":0.5},"p":{"kk":{"z":"w"},"l":null},"g":1.005}'
    rows, doubtful = read(library, record, b"{}", b'{"n":null,"o":null,"p":{}}')
    assert doubtful == [False] * 3
    assert rows[0]["n"] == [[1, None], None, []]
    assert rows[0]["o"] == {"x": None, "y": 0.5}
    assert rows[0]["p"] == [("kk", {"z": "w"}), ("l", None)]
    assert str(rows[0]["g"]) == "1.01"
    assert all(value is None for value in rows[1].values())
    assert rows[2] == {**rows[1], "p": []}


@both
@pytest.mark.parametrize(
    "record",
    [b'{"a":"1"}', b'{"a":1.0}', b'{"a":2147483648}', b'{"a":true}', b'{"a":1}x', b'{"a":NaN}', b"[]", b"",
     b'{"a":01}', b'{"g":"1"}', b'{"g":1e9}', b'{"k":5}', b'{"k":"no time"}', b'{"n":[1]}', b'{"n":[["1"]]}',
     b'{"o":{"x":"no"}}', b'{"o":{"y":16777217}}', b'{"o":{"y":-0.0}}', b'{"p":{"k":{"z":1}}}', b'{"p":[]}',
     b'{"k":"no","k":"2020-01-01T00:00:00Z"}', b'{"\\u006b":"no","k":"2020-01-01T00:00:00Z"}',
     b'{"p":{"\\ud800":null}}', b'{"z":' + b"1" * 1001 + b"}", b'{"z":' + b"[" * 1001 + b"]" * 1001 + b"}"],
)  # fmt: skip
def test_a_record_that_spark_may_read_otherwise_is_doubtful_and_its_neighbours_are_not(
    library: str, record: bytes
) -> None:
    good = b'{"a":1,"n":[[2]],"k":"2020-01-01T00:00:00Z"}'
    rows, doubtful = read(library, good, record, good)
    assert doubtful == [False, True, False]
    assert rows[0] == rows[2]
    assert rows[0]["n"] == [[2]]


@both
def test_with_a_rescued_column_a_field_that_no_column_takes_makes_its_record_doubtful(
    library: str,
) -> None:
    rows, doubtful = read(library, b'{"a":1,"z":2}', b'{"a":3}', rescued_column="_rescued")
    assert doubtful == [True, False]
    assert rows[1]["a"] == 3


@both
@pytest.mark.parametrize(
    ("dtype", "text"),
    [(pa.int8(), "256"), (pa.int8(), "-129"), (pa.int16(), "32768"), (pa.int32(), "2147483648"),
     (pa.int64(), "9223372036854775808"), (pa.float32(), "1" * 400), (pa.float64(), "-" + "1" * 400)],
)  # fmt: skip
def test_a_number_beyond_its_column_is_doubtful_where_nothing_else_is_odd(
    library: str, dtype: pa.DataType, text: str
) -> None:
    objects = Objects([pa.field("a", dtype)], ValueOptions(), library)
    records = [b'{"a":1}', b'{"a":%s}' % text.encode(), b'{"a":null}']
    (array,), doubtful = objects.columns(pa.array(records, pa.binary()))
    assert doubtful.tolist() == [False, True, False]
    assert array.take([0, 2]).to_pylist() == [1, None]


def test_texts_with_many_escapes_take_no_longer_than_others() -> None:
    # "k" is watched for a second one, whose name may be escaped.
    text = b"\\n" * 20_000
    members = b",".join(b'"x%d":"%s"' % (number, text) for number in range(10))
    began = time.process_time()
    rows, doubtful = read("msgspec", b'{"k":"2020-01-01T00:00:00Z",' + members + b"}")
    assert time.process_time() - began < 2
    assert doubtful == [False]
    assert rows[0]["k"] is not None


def test_a_name_with_an_escape_that_may_stand_for_a_watched_one_is_doubtful() -> None:
    for name in (b"\\u006b", b"k\\u0020"):
        assert read("msgspec", b'{"k":"2020-01-01T00:00:00Z","' + name + b'" :1}')[1] == [True]
