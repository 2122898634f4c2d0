"""The programs of ``examples/`` that need Spark, run in the session of the tests."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import DataStreamWriter

from tests.spark.queues import drain, orders, produce, program, queued, records, written
from tests.unit.broker.local import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_bundles_job_loads_each_order_once(spark: SparkSession, tmp_path: Path) -> None:
    job = program(EXAMPLES / "databricks" / "src" / "load_orders.py")
    queue, checkpoint = str(tmp_path / "queue"), str(tmp_path / "checkpoint")
    for first in (0, 10):
        produce(queue, [orders(range(first, first + 10))])
        job.load(spark, queue, "loaded_orders", checkpoint)
    rows = spark.table("loaded_orders").select("id", "amount").collect()
    assert sorted((row.id, row.amount) for row in rows) == [(n, n * 10.0) for n in range(20)]
    spark.sql("DROP TABLE loaded_orders")


def test_foreach_batch_writes_each_order_once_to_table_and_queue(
    spark: SparkSession, tmp_path: Path
) -> None:
    example = program(EXAMPLES / "foreach_batch_delta.py")
    source, target, table, checkpoint = (
        str(tmp_path / name) for name in ("in", "out", "table", "checkpoint")
    )
    for batches in ([orders(range(7)), orders(range(7, 12))], [orders(range(12, 20))]):
        produce(source, batches)
        example.main(spark, source, target, table, checkpoint)
    rows = spark.read.parquet(table).select("id", "amount").collect()
    assert sorted((row.id, row.amount) for row in rows) == [(n, n * 10.0) for n in range(20)]
    assert queued(source) == []
    large = [json.loads(record)["id"] for record in records(drain(target))]
    assert sorted(large) == list(range(10, 20))


@pytest.mark.slow
@pytest.mark.skipif(
    "realTime" not in inspect.signature(DataStreamWriter.trigger).parameters,
    reason="this Spark has no real-time mode",
)
def test_a_query_in_real_time_mode_writes_each_row_at_least_once(
    spark: SparkSession, store: str, tmp_path: Path
) -> None:
    """Its source is Spark's own in memory; the other one for this mode is Kafka."""
    example = program(EXAMPLES / "real_time_orders.py")
    jvm = spark._jvm
    sources = jvm.org.apache.spark.sql.execution.streaming.sources
    stream = sources.LowLatencyMemoryStream.singlePartition(
        spark._jsparkSession, jvm.org.apache.spark.sql.Encoders.STRING()
    )

    def found() -> set[bytes]:
        return set(records(written(store)))

    for fed in (["a", "b"], ["c"]):  # the second query goes on where the first was stopped
        stream.addData(jvm.PythonUtils.toSeq(fed))
        frame = DataFrame(stream.toDF(), spark)
        query = example.start(frame, store, str(tmp_path / "checkpoint"), batch="5 seconds")
        try:
            eventually(lambda last=fed[-1]: last.encode() in found())
            assert query.exception() is None
        finally:
            query.stop()
    assert found() == {b"a", b"b", b"c"}
