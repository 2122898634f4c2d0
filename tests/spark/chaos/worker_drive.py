"""A driver process with streaming queries, which run until it is killed or drain their queues.

Argument: the job as JSON; see ``Job`` in processes.py. The process prints ``ready`` once it has a
session, and waits for a word: ``run`` for endless queries, ``drain`` for Trigger.AvailableNow.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, datasource
from pyspark.sql.functions import udf

from tests.spark.jvm import LATE, starting
from tests.spark.queues import until_done


def main() -> None:
    job = json.loads(sys.argv[1])
    builder = (
        SparkSession.builder.master(job["master"])
        .config("spark.driver.extraJavaOptions", job["java"])
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        # Within a few micro-batches, generated code costs more to compile than it saves.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    )
    with starting():
        spark = builder.getOrCreate()
    print("ready", flush=True)
    word = sys.stdin.readline().strip()
    if word == "run":
        run(spark, job["queries"])
    if word == "drain":
        for query in job["queries"]:
            drain(spark, query, job["restarts"])
        for query in job["queries"]:
            show(spark, query)
        spark.stop()


def show(spark: SparkSession, query: dict[str, Any]) -> None:
    """Print the values that Spark reads from a Parquet sink, according to its log, as a list."""
    if query["kind"] == "parquet":
        files = spark.read.parquet(query["out"]).orderBy("sequence", "index")
        print(json.dumps([row["value"] for row in files.select("value").collect()]), flush=True)


NOT_OURS = (LATE, "Task serialization failed: java.lang.IllegalStateException: Illegal size")
"""Failures of Spark itself. The second one happens if two queries in one session change a
collection of the JVM while a task that refers to it is serialized, about once in 100 runs."""


def is_ours(error: Exception) -> bool:
    return not any(end in str(error) for end in NOT_OURS)


def run(spark: SparkSession, queries: list[dict[str, Any]]) -> None:
    running = [start(spark, settings) for settings in queries]
    while True:
        for index, query in enumerate(running):
            error = query.exception()
            if error is not None:
                if is_ours(error):
                    raise error
                running[index] = start(spark, queries[index])
        time.sleep(0.2)


def start(spark: SparkSession, query: dict[str, Any], *, available_now: bool = False) -> Any:
    frame = lines(spark, query) if query["kind"] == "lines" else queue(spark, query)
    if query["pause"]:
        frame = frame.withColumn("value", paused(query["pause"])("value"))
    writer = frame.writeStream
    out = query["out"]
    if query["kind"] == "sqlite":
        writer = writer.foreachBatch(SqliteSink(out))
    elif query["kind"] == "parquet":
        writer = writer.format("parquet").option("path", out)
    elif query["kind"] == "topic":
        keyed = frame.selectExpr("value", "substring_index(value, '/', 1) AS key")
        writer = keyed.writeStream.format("opendata-buffer").option("path", out)
        writer = writer.option("partitioner", "rendezvous")
    elif hasattr(datasource, "DataSourceStreamArrowWriter"):
        writer = frame.select("value").writeStream.format("opendata-buffer").option("path", out)
    else:
        from buffer_sink import foreach_batch_writer

        to_buffer = foreach_batch_writer(out, txn_app_id=Path(query["checkpoint"]).name)
        writer = frame.select("value").writeStream.foreachBatch(to_buffer)
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.option("checkpointLocation", query["checkpoint"]).start()


def queue(spark: SparkSession, query: dict[str, Any]) -> DataFrame:
    """Read a buffer."""
    return (
        spark.readStream.format("opendata-buffer")
        .schema("value STRING, sequence BIGINT, index INT")
        .options(**query["options"])
        .load(query["store"])
    )


def lines(spark: SparkSession, query: dict[str, Any]) -> DataFrame:
    """Read lines of text files. Each file is a micro-batch that two tasks write."""
    reader = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
    return reader.text(query["store"]).repartition(2)


def drain(spark: SparkSession, query: dict[str, Any], restarts: int) -> None:
    """Drain the queues. Restart a query whose Python processes were killed."""
    while True:
        try:
            until_done(
                query["checkpoint"],
                lambda: start(spark, query, available_now=True).awaitTermination(),
            )
            return
        except Exception as error:
            restarts -= is_ours(error)
            if restarts < 0:
                raise
            print("restart after", type(error).__name__, str(error)[:300], flush=True)


def paused(seconds: float) -> Any:
    """Return a slow Python function of one column."""

    def same(value: str) -> str:
        time.sleep(seconds)
        return value

    return udf(same, "string")


class SqliteSink:
    """Writes rows and the micro-batch's id in one transaction, and skips a known micro-batch.

    This also works with two drivers at the same time.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        rows = [tuple(row) for row in frame.select("value", "sequence", "index").collect()]
        with closing(sqlite3.connect(self.path, timeout=120, isolation_level=None)) as database:
            database.execute("begin immediate")
            found = database.execute("select 1 from batches where id = ?", (batch_id,)).fetchone()
            if found is None:
                database.executemany("insert into rows values (?, ?, ?)", rows)
                database.execute("insert into batches values (?)", (batch_id,))
            database.execute("commit")
        # Time to be killed between this commit and Spark's commit, which a sink must survive.
        time.sleep(0.2)


if __name__ == "__main__":
    main()
