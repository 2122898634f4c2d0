"""JSON records into typed columns: here, by ``from_json`` over bytes, and by Spark from files.

The three read the same 263-byte log events into the same columns, as many rows in a micro-batch,
into the same sink. They take turns, one query each, in a random order, after rounds that do not
count; of each query the micro-batches after the first count, by ``addBatch``.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from benchmarks.codec import logs
from benchmarks.queries import started
from benchmarks.queues import fill
from benchmarks.spark_source import micro_batch_seconds
from benchmarks.table import Row
from opendata_buffer.stores.factory import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamReader

__all__ = ["typed_rows"]

MIB = 1024 * 1024
SCHEMA = "ts BIGINT, user STRING, kind STRING, url STRING, ip STRING, agent STRING, session STRING"
TASKS = 2
WARM_UP = 1
ROUNDS = 5
MICRO_BATCHES = 4  # of each query; the first does not count
OBJECTS = 16  # of a micro-batch
OBJECT_BYTES = 8 * MIB


def typed_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Ours against each of the others."""
    place = home / "typed"
    records = logs(random.Random(7))[: OBJECT_BYTES // 267]
    store, files = str(place / "store"), place / "files"
    queued = fill(open_store(store), records, OBJECTS * MICRO_BATCHES)
    files.mkdir(parents=True)
    first = files / "0.json"
    first.write_bytes(b"\n".join(records))
    for number in range(1, OBJECTS * MICRO_BATCHES):
        os.link(first, files / f"{number}.json")
    os.sync()  # or the disk writes what was queued while we measure

    def queue() -> DataFrame:
        return ours(spark, store, "json").schema(SCHEMA).load()

    def from_json() -> DataFrame:
        parsed = sf.from_json(sf.col("value").cast("string"), SCHEMA).alias("row")
        values = ours(spark, store, "bytes").schema("value BINARY").load()
        return values.select(parsed).select("row.*")

    def json_files() -> DataFrame:
        source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", OBJECTS)
        return source.json(str(files))

    turns = {"queue": queue, "from_json": from_json, "files": json_files}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = random.Random(7)
    for turn in range(WARM_UP + ROUNDS):
        for name in order.sample(list(turns), len(turns)):

            def query(attempt: int, name: str = name, turn: int = turn) -> float:
                queued.rewind()
                checkpoint = place / f"checkpoint-{turn}-{name}-{attempt}"
                return micro_batch_seconds(turns[name](), checkpoint, MICRO_BATCHES, "addBatch")

            taken = started(query)
            if turn >= WARM_UP:
                seconds[name].append(taken)
    shutil.rmtree(place)  # half a gigabyte
    rows = len(records) * OBJECTS
    median = {name: statistics.median(each) for name, each in seconds.items()}
    speed = {name: f"{rows / each / 1e6:.2f}" for name, each in median.items()}
    for other, what, bar in (
        ("from_json", "from_json over our bytes source", 2.0),
        ("files", "Spark's JSON-lines files", 1.0),
    ):
        ratio = median[other] / median["queue"]
        yield Row(
            f"streaming source, 263-byte JSON records read into typed columns / {what}",
            f"{ratio:.2f} x",
            f">= {bar:.0f} x",
            ratio >= bar,
            f"{speed['queue']} M rows/s against {speed[other]}; {rows:,} rows in a micro-batch",
        )


def ours(spark: SparkSession, store: str, value_format: str) -> DataStreamReader:
    """A reader of the queue."""
    return (
        spark.readStream.format("opendata-buffer")
        .option("path", store)
        .option("valueFormat", value_format)
        .option("maxBatchesPerTrigger", OBJECTS)
        .option("minPartitions", TASKS)
        .option("gcEnabled", "false")
    )
