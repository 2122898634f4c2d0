"""What a user schema may ask for."""

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

from buffer_source.schema import check_schema
from opendata_buffer.errors import InvalidInput
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
