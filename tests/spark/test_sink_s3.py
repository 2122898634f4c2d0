"""The sink on S3: over moto's HTTP server, and over one that loses answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opendata_buffer.config import StoreOptions
from tests.spark.written import Pipe, queued, records
from tests.support.s3_server import Answer, Fault, S3Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = "opendata-buffer"


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr("CAST(id AS STRING) AS value")


def expected(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


def test_batch_and_stream(
    spark: SparkSession, moto_endpoint: str, moto_bucket: str, checkpoint: str, tmp_path: Path
) -> None:
    store = f"s3://{moto_bucket}/root"
    frame = numbers(spark, 1000)
    writer = frame.write.format(FORMAT).mode("append").option("endpointUrl", moto_endpoint)
    writer.option("compression", "zstd").save(store)
    options = StoreOptions(endpoint_url=moto_endpoint)
    assert records(queued(store, options=options)) == expected(1000)

    pipe = Pipe(spark, store, checkpoint, tmp_path)
    pipe.options = {"endpointUrl": moto_endpoint}
    pipe.feed("a", "b")
    pipe.run()
    assert records(queued(store, options=options)) == [*expected(1000), b"a", b"b"]


def test_f1_f2_lost_answers_of_uploads_and_of_the_commit(
    spark: SparkSession, s3_server: S3Server
) -> None:
    # The manifest does not exist yet, so its first write is the commit's.
    faults = (Fault(500, applied=False), Fault(Answer.CLOSE, applied=False), Fault(Answer.CLOSE))
    for fault in faults:
        s3_server.inject(fault, method="PUT", ends="/manifest")
    s3_server.inject(Fault(500), method="PUT", key=".batch", times=2)
    # More than a task sends to the driver, so each stores its own.
    writer = numbers(spark, 30_000).write.format(FORMAT).mode("append")
    writer.option("endpointUrl", s3_server.endpoint).option("txnAppId", "job")
    writer.option("txnVersion", 0).save(s3_server.url)
    options = StoreOptions(endpoint_url=s3_server.endpoint)
    batches = queued(s3_server.url, options=options)
    assert records(batches) == expected(30_000)
    assert [each.sequence for each in batches] == [0, 1]
    puts = [each.key for each in s3_server.requests if each.method == "PUT"]
    assert puts.count("ingest/manifest") == 3
    assert sum(key.endswith(".batch") for key in puts) == 4
