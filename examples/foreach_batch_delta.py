"""One query, two targets: a Delta table, and a queue for further readers.

    python examples/foreach_batch_delta.py STORE_IN STORE_OUT TABLE CHECKPOINT

reads the queue STORE_IN, writes every order to TABLE, and the large ones to the queue STORE_OUT.
After a failure, Spark calls the function again. Both targets recognise a micro-batch that they
already have: Delta by ``txnAppId`` and ``txnVersion``, the queue by the same two.

In a session without Delta's extension, TABLE is a folder of Parquet files. It has one folder for
each micro-batch, which a repeat overwrites.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession

from buffer_sink import foreach_batch_writer

APP = "orders-v1"
LARGE = 100


def table_writer(spark: SparkSession, table: str) -> Callable[[DataFrame, int], None]:
    """Return a function that writes to the table, and may be called again for a micro-batch."""

    def delta(orders: DataFrame, batch_id: int) -> None:
        writer = orders.write.format("delta").mode("append")
        writer.option("txnAppId", APP).option("txnVersion", batch_id).save(table)

    def parquet(orders: DataFrame, batch_id: int) -> None:
        orders.write.mode("overwrite").parquet(f"{table}/batch={batch_id}")

    has_delta = "io.delta" in (spark.conf.get("spark.sql.extensions", "") or "")
    return delta if has_delta else parquet


def main(spark: SparkSession, source: str, target: str, table: str, checkpoint: str) -> None:
    """Process the queued records, and stop."""
    to_table = table_writer(spark, table)
    to_queue = foreach_batch_writer(target, txn_app_id=APP)

    def both(records: DataFrame, batch_id: int) -> None:
        orders = records.selectExpr("from_json(value, 'id BIGINT, amount DOUBLE') AS o").select(
            "o.*"
        )
        orders.persist()  # Read once, written twice.
        to_table(orders, batch_id)
        large = orders.where(orders.amount >= LARGE)
        to_queue(large.selectExpr("to_json(struct(*)) AS value"), batch_id)
        orders.unpersist()

    records = (
        spark.readStream.format("opendata-buffer")
        .schema("value STRING")
        .option("maxBatchesPerTrigger", 100)
        .load(source)
    )
    query = (
        records.writeStream.queryName("orders")
        .foreachBatch(both)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(SparkSession.builder.appName("orders").getOrCreate(), *sys.argv[1:])
