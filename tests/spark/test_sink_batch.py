"""Batch writes of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from chispa import assert_df_equality
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from opendata_buffer.formats.batch import Transaction
from tests.spark.queues import FORMAT, drain, filtered, records, written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr("CAST(id AS STRING) AS value")


def test_two_partitions_become_one_group_in_partition_order(
    spark: SparkSession, store: str
) -> None:
    numbers(spark, 25_000).write.format(FORMAT).mode("append").save(store)
    batches = written(store)
    assert [each.sequence for each in batches] == [0, 1]
    assert records(batches) == [str(number).encode() for number in range(25_000)]
    assert [each.transaction for each in batches] == [None, None]
    assert all(len(each.metadata) == 1 for each in batches)
    assert batches[0].metadata[0].payload == b""
    assert batches[0].metadata[0].ingestion_time_ms > 1_700_000_000_000


def test_any_other_column_is_an_error_that_shows_the_fix(spark: SparkSession, store: str) -> None:
    frame = numbers(spark, 3).selectExpr("value", "1 AS delay")
    with pytest.raises(AnalysisException) as caught:
        frame.write.format(FORMAT).mode("append").save(store)
    assert "column 'delay' (int) cannot be written" in str(caught.value)
    fixed = frame.selectExpr("to_json(struct(*)) AS value")
    fixed.write.format(FORMAT).mode("append").save(store)
    assert records(written(store))[0] == b'{"value":"0","delay":1}'


def test_other_modes_than_append_are_refused(spark: SparkSession, store: str) -> None:
    for mode, message in (
        ("overwrite", "mode overwrite cannot be written to a buffer"),
        ("error", "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"),  # Spark's own
    ):
        with pytest.raises(AnalysisException, match=message):
            numbers(spark, 3).write.format(FORMAT).mode(mode).save(store)


def write(frame: DataFrame, store: str, version: int) -> None:
    writer = frame.write.format(FORMAT).mode("append").option("txnAppId", "job-1")
    writer.option("txnVersion", version).save(store)


def test_a_write_with_an_identity_happens_once(spark: SparkSession, store: str) -> None:
    for version in (0, 0, 3, 2, 3):
        write(numbers(spark, 2), store, version)
    batches = written(store)
    assert [each.transaction for each in batches] == [
        Transaction("job-1", version) for version in (0, 3)
    ]
    assert records(batches) == [b"0", b"1"] * 2
    assert filtered(batches) == records(batches)
    drain(store)
    write(numbers(spark, 2), store, 3)
    assert written(store) == [], "also after a consumer has taken it"


OF_ALL_TYPES = (
    "CAST(id AS INT) AS number",
    "IF(id % 3 = 0, NULL, concat('tëxt \"', id, chr(10))) AS text",
    "CAST(id * 0.25 AS DOUBLE) AS real",
    "CAST(id * 1.5 AS DECIMAL(20, 3)) AS exact",
    "id % 2 = 0 AS even",
    "DATE '2024-02-29' + CAST(id AS INT) AS day",
    "timestamp_micros(1700000000000000 + id * 1000) AS moment",
    "CAST(timestamp_micros(id * 1000) AS TIMESTAMP_NTZ) AS local",
    "encode(CAST(id AS STRING), 'UTF-8') AS raw",
    "IF(id % 5 = 0, NULL, array(id, NULL)) AS list",
    "named_struct('x', id, 'y', IF(id % 2 = 0, NULL, 'y')) AS inner",
    "map(CAST(id AS STRING), IF(id % 2 = 0, NULL, id)) AS pairs",
)


def test_columns_written_as_json_are_what_to_json_means_and_come_back_as_they_were(
    spark: SparkSession, store: str
) -> None:
    frame = spark.range(0, 100, 1, 4).selectExpr(*OF_ALL_TYPES)
    writer = frame.write.format(FORMAT).mode("append")
    writer.option("valueFormat", "json").save(store)
    (batch,) = written(store)
    values = spark.createDataFrame([(each.decode(),) for each in batch.records], "value STRING")
    parsed = f.from_json("value", frame.schema).alias("row")
    theirs = frame.select(f.to_json(f.struct("*")).alias("value"))
    expected = theirs.select(parsed).select("row.*")
    assert_df_equality(values.select(parsed).select("row.*"), expected, ignore_nullable=True)
    readable = frame.drop("pairs")  # The source reads no maps.
    reader = spark.read.format(FORMAT).schema(expected.drop("pairs").schema)
    read = reader.option("valueFormat", "json").load(store)
    assert_df_equality(read, readable, ignore_row_order=False, ignore_nullable=True)
