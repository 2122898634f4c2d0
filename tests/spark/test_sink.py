"""Streams of text into a buffer, as a sink and as a function for ``foreachBatch``."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from buffer_sink import foreach_batch_writer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.formats.batch import Transaction
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.stores.open import open_store
from tests.spark.queues import Pipe, drain, filtered, records, written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def app_of(pipe: Pipe) -> str:
    (only,) = (Path(pipe.url) / "ingest").glob("app=*")
    return only.name.removeprefix("app=")


def forget_record(pipe: Pipe) -> None:
    """As if the driver died before it wrote the commit record."""
    # The next driver has new workers. Here they are reused, and what one remembers of the
    # queue belongs to its options.
    pipe.options = {"gcGracePeriodMs": "600001"}
    (Path(pipe.url) / "ingest" / f"app={app_of(pipe)}" / "_commit.json").unlink()


def run(pipe: Pipe, way: str, app: str) -> None:
    """Write all there is under an application's id, as a sink or as a function."""
    if way == "sink":
        pipe.options = {"txnAppId": app}
        pipe.run()
    else:
        pipe.run(each=foreach_batch_writer(pipe.url, txn_app_id=app))


@pytest.mark.parametrize("way", ["sink", "function"])
def test_a_restart_goes_on_and_a_deleted_checkpoint_is_refused_under_the_same_app_id(
    pipe: Pipe, way: str
) -> None:
    pipe.feed("a", "b")
    pipe.feed("c")
    run(pipe, way, "one")
    pipe.feed("d", "e", "f")
    run(pipe, way, "one")
    batches = written(pipe.url)
    assert records(batches) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert [each.transaction for each in batches] == [Transaction("one", n) for n in range(3)]
    shutil.rmtree(pipe.checkpoint)
    # Batch ids begin at 0 again, so all of them would be taken for repeats.
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
    assert [each.transaction for each in batches] == [
        Transaction(app_of(pipe), number) for number in range(3)
    ]


def test_what_slips_through_is_caught_by_the_reader_s_filter(pipe: Pipe) -> None:
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
    marker = Path(pipe.url) / "ingest" / "_owner.json"
    marker.parent.mkdir()
    marker.write_text('{"version": 1, "manifest": "other"}')
    pipe.feed("a")
    with pytest.raises(PySparkException, match="belongs to the queue with manifest 'ingest/other'"):
        pipe.run()
    uploaded = list(Path(pipe.url).rglob("*.batch"))
    assert len(uploaded) == 1
    marker.unlink()
    pipe.run()
    assert records(written(pipe.url)) == [b"a"]
    # abort deleted nothing: what failed is an orphan for the collector.
    assert uploaded[0].exists()


def test_f5_a_micro_batch_of_three_grace_periods_gets_through_beside_a_collector(
    pipe: Pipe,
) -> None:
    from pyspark.sql.functions import udf

    grace_ms = 2_000
    uploads = Path(pipe.url) / "ingest"

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
        return value.ljust(70_000)  # more than a task sends to the driver

    # One task is done at once and its upload waits for the other; "a" and "slow" differ in hash.
    pipe.feed("a", "b", "c", "d", "slow")
    pipe.options = {"gcGracePeriodMs": str(grace_ms)}
    gc = GarbageCollectorConfig(interval_ms=200, grace_period_ms=grace_ms)
    config = ConsumerConfig(store=pipe.url, gc=gc)
    collector = GarbageCollector(open_store(pipe.url), config)
    # A queue must be there for the collector to compare with.
    foreach_batch_writer(pipe.url, txn_app_id="first", **pipe.options)(
        pipe.spark.createDataFrame([("first",)], "value STRING"), 0
    )
    collector.start()
    began = time.monotonic()
    try:
        pipe.run(pipe.frame.repartition(2, "value").select(slow("value").alias("value")))
    finally:
        collector.stop()
    assert time.monotonic() - began > 3 * grace_ms / 1000
    batches = written(pipe.url)
    found = sorted(each.strip() for each in records(batches))
    assert found == [b"a", b"b", b"c", b"d", b"first", b"slow"]
    uploaded_ms = [(Path(pipe.url) / each.location).stat().st_mtime * 1000 for each in batches]
    assert max(uploaded_ms[1:]) - min(uploaded_ms[1:]) > 3 * grace_ms, "the first upload waited"


def test_only_append_mode_is_written(pipe: Pipe) -> None:
    pipe.feed("a")
    counts = pipe.frame.groupBy("value").count().select("value")
    with pytest.raises(PySparkException, match="output mode complete cannot be written"):
        pipe.run(counts, mode="complete")
    with pytest.raises(PySparkException, match="does not support Update mode"):
        pipe.run(mode="update")
