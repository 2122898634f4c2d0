"""A pipeline: orders from a log into a streaming table, and the large ones into a queue.

On Databricks resources/orders.pipeline.yml runs it, elsewhere ../../pipelines/spark-pipeline.yml.

One flow reads the log by a name, and the others read the table. Both ends remember how far they are
in the pipeline's storage: a run that was killed goes on, and no order is twice in the table or in
the queue.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from pyspark_opendata_buffer import register

spark = SparkSession.active()

# Set on Databricks only. Open-source Spark finds the format by itself, and its spark-pipelines 4.3
# fails in a session that registered one: UNKNOWN_RESPONSE.
if spark.conf.get("orders.register", "") == "true":
    register(spark)

# Set on Databricks only. Without a reader, the pipeline is the consumer of a queue.
READER = spark.conf.get("orders.reader", "")
GIVEN = {
    "serviceCredential": spark.conf.get("orders.service_credential", ""),
    "region": spark.conf.get("orders.region", ""),
}
OPTIONS = {name: value for name, value in GIVEN.items() if value}

# The last column has the text of a record that is not an order.
ORDER = "id BIGINT, amount DOUBLE, _corrupt_record STRING"

dp.create_sink(
    "large_orders",
    "opendata-buffer",
    {"path": str(spark.conf.get("orders.large")), "txnAppId": "large-orders", **OPTIONS},
)


@dp.table
def orders() -> DataFrame:
    """Every order, as the log has it."""
    stream = (
        spark.readStream.format("opendata-buffer")
        .schema("value STRING, sequence BIGINT, index INT, ingestion_time TIMESTAMP")
        .options(createIfMissing="true", **({"reader": READER} if READER else {}), **OPTIONS)
        .load(str(spark.conf.get("orders.queue")))
    )
    return stream.selectExpr(
        f"from_json(value, '{ORDER}') AS parsed", "sequence", "ingestion_time"
    ).selectExpr("parsed.*", "sequence", "ingestion_time")


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """Orders of 100 and more, as JSON."""
    return (
        spark.readStream.table("orders")
        .where("amount >= 100")
        .selectExpr("to_json(struct(id, amount)) AS value")
    )
