"""The programs of ``examples/`` that need Spark, run in the session of the tests."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from opendata_buffer import Consumer, ConsumerConfig
from tests.spark.queues import produce, queued

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "foreach_batch_delta.py"
assert EXAMPLE.name == "foreach_batch_delta.py"


def test_the_bundles_job_loads_each_order_once(spark: SparkSession, tmp_path: Path) -> None:
    program = EXAMPLE.parent / "databricks" / "src" / "load_orders.py"
    spec = importlib.util.spec_from_file_location("load_orders", program)
    assert spec is not None
    assert spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    queue, checkpoint = str(tmp_path / "queue"), str(tmp_path / "checkpoint")
    for first in (0, 10):
        orders = range(first, first + 10)
        produce(queue, [[json.dumps({"id": each, "amount": 1.5}).encode() for each in orders]])
        job.load(spark, queue, "loaded_orders", checkpoint)
    rows = spark.table("loaded_orders").select("id", "amount").collect()
    assert sorted((row.id, row.amount) for row in rows) == [(each, 1.5) for each in range(20)]
    spark.sql("DROP TABLE loaded_orders")


def test_foreach_batch_writes_each_order_once_to_table_and_queue(
    spark: SparkSession, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("foreach_batch_delta", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    source, target, table, checkpoint = (
        str(tmp_path / name) for name in ("in", "out", "table", "checkpoint")
    )
    orders = [{"id": number, "amount": number * 10.0} for number in range(20)]
    records = [json.dumps(order).encode() for order in orders]

    produce(source, [records[:7], records[7:12]])
    example.main(spark, source, target, table, checkpoint)
    produce(source, [records[12:]])
    example.main(spark, source, target, table, checkpoint)

    rows = spark.read.parquet(table).select("id", "amount").collect()
    assert sorted((row.id, row.amount) for row in rows) == [(n, n * 10.0) for n in range(20)]
    assert queued(source) == []
    large = []
    with Consumer(ConsumerConfig(store=target)) as consumer:
        while batch := consumer.next_batch():
            large += [json.loads(record) for record in batch.entries]
            consumer.ack(batch.sequence)
    assert sorted(order["id"] for order in large) == list(range(10, 20))
