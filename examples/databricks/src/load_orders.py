"""A job that loads the waiting batches of a log into a table and then ends.

    python load_orders.py --queue /tmp/orders --table orders --checkpoint /tmp/checkpoint

On Databricks resources/load_orders.job.yml starts it every ten minutes.
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

from pyspark_opendata_buffer import register

ORDER = "id BIGINT, amount DOUBLE, _corrupt_record STRING"
"""The columns of an order. The last one has the text of a record that is not such an order."""


def load(
    spark: SparkSession,
    queue: str,
    table: str,
    checkpoint: str,
    reader: str = "load-orders",
    credential: str | None = None,
    region: str | None = None,
) -> None:
    """Append the waiting orders to the table, each order once, even if a run is killed."""
    register(spark)  # plans for all cores of the cluster
    given = {"reader": reader, "serviceCredential": credential, "region": region}
    orders = (
        spark.readStream.format("opendata-buffer")
        .schema("value STRING, sequence BIGINT, index INT, ingestion_time TIMESTAMP")
        .options(**{name: value for name, value in given.items() if value})
        .option("createIfMissing", "true")  # the first run may be before the first producer
        .load(queue)
        .selectExpr(f"from_json(value, '{ORDER}') AS parsed", "sequence", "ingestion_time")
    )
    query = (
        orders.selectExpr("parsed.*", "sequence", "ingestion_time")
        .writeStream.queryName("load-orders")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .toTable(table)
    )
    query.awaitTermination()


def main() -> None:
    """Read the arguments and load."""
    arguments = argparse.ArgumentParser(description=__doc__)
    for name in ("queue", "table", "checkpoint"):
        arguments.add_argument(f"--{name}", required=True)
    arguments.add_argument("--reader", default="load-orders")
    arguments.add_argument("--service-credential")
    arguments.add_argument("--region")
    given = arguments.parse_args()
    load(
        SparkSession.builder.getOrCreate(),
        given.queue,
        given.table,
        given.checkpoint,
        given.reader,
        given.service_credential,
        given.region,
    )


if __name__ == "__main__":
    main()
