"""Source and sinks on servers of S3, Google and Azure, and on one that loses answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opendata_buffer.config import StoreOptions
from tests.spark.queues import FORMAT, Pipe, records, written
from tests.support.s3_server import Answer, Fault, S3Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr("CAST(id AS STRING) AS value")


def expected(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize(
    ("server", "path", "url"),
    [
        ("moto", "", "s3://{bucket}/{folder}"),
        ("fake-gcs-server", "", "gs://bucket/{folder}"),
        ("azurite", "/testing", "az://container/{folder}"),
    ],
)
def test_a_write_is_streamed_into_another_queue_and_read(
    spark: SparkSession,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    server: str,
    path: str,
    url: str,
) -> None:
    given, bucket = {}, ""
    if server == "moto":
        given["region"], bucket = "us-east-1", request.getfixturevalue("moto_bucket")
        endpoint = request.getfixturevalue("moto_endpoint")
    else:
        endpoint = request.getfixturevalue("real_server")(server) + path
    given["endpointUrl"] = endpoint
    source, target = (url.format(bucket=bucket, folder=f"{tmp_path.name}/{n}") for n in (1, 2))
    numbers(spark, 100).write.format(FORMAT).mode("append").options(**given).save(source)
    pipe = Pipe(spark, target, tmp_path)
    pipe.options = given
    pipe.run(spark.readStream.format(FORMAT).options(**given).load(source).select("value"))
    options = StoreOptions(endpoint_url=endpoint)
    assert records(written(target, options=options)) == expected(100)
    assert spark.read.format(FORMAT).options(**given).load(target).count() == 100


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
    batches = written(s3_server.url, options=options)
    assert records(batches) == expected(30_000)
    assert [each.sequence for each in batches] == [0, 1]
    puts = [each.key for each in s3_server.requests if each.method == "PUT"]
    assert puts.count("ingest/manifest") == 3
    assert sum(key.endswith(".batch") for key in puts) == 4
