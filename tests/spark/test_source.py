"""The streaming source in a real session: discovery, columns, limits, triggers, errors."""

from __future__ import annotations

import datetime
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from chispa import assert_df_equality
from pyspark.errors import StreamingQueryException

from opendata_buffer import Producer
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.formats.batch import Compression
from opendata_buffer.quarantine import list_quarantine, read_copy
from opendata_buffer.queue.ownership import change_grace_period
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from tests.spark.queues import (
    FORMAT,
    LONG_S,
    TELLS,
    Query,
    logged,
    manifest,
    numbered,
    produce,
    queued,
    until_done,
)
from tests.unit.broker.local import eventually
from tests.unit.cli import shell

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def stream(spark: SparkSession, store: str, **options: str) -> Any:
    return spark.readStream.format(FORMAT).options(gcEnabled="false", **options)


def test_the_format_is_found_without_registration(spark: SparkSession, store: str) -> None:
    frame = spark.readStream.format("OpenData-Buffer").load(store)
    assert frame.isStreaming
    assert frame.schema.simpleString() == (
        "struct<value:binary,metadata:binary,sequence:bigint,index:int,ingestion_time:timestamp>"
    )
    # Loading does not read: it creates no queue and fences no consumer.
    assert list(Path(store).iterdir()) == []


def test_rows_columns_and_order(spark: SparkSession, store: str) -> None:
    # Two calls become one batch, however late the second call is.
    config = ProducerConfig(store=store, compression=Compression.ZSTD, flush_interval_ms=60_000)
    with Producer(config) as producer:
        producer.produce([b"a", b"b"], b"first")
        producer.produce([b"c"], b"")
        producer.flush()
        producer.produce([b""], b"second")
    entries = manifest(store).entries()
    times = [
        datetime.datetime.fromtimestamp(metadata.ingestion_time_ms / 1000, tz=datetime.UTC)
        for entry in entries
        for metadata in entry.metadata
    ]
    frame = (
        stream(spark, store)
        .schema(
            "value BINARY, metadata BINARY, sequence LONG, index INT, ingestion_time TIMESTAMP, "
            "location STRING"
        )
        .load(store)
    )
    writer = frame.writeStream.format("memory").queryName("rows").trigger(availableNow=True)
    assert writer.start().awaitTermination(LONG_S)
    got = spark.table("rows")
    one, two = (entry.location for entry in entries)
    expected = spark.createDataFrame(
        [
            (bytearray(b"a"), bytearray(b"first"), 0, 0, times[0], one),
            (bytearray(b"b"), bytearray(b"first"), 0, 1, times[0], one),
            (bytearray(b"c"), bytearray(b""), 0, 2, times[1], one),
            (bytearray(b""), bytearray(b"second"), 1, 0, times[2], two),
        ],
        got.schema,
    )
    assert_df_equality(got, expected)


def test_available_now_with_limits_reads_all_in_several_batches_and_empties_the_queue(
    query: Query, store: str
) -> None:
    produce(store, numbered(0, 7))
    run = query.available_now(maxBatchesPerTrigger="3")
    assert query.sink.batches == [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6])]
    assert queued(store) == []
    if TELLS:
        reports = [
            json.loads(progress["sources"][0]["latestOffset"]) for progress in run.recentProgress
        ]
        assert [each["backlogBatches"] for each in reports[:3]] == [4, 1, 0]
        assert reports[0]["lagMs"] > 0
        assert reports[0]["source"] == f"file://{store}/ingest/manifest"


def test_an_idle_query_acknowledges_its_last_batch(query: Query, store: str) -> None:
    with query.running(createIfMissing="true") as run:  # The query may start before the producer.
        for number in range(3):
            produce(store, numbered(number, number + 1))
            run.processAllAvailable()
            assert query.sink.values == list(range(number + 1)), (
                "a batch was acknowledged too early"
            )
        eventually(lambda: queued(store) == [])


def test_asynchronous_progress_tracking_is_safe(
    spark: SparkSession, store: str, checkpoint: str
) -> None:
    """The commit log lags, so batches that may be replayed after a crash must still be queued."""
    produce(store, numbered(0, 1))
    frame = stream(spark, store, maxBatchesPerTrigger="1").load(store)
    writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
    writer = writer.option("asyncProgressTrackingEnabled", "true")
    # Only the first batch is logged at once. Later ones are in memory for a minute.
    writer = writer.option("asyncProgressTrackingCheckpointIntervalMs", "60000")
    run = writer.start()
    try:
        for number in range(1, 5):
            produce(store, numbered(number, number + 1))
            eventually(lambda: read_through(run) == number + 1)  # noqa: B023
        # Several idle triggers, each of which would acknowledge in a normal query.
        time.sleep(1)
        assert queued(store)[-4:] == [1, 2, 3, 4]
    finally:
        run.stop()
    newest = str(logged(checkpoint, "offsets")[-1])
    last = (Path(checkpoint) / "offsets" / newest).read_text().splitlines()[-1]
    assert queued(store)[0] <= json.loads(last)["partitions"]["0"]["next"]
    # After a restart, everything since the log's last entry can still be read.
    again = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
    again = again.trigger(availableNow=True)
    assert until_done(checkpoint, lambda: again.start().awaitTermination(LONG_S))
    assert queued(store) == []


def read_through(run: Any) -> int:
    progress = run.lastProgress
    end = progress and progress["sources"][0]["endOffset"]
    # Spark 4.0 shows it as a Scala map.
    found = re.search(r"\bnext\W+(\d+)", end or "")
    return int(found[1]) if found else -1


def test_a_second_query_fences_the_first_and_status_names_the_reader(
    query: Query, spark: SparkSession, store: str, tmp_path: Path
) -> None:
    def consumer() -> dict[str, Any]:
        status = json.loads(shell.ok("status", store, "--json").stdout)
        return dict(status["consumer"] or {"query": None})

    produce(store, numbered(0, 1))
    with query.running() as first:
        first.processAllAvailable()
        eventually(lambda: consumer()["query"] == str(first.id))  # recorded in the background
        before = consumer()
        assert (before["epoch"], before["program"]) == (1, "Spark")
        assert before["host"] == os.uname().nodename
        os.kill(before["process"], 0)  # the process runs
        other = Query(spark, store, str(tmp_path / "other"))
        with other.running() as second:
            second.processAllAvailable()
            with pytest.raises(StreamingQueryException, match=r"fenced by epoch 2.*queue twice"):
                first.awaitTermination(LONG_S)
            eventually(lambda: consumer()["query"] == str(second.id))
            after = consumer()
            assert after["epoch"] == 2
            assert after["process"] != before["process"]
            assert after["since_ms"] >= before["since_ms"]
            produce(store, numbered(1, 2))
            second.processAllAvailable()
    assert other.sink.values == [0, 1]


def test_a_self_join_fails_with_an_alternative_that_works(query: Query, store: str) -> None:
    produce(store, numbered(0, 3))
    once = stream(query.spark, store).load(store)
    twice = once.alias("a").join(once.alias("b"), "sequence").select("a.value")
    run = twice.writeStream.format("noop").start()
    try:
        with pytest.raises(
            StreamingQueryException, match=r"joined with itself.*Join within foreachBatch"
        ):
            run.awaitTermination(LONG_S)
    finally:
        run.stop()
    joined: list[int] = []

    def join(batch: DataFrame, batch_id: int) -> None:
        both = batch.alias("a").join(batch.alias("b"), "sequence")
        joined.extend(sorted(row["sequence"] for row in both.collect()))

    run = once.writeStream.foreachBatch(join).trigger(availableNow=True).start()
    assert run.awaitTermination(LONG_S)
    assert joined == [0, 1, 2]


def test_a_union_of_a_dataframe_with_itself_reads_new_batches_while_the_query_runs(
    query: Query, store: str
) -> None:
    produce(store, numbered(0, 2))
    once = stream(query.spark, store).load(store)
    run = once.union(once).writeStream.foreachBatch(query.sink).start()
    try:
        for number in range(2, 5):
            run.processAllAvailable()
            produce(store, numbered(number, number + 1))
        run.processAllAvailable()
    finally:
        run.stop()
    assert sorted(query.sink.values) == sorted([0, 1, 2, 3, 4] * 2)


def test_a_corrupt_batch_is_quarantined_and_the_query_continues(query: Query, store: str) -> None:
    produce(store, numbered(0, 4))
    victim = Path(store) / manifest(store).entries()[1].location
    bad = b"not a batch" * 9
    victim.write_bytes(bad)
    with pytest.raises(StreamingQueryException, match=r"batch 1 at .* corruptBatches"):
        query.available_now()
    run = query.available_now(corruptBatches="quarantine")
    assert query.sink.values == [0, 2, 3]
    assert queued(store) == []
    (report,) = list_quarantine(open_store(store), "ingest")
    assert (report.sequence, report.query) == (1, str(run.id))
    assert read_copy(open_store(store), "ingest", report) == bad


def test_sql_reads_a_view_of_a_queue_and_makes_no_table(spark: SparkSession, store: str) -> None:
    produce(store, numbered(0, 3))
    using = f"USING `opendata-buffer` OPTIONS (path '{store}')"
    advice = r"not a table of a catalog.* use CREATE TEMPORARY VIEW name USING `opendata-buffer`"
    with pytest.raises(Exception, match=advice):
        spark.sql(f"CREATE TABLE queued {using}")
    # With given columns, Spark does not ask the source before the first query.
    spark.sql(f"CREATE TABLE queued (value STRING) {using}")
    rows = spark.range(2).selectExpr("CAST(id AS STRING) AS value").write.format(FORMAT)
    rows.option("path", store).saveAsTable("saved")
    assert len(queued(store)) > 3  # the write succeeded
    try:
        for table in ("queued", "saved"):
            for query in (f"SELECT count(*) FROM {table}", f"INSERT INTO {table} VALUES ('x')"):
                with pytest.raises(Exception, match=advice):
                    spark.sql(query).collect()
    finally:
        spark.sql("DROP TABLE queued")
        spark.sql("DROP TABLE saved")
    with pytest.raises(Exception, match="UNSUPPORTED_DATASOURCE_FOR_DIRECT_QUERY"):
        spark.sql(f"SELECT * FROM `opendata-buffer`.`{store}`")
    spark.sql(f"CREATE TEMPORARY VIEW seen {using}")
    assert spark.sql("SELECT count(*) FROM seen").first()[0] == 5  # type: ignore[index]


def test_the_driver_collects_garbage(query: Query, store: str) -> None:
    produce(store, numbered(0, 3))
    query.available_now()
    time.sleep(0.01)
    produce(store, numbered(3, 4))
    assert len(list((Path(store) / "ingest").glob("*.batch"))) == 4
    config = QueueConfig(store=store)
    change_grace_period(open_store(store), config, SystemRuntime(), 1)
    with query.running(gcEnabled="true") as run:
        run.processAllAvailable()
        eventually(lambda: len(list((Path(store) / "ingest").glob("*.batch"))) <= 1)


def test_processes_that_spark_starts_load_the_compiled_pyspark(spark: SparkSession) -> None:
    def loaded(_: int) -> str:
        return str(pyspark.__file__)

    assert spark.sparkContext.parallelize([0], 1).map(loaded).collect() == [pyspark.__file__]
