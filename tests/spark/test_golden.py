"""Batches of another implementation and queues of an earlier release, read through Spark."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from tests.spark.queues import FORMAT, LONG_S, open_queue

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize("streams", [False, True])
def test_golden_batches_read_through_spark(spark: SparkSession, store: str, streams: bool) -> None:
    described: list[dict[str, Any]] = json.loads((GOLDEN / "batches.json").read_text())
    opened, runtime = open_store(store), SystemRuntime()
    entries = []
    for description in described:
        location = f"ingest/{runtime.ulid()}.batch"
        opened.put(location, (GOLDEN / description["file"]).read_bytes())
        # A time outside of any calendar, on which the read must not fail.
        entries.append(NewEntry(location, (Metadata(0, -(1 << 63), b""),)))
    open_queue(store).append(entries)
    if streams:
        frame = spark.readStream.format(FORMAT).option("gcEnabled", "false").load(store)
        writer = frame.writeStream.format("memory").queryName("golden").trigger(availableNow=True)
        assert writer.start().awaitTermination(LONG_S)
        read = spark.table("golden")
    else:
        read = spark.read.format(FORMAT).load(store)
    got: dict[int, list[str]] = {index: [] for index in range(len(described))}
    for row in read.orderBy("sequence", "index").collect():
        assert row["ingestion_time"] is None
        assert row["index"] == len(got[row["sequence"]])
        got[row["sequence"]].append(bytes(row["value"]).hex())
    assert got == {index: description["records_hex"] for index, description in enumerate(described)}


def test_queries_of_version_0_1_continue_exactly_once(spark: SparkSession, tmp_path: Path) -> None:
    old = Path(shutil.copytree(GOLDEN / "v0.1", tmp_path / "old"))

    def run(source: str, target: str, checkpoint: str, *columns: str, **options: str) -> None:
        frame = spark.readStream.format(FORMAT).option("gcEnabled", "false").load(f"{old}/{source}")
        writer = frame.selectExpr(*columns).writeStream.format(FORMAT).options(**options)
        writer = writer.option("checkpointLocation", f"{old}/checkpoints/{checkpoint}")
        query = writer.trigger(availableNow=True).start(f"{old}/{target}")
        assert query.awaitTermination(LONG_S)

    for _ in range(2):  # the second run has nothing to do
        run("queue", "topic", "to_topic", "value", "value AS key", partitioner="rendezvous")
        run("topic", "target", "to_queue", "value")
        rows = spark.read.format(FORMAT).load(f"{old}/target").collect()
        values = sorted(bytes(row["value"]).decode() for row in rows)
        assert values == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2", "left"]
