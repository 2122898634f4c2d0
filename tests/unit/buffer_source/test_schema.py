"""Schemas that a user may ask for, and schemas that are inferred from records."""

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

from buffer_source.options import SourceOptions
from buffer_source.schema import check_not_inferred, check_schema, infer_schema
from opendata_buffer.errors import InvalidInput
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.values import ValueOptions
from tests.unit.buffer_source.source_queue import SourceQueue, SourceTopic
from tests.unit.buffer_source.structs import struct


def check_columns(schema: StructType, **options: str) -> None:
    check_schema(schema, ValueOptions(**options))


def test_a_schema_may_have_fields_of_records_and_metadata_columns() -> None:
    check_columns(
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
def test_unsupported_columns_are_refused(columns: list[str], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_columns(struct(*columns))
    assert message in str(caught.value)


@pytest.mark.parametrize("column", ["id", "o.x"])
def test_not_null_is_refused_at_any_depth(column: str) -> None:
    inner = StructType().add("x", "integer", nullable=column != "o.x")
    schema = StructType().add("id", "integer", nullable=column != "id").add("o", inner)
    with pytest.raises(InvalidInput, match=f"column '{column}' NOT NULL"):
        check_columns(schema)


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (VariantType(), "'c' as VARIANT"),
        (YearMonthIntervalType(), "'c' as INTERVAL YEAR TO MONTH"),
        (ArrayType(StructType().add("x", VariantType())), "'c[].x' as VARIANT"),
        (MapType(StringType(), VariantType()), "'c{}' as VARIANT"),
    ],
)
def test_a_type_with_another_meaning_in_arrow_is_refused_at_any_depth(
    dtype: DataType, named: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_columns(StructType().add("c", dtype))
    assert f"schema wants column {named}, which records are not read into" in str(caught.value)


# Inference.


@pytest.fixture
def source(runtime: ManualRuntime) -> SourceQueue:
    return SourceQueue(runtime)


def inferred(source: SourceQueue | SourceTopic, **given: str) -> str:
    options = SourceOptions.from_spark({"path": "/queue", "valueFormat": "json", **given})
    assert options.values is not None
    schema = infer_schema(options, options.values, source.store, source.runtime)
    return schema.simpleString()


def test_columns_are_inferred_from_the_oldest_and_the_newest_batches(source: SourceQueue) -> None:
    source.produce(records=[b'{"id":1}'])
    source.produce(20, records=[b'{"never":"seen"}'])
    source.produce(4, records=[b'{"id":2.5,"at":{"x":[1]}}', b"broken"])
    assert inferred(source) == (
        "struct<id:double,never:string,at:struct<x:array<bigint>>,_corrupt_record:string>"
    )


def test_fields_with_the_names_of_metadata_columns_are_left_out_and_named(
    source: SourceQueue, caplog: pytest.LogCaptureFixture
) -> None:
    source.produce(records=[b'{"_index":"logs-7","_id":"x","_locations":[1],"took":3}', b"broken"])
    assert inferred(source) == "struct<_id:string,took:bigint,_corrupt_record:string>"
    assert "'_index' (_index), '_locations' (_location)" in caplog.text


def test_a_topic_is_sampled_in_all_its_partitions(runtime: ManualRuntime) -> None:
    source = SourceTopic(runtime, 2)
    first, second = source.topic.read().names
    source.append(first, b'{"a":1}')
    source.append(second, b'{"b":"x"}')
    assert inferred(source) == "struct<a:bigint,b:string,_corrupt_record:string>"


def test_a_batch_without_its_object_is_not_in_the_sample(source: SourceQueue) -> None:
    source.produce(records=[b'{"a":1}'])
    source.produce(records=[b'{"b":1}'])
    source.store.delete_many([source.manifest().entries()[0].location])
    assert inferred(source, mode="FAILFAST") == "struct<b:bigint>"


def test_the_error_without_inferable_columns_says_how_to_name_them(source: SourceQueue) -> None:
    source.produce(records=[b"plain"])
    with pytest.raises(InvalidInput, match=r"none of 1 records .*\.schema\('id BIGINT"):
        inferred(source)
    with pytest.raises(InvalidInput, match="there is no queue with manifest"):
        inferred(source, dataPathPrefix="other")


def test_a_stream_refuses_an_inferred_schema_and_prints_it_for_copying(source: SourceQueue) -> None:
    source.produce(records=[b'{"id":1,"a b":"x"}'])
    options = SourceOptions.from_spark({"path": "/queue", "valueFormat": "json"})
    assert options.values is not None
    schema = infer_schema(options, options.values, source.store, source.runtime)
    with pytest.raises(InvalidInput) as caught:
        check_not_inferred(schema)
    assert '    .schema("id BIGINT, `a b` STRING, _corrupt_record STRING")\n' in str(caught.value)
    check_not_inferred(struct("id bigint"))


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("offset", "'sequence' and 'index'"),
        ("timestamp", "'ingestion_time'"),
        ("key", "'metadata'"),
        ("topic", "'partition'"),
        ("sequences", "'sequence'"),
    ],
)
def test_an_unknown_column_names_the_one_that_has_its_meaning_here(column: str, names: str) -> None:
    with pytest.raises(InvalidInput, match=rf"Did you mean {names}\?"):
        check_schema(struct(f"{column} string"))
