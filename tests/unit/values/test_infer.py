from __future__ import annotations

import time

import pyarrow as pa
import pytest

from opendata_buffer.values.decoder import Decoder
from opendata_buffer.values.infer import ddl, infer
from opendata_buffer.values.options import ValueOptions


def columns(*records: bytes, **options: object) -> str:
    return ddl(infer(records, ValueOptions(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([b'{"b":1,"a":"x"}'], "a STRING, b BIGINT"),
        ([b'{"a":1}', b'{"a":1.5}'], "a DOUBLE"),
        ([b'{"a":1}', b'{"a":"x"}'], "a STRING"),
        ([b'{"a":true}', b'{"a":null}', b"{}"], "a BOOLEAN"),
        ([b'{"a":null}'], "a STRING"),
        ([b'{"a":92233720368547758070}'], "a DECIMAL(20,0)"),
        ([b'{"a":[1,null]}', b'{"a":[2.5]}'], "a ARRAY<DOUBLE>"),
        ([b'{"a":[]}'], "a ARRAY<STRING>"),
        (
            [b'{"a":{"x":1}}', b'{"a":{"y":[{"z":""}]}}'],
            "a STRUCT<x: BIGINT, y: ARRAY<STRUCT<z: STRING>>>",
        ),
        ([b'{"a":{}, "b":1}'], "b BIGINT"),
        ([b'{"a":{"x":{}},"b":[{}],"c":[{"y":{}}]}'], "b ARRAY<STRING>, c ARRAY<STRING>"),
        (
            [b'{"a":[1],"b":{"x":1},"c":1}', b'{"a":1,"b":[1],"c":{}}'],
            "a STRING, b STRING, c STRING",
        ),
        (
            [b'{"a":null,"b":[null],"c":{}}', b'{"a":[1],"b":[[true]],"c":null,"d":1}'],
            "a ARRAY<BIGINT>, b ARRAY<ARRAY<BOOLEAN>>, d BIGINT",
        ),
        ([b'{"a":"x","b":2}', b'{"a":{"y":1},"b":null}'], "a STRING, b BIGINT"),
        ([b'{"a":1}', b"no"], "a BIGINT, _corrupt_record STRING"),
        ([b'{"a b":1,"`":2}'], "```` BIGINT, `a b` BIGINT"),
        ([b'{"":1,"a":{"":2,"b":3}}', b'{"c":{"":4}}'], "a STRUCT<b: BIGINT>"),
        ([], ""),
        ([b"no", b""], ""),
    ],
)
def test_columns_are_what_the_records_have(records: list[bytes], expected: str) -> None:
    assert columns(*records) == expected


def test_half_a_character_in_a_name_is_what_the_readers_take_it_for() -> None:
    records = [b'{"\\ud800":1,"b":{"\\udc00":true}}']
    schema = infer(records, ValueOptions())
    assert ddl(schema) == "`?` BIGINT, b STRUCT<`?`: BOOLEAN>"
    read = Decoder(schema, ValueOptions()).decode(pa.array(records, pa.binary()))
    assert [each.to_pylist() for each in read.arrays] == [[1], [{"?": True}]]


@pytest.mark.parametrize("levels", [50, 100, 400, 900, 5000])
@pytest.mark.parametrize(("begin", "end"), [(b'{"a":', b"}"), (b"[", b"]")])
def test_one_deep_record_hides_no_column_and_is_text_from_some_level_on(
    levels: int, begin: bytes, end: bytes
) -> None:
    deep = b'{"deep":' + begin * levels + b"1" + end * levels + b"}"
    schema = infer([b'{"id":1}', deep, deep], ValueOptions())
    if levels == 5000:  # More than a parser takes.
        assert ddl(schema) == "id BIGINT, _corrupt_record STRING"
        return
    assert schema.field("id").type == pa.int64()
    dtype, found = schema.field("deep").type, 0
    while pa.types.is_nested(dtype):
        dtype, found = dtype.field(0).type, found + 1
    assert (dtype, found) == (pa.string(), 49)
    read = Decoder(schema, ValueOptions()).decode(pa.array([deep], pa.binary()))
    assert not read.malformed
    # As it goes to Spark, which refuses what is deeper.
    assert pa.RecordBatch.from_arrays(read.arrays, schema=schema).serialize().size > 0
    assert b"1" in str(read.arrays[0].to_pylist()).encode()


def test_a_field_called_like_the_column_of_malformed_records_makes_no_second_one() -> None:
    assert columns(b'{"_corrupt_record":1,"a":2}', b"no") == "a BIGINT, _corrupt_record STRING"
    assert columns(b'{"_corrupt_record":1,"a":2}') == "a BIGINT, _corrupt_record STRING"
    assert columns(b'{"_corrupt_record":1}', b"no") == ""


def test_objects_with_ids_for_names_are_looked_at_once_each() -> None:
    records = [
        b'{"counts":{%s}}' % b",".join(b'"user%d_%d":1' % (number, at) for at in range(10))
        for number in range(4000)
    ]
    began = time.process_time()
    counts = infer(records, ValueOptions()).field("counts").type
    assert time.process_time() - began < 10
    assert counts.num_fields == 40_000


def test_malformed_records_get_their_column_only_where_they_are_kept() -> None:
    assert columns(b'{"a":1}', b"no", mode="DROPMALFORMED") == "a BIGINT"


def test_lines_of_csv_have_numbered_columns_or_those_of_their_header() -> None:
    lines = [b"1,x,1.5,2020-01-01,true,", b"3000000000,y,2,2020-01-01 10:00:00,false,"]
    types = ("BIGINT", "STRING", "DOUBLE", "TIMESTAMP", "BOOLEAN", "STRING")
    assert columns(*lines, format="csv") == ", ".join(
        f"_c{number} {each}" for number, each in enumerate(types)
    )
    assert columns(b"a,b", b"1,2", b"a,b", format="csv", header=True) == "a INT, b INT"


def test_every_type_has_a_name() -> None:
    schema = pa.schema([("m", pa.map_(pa.string(), pa.int8())), ("t", pa.timestamp("us"))])
    assert ddl(schema) == "m MAP<STRING, TINYINT>, t TIMESTAMP_NTZ"
