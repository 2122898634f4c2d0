"""Queries that version 0.1 began go on from their checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLD = Path(__file__).resolve().parents[1] / "golden" / "v0.1"
FORMAT = "opendata-buffer"


def run(spark: SparkSession, source: Path, target: Path, checkpoint: Path, **options: str) -> None:
    frame = spark.readStream.format(FORMAT).option("gcEnabled", "false").load(str(source))
    columns = ["value", "value AS key"] if options else ["value"]
    writer = frame.selectExpr(*columns).writeStream.format(FORMAT).options(**options)
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    assert writer.start(str(target)).awaitTermination(600)


def test_queries_of_version_0_1_go_on_exactly_once(spark: SparkSession, tmp_path: Path) -> None:
    old = Path(shutil.copytree(OLD, tmp_path / "old"))
    for _ in range(2):  # the second time there is nothing to do
        to_topic, to_queue = old / "checkpoints" / "to_topic", old / "checkpoints" / "to_queue"
        run(spark, old / "queue", old / "topic", to_topic, partitioner="rendezvous")
        run(spark, old / "topic", old / "target", to_queue)
        rows = spark.read.format(FORMAT).load(str(old / "target")).collect()
        values = sorted(bytes(row["value"]).decode() for row in rows)
        assert values == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2", "left"]
