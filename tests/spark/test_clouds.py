"""Source and sink over the servers that stand for Google's and Microsoft's clouds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opendata_buffer.config import StoreOptions
from tests.spark.written import queued, records

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT = "opendata-buffer"


@pytest.mark.parametrize(
    ("server", "path", "url"),
    [
        ("fake-gcs-server", "", "gs://bucket/{}"),
        ("azurite", "/testing", "az://container/{}"),
    ],
)
def test_a_write_is_streamed_into_another_queue(
    spark: SparkSession,
    real_server: Callable[[str], str],
    tmp_path: Path,
    server: str,
    path: str,
    url: str,
) -> None:
    endpoint = real_server(server) + path
    source, target = url.format(f"{tmp_path.name}/in"), url.format(f"{tmp_path.name}/out")
    frame = spark.range(0, 100, 1, 2).selectExpr("CAST(id AS STRING) AS value")
    frame.write.format(FORMAT).mode("append").option("endpointUrl", endpoint).save(source)
    stream = spark.readStream.format(FORMAT).option("endpointUrl", endpoint).load(source)
    query = (
        stream.select("value")
        .writeStream.format(FORMAT)
        .option("endpointUrl", endpoint)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(target)
    )
    query.awaitTermination()
    options = StoreOptions(endpoint_url=endpoint)
    expected = [str(number).encode() for number in range(100)]
    assert sorted(records(queued(target, options=options))) == sorted(expected)
    assert spark.read.format(FORMAT).option("endpointUrl", endpoint).load(target).count() == 100
