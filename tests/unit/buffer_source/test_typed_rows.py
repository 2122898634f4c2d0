from __future__ import annotations

import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StringType,
    StructType,
    VariantType,
    YearMonthIntervalType,
)

from buffer_source.rows import check_schema
from buffer_source.typed_rows import OWN, VALUE_OPTIONS, record_schema, value_options
from opendata_buffer.errors import InvalidInput
from opendata_buffer.option_reader import OptionReader
from opendata_buffer.values import ValueOptions
from tests.unit.buffer_source.structs import struct


def check(schema: StructType, **options: str) -> None:
    check_schema(schema, ValueOptions(**options))


def test_fields_of_records_and_our_own_columns_lie_side_by_side() -> None:
    check(
        struct("id bigint", "value string", "sequence int", "_sequence bigint", "_index int",
               "_ingestion_time timestamp", "_metadata string", "_location string",
               "_partition string", "_corrupt_record string")
    )  # fmt: skip
    assert set(OWN) == {
        "_sequence", "_index", "_ingestion_time", "_metadata", "_location", "_partition",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["_sequence int"], "schema wants column '_sequence' as INT: it is BIGINT"),
        (["_sequnce bigint"], "did you mean '_sequence'?"),
        (["id interval day to second"], "column 'id' as INTERVAL DAY TO SECOND, which records"),
        (["id int", "id bigint"], "schema has the column 'id' twice"),
        (["_corrupt_record int"], "make it STRING"),
    ],
)
def test_what_is_not_read_is_refused(columns: list[str], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(struct(*columns))
    assert message in str(caught.value)


@pytest.mark.parametrize("column", ["id", "o.x"])
def test_not_null_is_refused_at_any_depth(column: str) -> None:
    inner = StructType().add("x", "integer", nullable=column != "o.x")
    schema = StructType().add("id", "integer", nullable=column != "id").add("o", inner)
    with pytest.raises(InvalidInput, match=f"column '{column}' NOT NULL"):
        check(schema)


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (VariantType(), "'c' as VARIANT"),
        (YearMonthIntervalType(), "'c' as INTERVAL YEAR TO MONTH"),
        (ArrayType(StructType().add("x", VariantType())), "'c[].x' as VARIANT"),
        (MapType(StringType(), VariantType()), "'c{}' as VARIANT"),
    ],
)
def test_a_type_that_is_something_else_to_arrow_is_refused_at_any_depth(
    dtype: DataType, named: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(StructType().add("c", dtype))
    assert f"schema wants column {named}, which records are not read into" in str(caught.value)


def test_the_columns_of_records_are_those_that_are_not_ours() -> None:
    import pyarrow as pa

    arrow = pa.schema([("_index", pa.int32()), ("index", pa.int32()), ("_x", pa.string())])
    assert record_schema(arrow).names == ["index", "_x"]


def read(**options: str) -> ValueOptions | None:
    return value_options(OptionReader(options, VALUE_OPTIONS, "source"))


def test_without_a_value_format_records_stay_bytes() -> None:
    assert read() is None
    assert read(valueFormat="BYTES") is None


def test_options_have_sparks_names_and_any_case() -> None:
    found = read(
        VALUEFORMAT="csv", mode="failfast", columnNameOfCorruptRecord="bad", sep="\t", quote="",
        header="true", nullValue="-",
    )  # fmt: skip
    assert found == ValueOptions(
        format="csv", mode="FAILFAST", corrupt_column="bad", sep="\t", quote="", header=True,
        null_value="-",
    )  # fmt: skip
    assert read(valueFormat="json") == ValueOptions()
    assert read(valueFormat="csv") == ValueOptions(format="csv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "PERMISSIVE"}, "option mode is given and valueFormat is bytes"),
        ({"valueFormat": "json", "sep": ";"}, "option sep is given and valueFormat is json"),
        ({"valueFormat": "xml"}, "option valueFormat is 'xml': use bytes or json or csv"),
        ({"valueFormat": "json", "mode": "STRICT"}, "use PERMISSIVE or DROPMALFORMED or FAILFAST"),
        ({"valueFormat": "csv", "sep": "||"}, "option sep is '||': use one ASCII character"),
        (
            {"valueFormat": "csv", "quote": "\u00ab"},
            "option quote is '\u00ab': use one ASCII character",
        ),
        ({"valueFormat": "csv", "sep": ""}, "option sep is ''"),
    ],
)
def test_what_is_not_accepted_is_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**options)
    assert message in str(caught.value)
