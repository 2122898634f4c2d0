"""What a user schema may ask for, and what records show."""

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
from tests.unit.buffer_source.source_queue import TopicWorld, World
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


# Inference.


@pytest.fixture
def world(runtime: ManualRuntime) -> World:
    return World(runtime)


def inferred(world: World | TopicWorld, **given: str) -> str:
    options = SourceOptions.from_spark({"path": "/world", "valueFormat": "json", **given})
    assert options.values is not None
    schema = infer_schema(options, options.values, world.store, world.runtime)
    return schema.simpleString()


def test_the_oldest_and_the_newest_batches_say_which_columns_there_are(world: World) -> None:
    world.produce(records=[b'{"id":1}'])
    world.produce(20, records=[b'{"never":"seen"}'])
    world.produce(4, records=[b'{"id":2.5,"at":{"x":[1]}}', b"broken"])
    assert inferred(world) == (
        "struct<id:double,never:string,at:struct<x:array<bigint>>,_corrupt_record:string>"
    )


def test_fields_that_are_called_like_our_columns_are_left_out_and_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.produce(records=[b'{"_index":"logs-7","_id":"x","_locations":[1],"took":3}', b"broken"])
    assert inferred(world) == "struct<_id:string,took:bigint,_corrupt_record:string>"
    assert "'_index' (_index), '_locations' (_location)" in caplog.text


def test_a_topic_is_sampled_in_all_its_partitions(runtime: ManualRuntime) -> None:
    world = TopicWorld(runtime, 2)
    first, second = world.topic.read().names
    world.append(first, b'{"a":1}')
    world.append(second, b'{"b":"x"}')
    assert inferred(world) == "struct<a:bigint,b:string,_corrupt_record:string>"


def test_a_batch_whose_object_is_gone_is_not_in_the_sample(world: World) -> None:
    world.produce(records=[b'{"a":1}'])
    world.produce(records=[b'{"b":1}'])
    world.store.delete_many([world.manifest().entries()[0].location])
    assert inferred(world, mode="FAILFAST") == "struct<b:bigint>"


def test_where_nothing_shows_columns_it_says_how_to_name_them(world: World) -> None:
    world.produce(records=[b"plain"])
    with pytest.raises(InvalidInput, match=r"none of 1 records .*\.schema\('id BIGINT"):
        inferred(world)
    with pytest.raises(InvalidInput, match="there is no queue with manifest"):
        inferred(world, dataPathPrefix="other")


def test_a_stream_refuses_an_inferred_schema_and_prints_the_line_to_paste(world: World) -> None:
    world.produce(records=[b'{"id":1,"a b":"x"}'])
    options = SourceOptions.from_spark({"path": "/world", "valueFormat": "json"})
    assert options.values is not None
    schema = infer_schema(options, options.values, world.store, world.runtime)
    with pytest.raises(InvalidInput) as caught:
        check_not_inferred(schema)
    assert '    .schema("id BIGINT, `a b` STRING, _corrupt_record STRING")\n' in str(caught.value)
    check_not_inferred(struct("id bigint"))
