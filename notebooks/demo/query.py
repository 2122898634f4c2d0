"""The Spark side: read the buffer as a stream, write Parquet."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from notebooks.demo.places import Places
from tests.spark.jvm import prepare

FIELDS = """
    row INT, chunk INT, origin STRING, carrier STRING, year INT, month INT, day INT, hour INT,
    dep_delay INT, dest STRING, distance INT
"""

TRIGGER_ROWS = 60_000
"""About the most rows of a micro-batch, so that a backlog drains in visible steps."""


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Send standard error to a file. Spark and its workers inherit it from here."""
    keep = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(keep, 2)
        os.close(keep)


def session(log: Path) -> SparkSession:
    """Return a local Spark on two cores that writes only to ``log``."""
    prepare()  # Sets options of the JVM, and of Python processes.
    with quiet(log):
        return (
            SparkSession.builder.master("local[2]")
            .appName("opendata-buffer demo")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "ERROR")
            .config("spark.driver.memory", "1g")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )


def kill(log: Path) -> None:
    """Kill Spark's JVM with SIGKILL, and let the next :func:`session` start another one.

    Spark has no function for this, because a session does not outlive its JVM. So the attributes
    by which pyspark finds the JVM are reset.

    Args:
        log: The file for what pyspark logs about the end of its JVM.
    """
    gateway = SparkContext._gateway
    assert gateway is not None
    # A call that waits for an answer of the JVM logs that there is none, by the root logger.
    logging.getLogger().addHandler(logging.FileHandler(log))
    gateway.proc.kill()
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def start(
    spark: SparkSession, places: Places, on_batch: Callable[[int, int], None]
) -> StreamingQuery:
    """Start the query.

    Args:
        spark: The session.
        places: The buffer and the output.
        on_batch: Called with the id and the rows of each batch in Parquet.
    """

    def write(batch: DataFrame, batch_id: int) -> None:
        # A batch that is repeated after a crash has the same id and the same rows. So the output
        # stays exact if it overwrites its directory.
        batch.persist()
        to = f"batch={batch_id}"
        batch.write.mode("overwrite").parquet(str(places.flights / to))
        delays = batch.groupBy("carrier", "hour").agg(
            f.count("dep_delay").alias("departed"), f.sum("dep_delay").alias("minutes")
        )
        delays.coalesce(1).write.mode("overwrite").parquet(str(places.delays / to))
        batch.unpersist()
        on_batch(batch_id, places.rows_of(batch_id))

    records = (
        spark.readStream.format("opendata-buffer")
        .schema("value STRING")
        .option("createIfMissing", "true")
        .option("maxOffsetsPerTrigger", TRIGGER_ROWS)
        .load(places.store)
    )
    flights = (
        records.select(
            f.from_json("value", FIELDS).alias("flight"),
            f.crc32(f.encode("value", "UTF-8")).alias("crc"),
        )
        .select("flight.*", "crc")
        .withColumnRenamed("origin", "airport")
    )
    return (
        flights.writeStream.queryName("flights")
        .foreachBatch(write)
        .option("checkpointLocation", str(places.checkpoint))
        .start()
    )
