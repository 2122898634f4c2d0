"""Streams of text into a buffer, with the sink and with a function for ``foreachBatch``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chispa import assert_df_equality
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from buffer_sink import foreach_batch_writer
from opendata_buffer.formats.batch import Transaction
from tests.spark.queues import FORMAT, Pipe, drain, filtered, records, written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def app_of(pipe: Pipe) -> str:
    (only,) = (Path(pipe.url) / "ingest").glob("app=*")
    return only.name.removeprefix("app=")


def forget_record(pipe: Pipe) -> None:
    """Undo the commit record, as if the driver had died before it wrote the record."""
    # The next driver would have new workers. Here they are reused, and a worker remembers a queue
    # by its options.
    pipe.options = {"gcGracePeriodMs": "600001"}
    (Path(pipe.url) / "ingest" / f"app={app_of(pipe)}" / "_commit.json").unlink()


def run(pipe: Pipe, way: str, app: str) -> None:
    """Write everything under an application id, with the sink or with a function."""
    if way == "sink":
        pipe.options = {"txnAppId": app}
        pipe.run()
    else:
        pipe.run(each=foreach_batch_writer(pipe.url, txn_app_id=app))


@pytest.mark.parametrize("way", ["sink", "function"])
def test_a_restart_continues_and_a_deleted_checkpoint_is_refused_under_the_same_app_id(
    pipe: Pipe, way: str
) -> None:
    pipe.feed("a", "b")
    pipe.feed("c")
    run(pipe, way, "one")
    pipe.feed("d", "e", "f")
    run(pipe, way, "one")
    batches = written(pipe.url)
    assert records(batches) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert [batch.transaction for batch in batches] == [Transaction("one", n) for n in range(3)]
    shutil.rmtree(pipe.checkpoint)
    # Batch ids begin at 0 again, so all batches would look like repeats.
    with pytest.raises(Exception, match=r"txnAppId 'one' belongs to query .* of its own"):
        run(pipe, way, "one")
    assert len(written(pipe.url)) == 3
    run(pipe, way, "two")
    assert records(written(pipe.url)[3:]) == records(batches)


def test_a_function_that_failed_after_the_write_runs_again_without_a_repeat(
    pipe: Pipe, tmp_path: Path
) -> None:
    to_buffer = foreach_batch_writer(pipe.url, txn_app_id="job", compression="zstd")
    attempts: list[int] = []

    def both(frame: DataFrame, batch: int) -> None:
        to_buffer(frame.selectExpr("to_json(struct(*)) AS value"), batch)
        attempts.append(batch)
        if len(attempts) == 1:
            raise RuntimeError("the write after it failed")
        frame.write.mode("append").parquet(str(tmp_path / "out"))

    pipe.feed("a", "b")
    with pytest.raises(Exception, match="the write after it failed"):
        pipe.run(each=both)
    pipe.run(each=both)
    assert attempts[:2] == [0, 0]
    assert records(written(pipe.url)) == [b'{"value":"a"}', b'{"value":"b"}']
    assert pipe.spark.read.parquet(str(tmp_path / "out")).count() == 2


def test_a_driver_that_died_before_spark_s_commit_or_the_record_repeats_nothing(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.feed("b")
    pipe.run()
    pipe.forget_commit(1)
    pipe.feed("c")
    pipe.run()
    pipe.forget_commit(2)
    forget_record(pipe)
    pipe.run()
    batches = written(pipe.url)
    assert records(batches) == [b"a", b"b", b"c"]
    assert [batch.transaction for batch in batches] == [
        Transaction(app_of(pipe), number) for number in range(3)
    ]


def test_the_reader_s_filter_catches_a_repeat_that_the_sink_appends(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.run()
    taken = drain(pipe.url)
    pipe.forget_commit(0)
    forget_record(pipe)
    pipe.feed("b")
    pipe.run()
    taken += written(pipe.url)
    assert records(taken) == [b"a", b"a", b"b"]
    assert filtered(taken) == [b"a", b"b"]


def test_a_commit_that_failed_is_made_by_the_next_run(pipe: Pipe) -> None:
    folder = Path(pipe.url) / "ingest"
    folder.mkdir()
    (folder / "_owner.json").write_text('{"version": 1, "manifest": "manifest"}')
    (folder / "manifest").write_bytes(b"damaged")
    pipe.feed("a")
    with pytest.raises(PySparkException, match="CorruptManifest"):
        pipe.run()
    uploaded = list(Path(pipe.url).rglob("*.batch"))
    assert len(uploaded) == 1
    (folder / "manifest").unlink()
    pipe.run()
    assert records(written(pipe.url)) == [b"a"]
    # abort deletes nothing, so the uploads of the failed batch are orphans for the collector.
    assert uploaded[0].exists()


def test_f51_a_query_over_another_queue_s_prefix_fails_before_it_uploads(pipe: Pipe) -> None:
    marker = Path(pipe.url) / "ingest" / "_owner.json"
    marker.parent.mkdir()
    marker.write_text('{"version": 1, "manifest": "other"}')
    pipe.feed("a")
    with pytest.raises(PySparkException, match="belongs to the queue with manifest 'ingest/other'"):
        pipe.run()
    assert not list(Path(pipe.url).rglob("*.batch"))


def test_only_append_mode_is_written(pipe: Pipe) -> None:
    pipe.feed("a")
    counts = pipe.frame.groupBy("value").count().select("value")
    with pytest.raises(PySparkException, match="output mode complete cannot be written"):
        pipe.run(counts, mode="complete")
    with pytest.raises(PySparkException, match="does not support Update mode"):
        pipe.run(mode="update")


# ---- batch writes of a session


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr("CAST(id AS STRING) AS value")


def test_two_partitions_become_one_group_in_partition_order(
    spark: SparkSession, store: str
) -> None:
    numbers(spark, 25_000).write.format(FORMAT).mode("append").save(store)
    batches = written(store)
    assert [batch.sequence for batch in batches] == [0, 1]
    assert records(batches) == [str(number).encode() for number in range(25_000)]
    assert [batch.transaction for batch in batches] == [None, None]
    assert all(len(batch.metadata) == 1 for batch in batches)
    assert batches[0].metadata[0].payload == b""
    assert batches[0].metadata[0].ingestion_time_ms > 1_700_000_000_000


def write(frame: DataFrame, store: str, version: int) -> None:
    writer = frame.write.format(FORMAT).mode("append").option("txnAppId", "job-1")
    writer.option("txnVersion", version).save(store)


def test_a_write_with_an_identity_happens_once(spark: SparkSession, store: str) -> None:
    for version in (0, 0, 3, 2, 3):
        write(numbers(spark, 2), store, version)
    batches = written(store)
    assert [batch.transaction for batch in batches] == [
        Transaction("job-1", version) for version in (0, 3)
    ]
    assert records(batches) == [b"0", b"1"] * 2
    assert filtered(batches) == records(batches)
    drain(store)
    write(numbers(spark, 2), store, 3)
    assert written(store) == [], (
        "a repeat is not appended even after a consumer has taken the first"
    )


OF_ALL_TYPES = (
    "CAST(id AS INT) AS number",
    "IF(id % 3 = 0, NULL, concat('tëxt \"', id, chr(10))) AS text",
    "CAST(id * 0.25 AS DOUBLE) AS real",
    "CAST(id * 1.5 AS DECIMAL(20, 3)) AS exact",
    "id % 2 = 0 AS even",
    "DATE '2024-02-29' + CAST(id AS INT) AS day",
    "timestamp_micros(1700000000000000 + id * 1000) AS moment",
    "CAST(timestamp_micros(id * 1000) AS TIMESTAMP_NTZ) AS local",
    "encode(CAST(id AS STRING), 'UTF-8') AS raw",
    "IF(id % 5 = 0, NULL, array(id, NULL)) AS list",
    "named_struct('x', id, 'y', IF(id % 2 = 0, NULL, 'y')) AS inner",
    "map(CAST(id AS STRING), IF(id % 2 = 0, NULL, id)) AS pairs",
)


def test_columns_written_as_json_equal_to_json_and_can_be_read_back(
    spark: SparkSession, store: str
) -> None:
    frame = spark.range(0, 100, 1, 4).selectExpr(*OF_ALL_TYPES)
    writer = frame.write.format(FORMAT).mode("append")
    writer.option("valueFormat", "json").save(store)
    (batch,) = written(store)
    values = spark.createDataFrame([(record.decode(),) for record in batch.records], "value STRING")
    parsed = f.from_json("value", frame.schema).alias("row")
    theirs = frame.select(f.to_json(f.struct("*")).alias("value"))
    expected = theirs.select(parsed).select("row.*")
    assert_df_equality(values.select(parsed).select("row.*"), expected, ignore_nullable=True)
    readable = frame.drop("pairs")  # The source cannot read maps.
    reader = spark.read.format(FORMAT).schema(expected.drop("pairs").schema)
    read = reader.option("valueFormat", "json").load(store)
    assert_df_equality(read, readable, ignore_row_order=False, ignore_nullable=True)
