"""Batches that another implementation wrote, read through both of Spark's ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def batch(spark: SparkSession, store: str) -> DataFrame:
    return spark.read.format("opendata-buffer").load(store)


def stream(spark: SparkSession, store: str) -> DataFrame:
    frame = spark.readStream.format("opendata-buffer").option("gcEnabled", "false").load(store)
    writer = frame.writeStream.format("memory").queryName("golden").trigger(availableNow=True)
    assert writer.start().awaitTermination(600)
    return spark.table("golden")


@pytest.mark.parametrize("read", [batch, stream])
def test_golden_batches_read_through_spark(
    spark: SparkSession, store: str, read: Callable[[SparkSession, str], DataFrame]
) -> None:
    described: list[dict[str, Any]] = json.loads((GOLDEN / "batches.json").read_text())
    opened, runtime = open_store(store), SystemRuntime()
    entries = []
    for each in described:
        location = f"ingest/{runtime.ulid()}.batch"
        opened.put(location, (GOLDEN / each["file"]).read_bytes())
        # A time no calendar knows: the read must not fail on it.
        entries.append(NewEntry(location, (Metadata(0, -(1 << 63), b""),)))
    Queue(opened, QueueConfig(store=store), runtime=runtime, role="test").append(entries)
    got: dict[int, list[str]] = {index: [] for index in range(len(described))}
    for row in read(spark, store).orderBy("sequence", "index").collect():
        assert row["ingestion_time"] is None
        assert row["index"] == len(got[row["sequence"]])
        got[row["sequence"]].append(bytes(row["value"]).hex())
    assert got == {index: each["records_hex"] for index, each in enumerate(described)}
