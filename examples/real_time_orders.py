r"""A query in real-time mode from Kafka to a queue, through foreach. Needs Spark 4.3.

    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.3.0 real_time_orders.py \
        --brokers localhost:9092 --topic orders --queue /tmp/orders --checkpoint /tmp/checkpoint

At least once: after a failure, a stop or a kill Spark reads the whole batch that was under way
again, which is as long as its trigger says. The sink of this package has each row once and takes
no real-time mode.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery


class QueueWriter:
    """Writes the rows of one task: the column ``value``, text or bytes."""

    def __init__(self, queue: str) -> None:
        self.queue = queue

    def open(self, partition_id: int, epoch_id: int) -> bool:
        """Start a producer for this task, at the beginning of a batch of real-time mode."""
        from opendata_buffer import Producer, ProducerConfig

        self.producer: Any = Producer(ProducerConfig(store=self.queue, flush_interval_ms=20))
        return True

    def process(self, row: Row) -> None:
        """Give the row to the producer, which stores it within its flush interval."""
        value = row["value"]
        self.producer.produce([value.encode() if isinstance(value, str) else bytes(value)])

    def close(self, error: Exception | None) -> None:
        """Wait until all rows are durable, before Spark records the end of the batch."""
        self.producer.close()


def start(rows: DataFrame, queue: str, checkpoint: str, batch: str = "5 seconds") -> StreamingQuery:
    """Write the rows of a stream as they arrive.

    Spark gives Python full blocks of rows, and the rest when the batch ends.

    Args:
        rows: The stream.
        queue: The store of the queue.
        checkpoint: The folder of the checkpoint.
        batch: The duration of a batch, at least five seconds. A row waits at most this long, and a
            failure repeats rows of this period.

    Returns:
        The running query.
    """
    return (
        rows.writeStream.queryName("real-time-orders")
        .foreach(QueueWriter(queue))
        .outputMode("update")  # Real-time mode accepts no other mode.
        .option("checkpointLocation", checkpoint)
        .trigger(realTime=batch)
        .start()
    )


def main() -> None:
    """Read the arguments and write the values of a Kafka topic."""
    arguments = argparse.ArgumentParser(description=__doc__)
    for name in ("brokers", "topic", "queue", "checkpoint"):
        arguments.add_argument(f"--{name}", required=True)
    given = arguments.parse_args()
    spark = SparkSession.builder.getOrCreate()
    kafka = spark.readStream.format("kafka").option("kafka.bootstrap.servers", given.brokers)
    rows = kafka.option("subscribe", given.topic).load().select("value")
    start(rows, given.queue, given.checkpoint).awaitTermination()


if __name__ == "__main__":
    main()
