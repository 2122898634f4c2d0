"""Typed rows in Spark: the corpus in a query, and malformed records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from buffer_source.schema import arrow_schema
from tests.spark.queues import FORMAT, LONG_S, produce
from tests.values import corpus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = [b'{"id":1,"at":"2020-01-01T02:00:00+02:00"}', b'{"id":"x"}', b'{"id":3,"more":true}']


@pytest.fixture
def queue(store: str) -> str:
    produce(store, [RECORDS])
    return store


@pytest.mark.parametrize(
    ("value_format", "schema", "cases"),
    [("json", corpus.JSON_SCHEMA, corpus.JSON), ("csv", corpus.CSV_SCHEMA, corpus.CSV)],
)
def test_the_corpus_becomes_its_rows_in_a_query(
    spark: SparkSession, store: str, value_format: str, schema: pa.Schema, cases: list[corpus.Case]
) -> None:
    with_index = schema.append(pa.field("_index", pa.int32()))
    asked = from_arrow_schema(with_index, prefer_timestamp_ntz=True)
    assert arrow_schema(asked) == with_index
    produce(store, [[record for record, _ in cases]])
    reader = spark.read.format(FORMAT).option("valueFormat", value_format)
    found = reader.schema(asked).load(store).toArrow().sort_by("_index").drop_columns(["_index"])
    wanted: list[dict[str, Any]] = corpus.table(cases, schema)
    assert found.to_pylist() == wanted


def test_a_stream_has_the_fields_of_records_as_columns(spark: SparkSession, queue: str) -> None:
    schema = "id BIGINT, at TIMESTAMP, _index INT, _sequence BIGINT, _corrupt_record STRING"
    query = (
        spark.readStream.format(FORMAT)
        .option("valueFormat", "json")
        .schema(schema)
        .load(queue)
        .writeStream.format("memory")
        .queryName("typed")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(LONG_S)
    assert query.exception() is None
    rows = spark.table("typed").selectExpr("id", "unix_millis(at)", "_index", "_corrupt_record")
    assert sorted(map(tuple, rows.collect()), key=lambda row: row[2]) == [
        (1, 1_577_836_800_000, 0, None),
        (None, None, 1, '{"id":"x"}'),
        (3, None, 2, None),
    ]


def test_a_batch_read_infers_a_schema_and_a_stream_asks_for_it(
    spark: SparkSession, queue: str
) -> None:
    frame = spark.read.format(FORMAT).option("valueFormat", "json").load(queue)
    assert frame.schema.simpleString() == (
        "struct<id:bigint,at:string,more:boolean,_corrupt_record:string>"
    )
    assert [row.id for row in frame.collect()] == [1, None, 3]
    stream = spark.readStream.format(FORMAT).option("valueFormat", "json").load(queue)
    query = stream.writeStream.format("noop").start()
    with pytest.raises(Exception, match=r'\.schema\("id BIGINT, at STRING, more BOO') as raised:
        query.awaitTermination(LONG_S)
    assert "UnboundLocalError" not in str(raised.value)
