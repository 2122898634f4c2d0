"""Rows of any columns as JSON objects."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DayTimeIntervalType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    VariantType,
)

from buffer_sink.rows import Fields
from opendata_buffer.errors import InvalidInput
from opendata_buffer.values import Decoder, ValueOptions


def schema(**columns: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])  # type: ignore[arg-type]


def test_all_columns_except_the_reserved_ones_become_fields() -> None:
    fields, rest = Fields.of(
        schema(id=IntegerType(), _Metadata=StringType(), value=StringType(), _key=BinaryType())
    )
    assert fields.fields == (("id", 0), ("value", 2))
    assert [(each.name, each.dataType) for each in rest.fields] == [
        ("value", BinaryType()),
        ("metadata", StringType()),
        ("key", BinaryType()),
    ]
    rows = pa.record_batch(
        [pa.array([1, None]), pa.array(["m", "n"]), pa.array(["v", "w"]), pa.array([b"k", b"l"])],
        names=["id", "_Metadata", "value", "_key"],
    )
    found = fields.encode(rows)
    assert found.schema.names == ["value", "metadata", "key"]
    assert found.to_pydict() == {
        "value": [b'{"id":1,"value":"v"}', b'{"value":"w"}'],
        "metadata": ["m", "n"],
        "key": [b"k", b"l"],
    }


def test_kafkas_tombstones_come_back_as_null_and_bytes_as_they_were() -> None:
    kept = pa.record_batch([[b"k", b"\xff"], [None, b"\0v"]], names=["key", "value"])
    fields, _ = Fields.of(schema(key=BinaryType(), value=BinaryType()))
    records = fields.encode(kept).column("value").cast(pa.binary())
    assert records[0].as_py() == b'{"key":"aw=="}'
    assert Decoder(kept.schema, ValueOptions()).decode(records).arrays == kept.columns


def test_rows_without_fields_duplicate_names_and_types_without_json_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no column to write"):
        Fields.of(schema(_metadata=StringType()))
    twice = StructType([StructField("a", StringType()), StructField("a", IntegerType())])
    with pytest.raises(InvalidInput, match="column 'a' is there twice"):
        Fields.of(twice)
    for kind in (DayTimeIntervalType(), VariantType(), ArrayType(VariantType())):
        with pytest.raises(InvalidInput, match=r"column 'x' .* as JSON.*[Cc]ast it"):
            Fields.of(schema(id=IntegerType(), x=kind))


def test_a_variant_is_refused_at_any_depth_but_a_field_of_that_name_is_not() -> None:
    named = StructType([StructField("product_variant", StringType())])
    fields, _ = Fields.of(schema(s=named, l=ArrayType(named)))
    rows = pa.record_batch({"s": [{"product_variant": "x"}], "l": [[]]})
    assert fields.encode(rows)["value"].to_pylist() == [b'{"s":{"product_variant":"x"},"l":[]}']
    inner = StructType([StructField("x", VariantType())])
    for kind in (VariantType(), inner, ArrayType(inner), MapType(StringType(), VariantType())):
        with pytest.raises(InvalidInput, match="a Python sink cannot read type"):
            Fields.of(schema(v=kind))


def encoded(**columns: Any) -> list[str]:
    arrays = {
        name: each if isinstance(each, pa.Array) else pa.array(each)
        for name, each in columns.items()
    }
    return [each.decode() for each in written(arrays).to_pylist()]


def written(columns: dict[str, pa.Array]) -> pa.Array:
    fields = Fields(tuple((name, column) for column, name in enumerate(columns)), ())
    return fields.encode(pa.record_batch(columns))["value"]


def test_fields_are_in_order_and_null_fields_are_left_out() -> None:
    assert encoded(a=[1, None], b=["x", None], c=[True, False]) == [
        '{"a":1,"b":"x","c":true}',
        '{"c":false}',
    ]
    assert encoded(a=[1, 2], b=["x", None]) == ['{"a":1,"b":"x"}', '{"a":2}']
    assert encoded(a=[None, 1], b=[None, None]) == ["{}", '{"a":1}'], "all fields may be null"
    assert encoded(a=pa.array([], pa.int32())) == []


def test_text_is_written_unchanged_except_for_escapes() -> None:
    assert encoded(t=['a"b', "\\", "\n\t\x01\x1f", "é☃😀/\x7f", ""]) == [
        '{"t":"a\\"b"}',
        '{"t":"\\\\"}',
        '{"t":"\\n\\t\\u0001\\u001F"}',
        '{"t":"é☃😀/\x7f"}',
        '{"t":""}',
    ]
    assert encoded(**{'q"\n': [1]}) == ['{"q\\"\\n":1}'], "field names are escaped too"


def test_numbers_are_written_exactly() -> None:
    assert encoded(d=[1.0, -0.5, 1e20, 1e-7, None]) == [
        '{"d":1.0}',
        '{"d":-0.5}',
        '{"d":1e+20}',
        '{"d":1e-7}',
        "{}",
    ]
    assert encoded(d=[math.nan, math.inf, -math.inf, 2.0]) == [
        '{"d":"NaN"}',
        '{"d":"Infinity"}',
        '{"d":"-Infinity"}',
        '{"d":2.0}',
    ]
    assert encoded(f=pa.array([0.1], pa.float32())) == ['{"f":0.1}']
    assert encoded(i=[2**63 - 1]) == ['{"i":9223372036854775807}']
    assert encoded(n=[Decimal("1.50"), None]) == ['{"n":1.50}', "{}"]


def test_dates_and_times_are_written_as_iso_8601_and_bytes_as_base64() -> None:
    moment = datetime(2024, 1, 2, 3, 4, 5, 678, UTC)
    berlin = pa.array([moment], pa.timestamp("us", "Europe/Berlin"))
    assert encoded(t=berlin) == ['{"t":"2024-01-02T03:04:05.000678Z"}']
    local = pa.array([datetime(2024, 1, 2, 3, 4, 5)], pa.timestamp("us"))
    assert encoded(t=local) == ['{"t":"2024-01-02T03:04:05.000000"}']
    far = pa.array([253_402_300_800_000_000, 0], pa.timestamp("us", "UTC"))
    assert encoded(t=far)[1] == '{"t":"1970-01-01T00:00:00.000000Z"}', "next to the year 10000"
    assert encoded(d=[date(2024, 1, 2)]) == ['{"d":"2024-01-02"}']
    assert encoded(t=[time(3, 4, 5)]) == ['{"t":"03:04:05.000000"}']
    assert encoded(b=[b"\x00\xff", None]) == ['{"b":"AP8="}', "{}"]


def test_map_keys_of_any_type_become_json_names() -> None:
    moment = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    for kind, key, name in (
        (pa.struct({"a": pa.int32()}), {"a": 1}, '{"a":1}'),
        (pa.list_(pa.string()), ["a", 'b"'], '["a","b\\""]'),
        (pa.float64(), math.nan, "NaN"),
        (pa.float64(), -math.inf, "-Infinity"),
        (pa.float64(), 1.5, "1.5"),
        (pa.timestamp("us", "UTC"), moment, "2020-01-02T03:04:05.000000Z"),
        (pa.date32(), moment.date(), "2020-01-02"),
        (pa.binary(), b"\x00\xff", "AP8="),
    ):
        (line,) = encoded(m=pa.array([[(key, 1)]], pa.map_(kind, pa.int64())))
        assert json.loads(line) == {"m": {name: 1}}


def test_a_string_that_is_not_utf8_has_replacement_characters() -> None:
    # Spark's strings may hold any bytes: cast(X'61FF62' AS STRING).
    raw = pa.array([b"a\xffb", 'ü"'.encode(), None, b"c", b"\xed\xa0\x80"])
    texts = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    assert encoded(s=texts) == [
        '{"s":"a\ufffdb"}', '{"s":"ü\\""}', "{}", '{"s":"c"}', '{"s":"\ufffd\ufffd\ufffd"}'
    ]  # fmt: skip
    assert encoded(s=texts.slice(3)) == ['{"s":"c"}', '{"s":"\ufffd\ufffd\ufffd"}']


def test_the_source_reads_the_values_that_the_sink_wrote() -> None:
    moment = datetime(2024, 2, 29, 23, 59, 59, 123_456, UTC)
    columns: dict[str, pa.Array] = {
        "number": pa.array([1, None, -3], pa.int32()),
        "text": pa.array(['tëxt "1"\n', None, ""]),
        "real": pa.array([0.25, 1e300, None]),
        "exact": pa.array([Decimal("1.500"), Decimal("-0.001"), None], pa.decimal128(20, 3)),
        "even": pa.array([True, None, False]),
        "day": pa.array([date(2024, 2, 29), None, date(1970, 1, 1)]),
        "moment": pa.array([moment, None, moment], pa.timestamp("us", "UTC")),
        "local": pa.array([moment.replace(tzinfo=None)] * 3, pa.timestamp("us")),
        "raw": pa.array([b"\x00\xff", None, b""]),
        "list": pa.array([[1, None], None, []], pa.list_(pa.int64())),
        "inner": pa.array([{"x": 1, "y": None}, None, {"x": None, "y": "y"}]),
    }
    schema = pa.schema([(name, each.type) for name, each in columns.items()])
    read = Decoder(schema, ValueOptions()).decode(written(columns).cast(pa.binary()))
    assert read.malformed == {}
    for (name, wanted), found in zip(columns.items(), read.arrays, strict=True):
        assert found.to_pylist() == wanted.to_pylist(), name
