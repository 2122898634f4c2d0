from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from buffer_sink import foreach_batch_writer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.stores.open import open_store
from tests.spark.written import Queued, drain, filtered, queued, records

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = "opendata-buffer"


class Pipe:
    """Text files in, a buffer out; each file is a micro-batch."""

    def __init__(self, spark: SparkSession, store: str, checkpoint: str, home: Path) -> None:
        self.spark = spark
        self.store = store
        self.checkpoint = Path(checkpoint)
        self.input = home / "input"
        self.input.mkdir()
        self.options: dict[str, str] = {}
        self.files = 0

    def feed(self, *lines: str) -> None:
        path = self.input / f"{self.files:05}.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        # The file source takes them by modification time.
        os.utime(path, (1_700_000_000 + self.files, 1_700_000_000 + self.files))
        self.files += 1

    @property
    def frame(self) -> DataFrame:
        reader = self.spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
        return reader.text(str(self.input))

    def run(self, frame: DataFrame | None = None, mode: str = "append") -> None:
        """Everything there is, then stop. Raises what the query fails with."""
        frame = self.frame if frame is None else frame
        query = (
            frame.writeStream.format(FORMAT)
            .outputMode(mode)
            .options(**self.options)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start(self.store)
        )
        query.awaitTermination()

    def forget_commit(self, batch: int) -> None:
        """As if the driver died after the sink's commit, before Spark's."""
        (self.checkpoint / "commits" / str(batch)).unlink()

    @property
    def app(self) -> str:
        (only,) = (Path(self.store) / "ingest").glob("app=*")
        return only.name.removeprefix("app=")

    def forget_record(self) -> None:
        """As if it died before it wrote the commit record."""
        # The next driver has new workers. Here they are reused, and what one remembers of the
        # queue belongs to its options.
        self.options = {"uploadConcurrency": "3"}
        (Path(self.store) / "ingest" / f"app={self.app}" / "_commit.json").unlink()


@pytest.fixture
def pipe(spark: SparkSession, store: str, checkpoint: str, tmp_path: Path) -> Pipe:
    return Pipe(spark, store, checkpoint, tmp_path)


def versions(batches: list[Queued]) -> list[int]:
    return [each.transaction.batch for each in batches if each.transaction is not None]


def test_every_micro_batch_is_a_transaction(pipe: Pipe) -> None:
    pipe.feed("a", "b")
    pipe.feed("c")
    pipe.feed("d", "e", "f")
    pipe.run()
    batches = queued(pipe.store)
    assert records(batches) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert [each.transaction for each in batches] == [
        Transaction(pipe.app, batch) for batch in range(3)
    ]


def test_a_restart_goes_on_after_the_last_batch(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.run()
    pipe.feed("b")
    pipe.run()
    batches = queued(pipe.store)
    assert records(batches) == [b"a", b"b"]
    assert versions(batches) == [0, 1]


def test_no_data_appends_nothing(pipe: Pipe) -> None:
    pipe.feed()
    pipe.run()
    assert open_store(pipe.store).list("").objects == ()


def test_a_micro_batch_of_several_tasks_is_one_group(pipe: Pipe) -> None:
    pipe.feed(*(str(number) for number in range(20)))
    pipe.run(pipe.frame.repartition(2))
    batches = queued(pipe.store)
    assert versions(batches) == [0, 0]
    assert sorted(map(int, records(batches))) == list(range(20))


def test_a_driver_that_died_before_spark_s_commit_repeats_nothing(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.feed("b")
    pipe.run()
    pipe.forget_commit(1)
    pipe.feed("c")
    pipe.run()
    batches = queued(pipe.store)
    assert records(batches) == [b"a", b"b", b"c"]
    assert versions(batches) == [0, 1, 2]


def test_a_driver_that_died_before_the_record_repeats_nothing(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.run()
    pipe.forget_commit(0)
    pipe.forget_record()
    pipe.run()
    assert records(queued(pipe.store)) == [b"a"]


def test_what_was_dequeued_meanwhile_is_not_repeated(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.run()
    assert records(drain(pipe.store)) == [b"a"]
    pipe.forget_commit(0)
    pipe.run()
    assert queued(pipe.store) == []


def test_what_slips_through_is_caught_by_the_reader_s_filter(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.run()
    taken = drain(pipe.store)
    pipe.forget_commit(0)
    pipe.forget_record()
    pipe.feed("b")
    pipe.run()
    taken += queued(pipe.store)
    assert records(taken) == [b"a", b"a", b"b"]
    assert filtered(taken) == [b"a", b"b"]


def test_a_commit_that_failed_is_made_by_the_next_run(pipe: Pipe) -> None:
    marker = Path(pipe.store) / "ingest" / "_owner.json"
    marker.parent.mkdir()
    marker.write_text('{"version": 1, "manifest": "other"}')
    pipe.feed("a")
    with pytest.raises(PySparkException, match="belongs to the queue with manifest 'ingest/other'"):
        pipe.run()
    uploaded = list(Path(pipe.store).rglob("*.batch"))
    assert len(uploaded) == 1
    marker.unlink()
    pipe.run()
    assert records(queued(pipe.store)) == [b"a"]
    # abort deleted nothing: what failed is an orphan for the collector.
    assert uploaded[0].exists()


def test_two_queries_write_into_one_buffer(pipe: Pipe) -> None:
    pipe.feed("a")
    pipe.run()
    pipe.checkpoint = pipe.checkpoint.with_name("second")
    pipe.run()
    batches = queued(pipe.store)
    assert records(batches) == [b"a", b"a"]
    assert len({each.transaction for each in batches}) == 2


def test_a_deleted_checkpoint_is_refused_under_the_same_app_id_and_loses_nothing(
    pipe: Pipe,
) -> None:
    pipe.options = {"txnAppId": "one"}
    pipe.feed("a")
    pipe.run()
    shutil.rmtree(pipe.checkpoint)
    # Batch ids begin at 0 again, so all of them would be taken for repeats.
    pipe.feed("b")
    with pytest.raises(PySparkException, match=r"txnAppId 'one' belongs to query .* of its own"):
        pipe.run()
    assert records(queued(pipe.store)) == [b"a"]
    pipe.options = {"txnAppId": "two"}
    pipe.run()
    assert records(queued(pipe.store)) == [b"a", b"a", b"b"]


def test_f5_a_micro_batch_of_three_grace_periods_gets_through_beside_a_collector(
    pipe: Pipe,
) -> None:
    from pyspark.sql.functions import udf

    grace_ms = 2_000
    uploads = Path(pipe.store) / "ingest"

    def uploaded() -> list[Path]:
        found = uploads.glob("app=*/batch=0/*.batch")
        return [each for each in found if "app=first" not in each.parts]

    @udf("string")
    def slow(value: str) -> str:
        if value == "slow":
            # From when the other task is done: a busy machine may start it late.
            until = time.monotonic() + 120
            while not uploaded() and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(3.2 * grace_ms / 1000)
        return value

    # One task is done at once and its upload waits for the other; "a" and "slow" differ in hash.
    pipe.feed("a", "b", "c", "d", "slow")
    pipe.options = {"gcGracePeriodMs": str(grace_ms)}
    gc = GarbageCollectorConfig(grace_period_ms=grace_ms, interval_ms=200)
    config = ConsumerConfig(store=pipe.store, gc=gc)
    collector = GarbageCollector(open_store(pipe.store), config)
    # A queue must be there for the collector to compare with.
    foreach_batch_writer(pipe.store, txn_app_id="first")(
        pipe.spark.createDataFrame([("first",)], "value STRING"), 0
    )
    collector.start()
    began = time.monotonic()
    try:
        pipe.run(pipe.frame.repartition(2, "value").select(slow("value").alias("value")))
    finally:
        collector.stop()
    assert time.monotonic() - began > 3 * grace_ms / 1000
    batches = queued(pipe.store)
    assert sorted(records(batches)) == [b"a", b"b", b"c", b"d", b"first", b"slow"]
    uploaded_ms = [(Path(pipe.store) / each.location).stat().st_mtime * 1000 for each in batches]
    assert max(uploaded_ms[1:]) - min(uploaded_ms[1:]) > 3 * grace_ms, "the first upload waited"


def test_complete_mode_is_refused(pipe: Pipe) -> None:
    pipe.feed("a")
    counts = pipe.frame.groupBy("value").count().select("value")
    with pytest.raises(PySparkException, match="output mode complete cannot be written"):
        pipe.run(counts, mode="complete")


def test_update_mode_is_refused_by_spark(pipe: Pipe) -> None:
    pipe.feed("a")
    with pytest.raises(PySparkException, match="does not support Update mode"):
        pipe.run(mode="update")


def test_a_wrong_column_shows_the_fix(pipe: Pipe) -> None:
    pipe.feed("a")
    with pytest.raises(PySparkException, match=r"column 'n' .int. cannot.*to_json"):
        pipe.run(pipe.frame.selectExpr("value", "1 AS n"))


def test_from_buffer_to_buffer(pipe: Pipe, tmp_path: Path) -> None:
    origin = str(tmp_path / "origin")
    for batch in range(3):
        frame = pipe.spark.range(100 * batch, 100 * batch + 100, 1, 2)
        frame = frame.selectExpr(
            "CAST(id AS STRING) AS value", "CAST(id DIV 40 AS STRING) AS metadata"
        )
        frame.write.format(FORMAT).mode("append").save(origin)
        reader = pipe.spark.readStream.format(FORMAT).option("maxBatchesPerTrigger", 1)
        pipe.run(reader.load(origin).select("value", "metadata"))
    batches = queued(pipe.store)
    assert records(batches) == [str(number).encode() for number in range(300)]
    payloads = [each.payload for batch in batches for each in batch.metadata]
    assert sorted({int(payload) for payload in payloads}) == list(range(8))
