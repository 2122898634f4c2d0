"""A job that loads the queued batches into a table and then ends.

    python load_orders.py --queue /tmp/orders --table orders --checkpoint /tmp/checkpoint

On Databricks resources/load_orders.job.yml starts it every ten minutes.
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

from pyspark_opendata_buffer import register


def load(
    spark: SparkSession, queue: str, table: str, checkpoint: str, credential: str | None = None
) -> None:
    """Append the queued orders to the table, each order once, even if a run is killed."""
    register(spark)  # plans for all cores of the cluster
    reader = spark.readStream.format("opendata-buffer").schema(
        "value STRING, sequence BIGINT, index INT, ingestion_time TIMESTAMP"
    )
    if credential:
        reader = reader.option("serviceCredential", credential)
    orders = reader.load(queue).selectExpr(
        "from_json(value, 'id BIGINT, amount DOUBLE') AS parsed", "sequence", "ingestion_time"
    )
    query = (
        orders.selectExpr("parsed.id", "parsed.amount", "sequence", "ingestion_time")
        .writeStream.option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .toTable(table)
    )
    query.awaitTermination()


def main() -> None:
    """Read the arguments and load."""
    arguments = argparse.ArgumentParser(description=__doc__)
    for name in ("queue", "table", "checkpoint"):
        arguments.add_argument(f"--{name}", required=True)
    arguments.add_argument("--service-credential")
    given = arguments.parse_args()
    spark = SparkSession.builder.getOrCreate()
    load(spark, given.queue, given.table, given.checkpoint, given.service_credential)


if __name__ == "__main__":
    main()
