"""Records read into columns here and by Spark's own functions: the same, record by record."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from buffer_source.rows import arrow_schema
from opendata_buffer.config import ProducerConfig
from opendata_buffer.producer.producer import Producer
from opendata_buffer.values.decoder import Decoder
from tests.values import corpus
from tests.values.compare import differences
from tests.values.golden import FORMATS, spark_reads
from tests.values.schemas import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PIECE = 4096
GENERATED = int(os.environ.get("OPENDATA_BUFFER_RECORDS", "10000"))
"""JSON records; of CSV a fifth. 100,000 in ``./run test --nightly``: the same and more."""


@pytest.mark.parametrize("name", FORMATS)
def test_every_record_of_the_corpus_becomes_the_row_that_spark_makes_of_it(
    spark: SparkSession, name: str
) -> None:
    form, schema = FORMATS[name], SCHEMAS[name]
    made = {"json": corpus.generated(GENERATED), "csv": corpus.csv_generated(GENERATED // 5)}
    records = [*form.chosen, *made[name]]
    theirs = spark_reads(spark, records, name)
    decoder, values = Decoder(schema, form.options), pa.array(records, pa.binary())
    ours = pa.concat_tables(
        pa.table(decoder.decode(values.slice(at, PIECE)).arrays, schema=schema)
        for at in range(0, len(values), PIECE)
    )
    found = differences(records, theirs, ours)
    assert not found, "\n".join([f"{len(found)} differ", *found[:40]])


@pytest.mark.parametrize("name", FORMATS)
def test_the_schema_of_the_corpus_is_the_same_to_spark(spark: SparkSession, name: str) -> None:
    ours, theirs = SCHEMAS[name], arrow_schema(StructType.fromDDL(FORMATS[name].schema))
    # What the elements of a list are called is a matter of taste.
    kinds = [str(each).replace("element:", "item:") for each in theirs.types]
    assert dict(zip(theirs.names, kinds, strict=True)) == {
        each.name: str(each.type) for each in ours
    }


SCHEMA = "id BIGINT, at TIMESTAMP, _index INT, _sequence BIGINT, _corrupt_record STRING"
RECORDS = [b'{"id":1,"at":"2020-01-01 00:00:00"}', b'{"id":"x"}', b'{"id":3,"more":true}']


@pytest.fixture
def queue(store: str) -> str:
    with Producer(ProducerConfig(store=store)) as producer:
        producer.produce(RECORDS)
    return store


def test_a_stream_has_the_fields_of_records_as_columns_and_times_in_the_zone_of_the_session(
    spark: SparkSession, queue: str, checkpoint: str
) -> None:
    source = spark.readStream.format("opendata-buffer").option("valueFormat", "json")
    spark.conf.set("spark.sql.session.timeZone", "+02:00")
    try:
        query = (
            source.schema(SCHEMA)
            .load(queue)
            .writeStream.format("memory")
            .queryName("typed")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(600)
        assert query.exception() is None
        rows = spark.table("typed").selectExpr("id", "unix_millis(at)", "_index", "_corrupt_record")
        assert sorted(map(tuple, rows.collect()), key=lambda row: row[2]) == [
            (1, 1_577_829_600_000, 0, None),
            (None, None, 1, '{"id":"x"}'),
            (3, None, 2, None),
        ]
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_a_batch_read_infers_a_schema_and_a_stream_asks_for_it(
    spark: SparkSession, queue: str, checkpoint: str
) -> None:
    frame = spark.read.format("opendata-buffer").option("valueFormat", "json").load(queue)
    assert frame.schema.simpleString() == "struct<at:string,id:string,more:boolean>"
    assert [row.id for row in frame.collect()] == ["1", "x", "3"]
    stream = spark.readStream.format("opendata-buffer").option("valueFormat", "json").load(queue)
    with pytest.raises(Exception, match=r'\.schema\("at STRING, id STRING, more BOOLEAN"\)'):
        run(stream, checkpoint)


def run(stream: DataFrame, checkpoint: str) -> None:
    writer = stream.writeStream.format("noop").option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination(600)


def test_failfast_names_the_record_and_dropmalformed_leaves_it_out(
    spark: SparkSession, queue: str
) -> None:
    reader = spark.read.format("opendata-buffer").option("valueFormat", "json").schema("id BIGINT")
    kept = reader.option("mode", "DROPMALFORMED").load(queue)
    assert [row.id for row in kept.collect()] == [1, 3]
    with pytest.raises(Exception, match=r"record 1 of batch 0 .* is malformed: field 'id'"):
        reader.option("mode", "FAILFAST").load(queue).collect()
