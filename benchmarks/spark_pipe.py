"""From a topic through a stateless query into a topic: SPARK-56543's shape, ours beside Kafka.

Spark's own benchmark of real-time mode feeds a stateless query with 1,000 records a second over
five partitions. Here one process sends records at that pace, a query changes each and writes it to
another topic with five partitions, and a consumer reads that one. Latency is from the call that
sends a record until the consumer has what became of it. Both run in micro-batches that follow one
another without a pause (``processingTime="0 seconds"``), as no Python source has real-time mode.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kafka import client, fill
from benchmarks.latency import (
    PATIENCE_S,
    age_ms,
    beside,
    in_turns,
    p99,
    stamped,
    taken_from_kafka,
    taken_from_topic,
)
from benchmarks.producers import paced
from benchmarks.table import Row
from opendata_buffer import Topic, TopicProducer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 5
RECORDS_S = 1_000
SECONDS, WARM_S = 15.0, 8.0  # the first micro-batches compile and start workers
ROUNDS = 3
WARM_UP = 1  # rounds that do not count: a session's first micro-batch takes seconds
FLUSH_MS = 50
"""Of ours: a batch is an object, and five partitions make a hundred a second. Kafka's client sends
after 5 ms, its default."""
CHANGED = "CAST(concat(CAST(value AS STRING), '-done') AS BINARY) AS value"


def produce_ours(directory: str) -> None:
    """One process."""
    with TopicProducer(directory, flush_interval_ms=FLUSH_MS) as producer:
        paced(RECORDS_S, SECONDS + WARM_S, lambda: producer.send(stamped()))


def produce_kafka(address: str, topic: str) -> None:
    """One process."""
    producer = client().Producer({"bootstrap.servers": address})
    producer.list_topics(topic, PATIENCE_S)  # connecting is not what is measured

    def call() -> None:
        producer.produce(topic, stamped())
        producer.poll(0)

    paced(RECORDS_S, SECONDS + WARM_S, call)
    producer.flush(PATIENCE_S)


def ours(spark: SparkSession) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-", ignore_cleanup_errors=True) as home:
        source, target = f"{home}/source", f"{home}/target"
        for directory in (source, target):
            Topic.create(directory, PARTITIONS)
        frame = spark.readStream.format("opendata-buffer").load(source)
        with taken_from_topic(target, 0.05) as take:
            produce = partial(beside, produce_ours, source)
            return _delays(frame, "opendata-buffer", {"path": target}, home, produce, take)


def kafka(spark: SparkSession, address: str) -> list[float]:
    source, target = (f"{name}-{time.monotonic_ns()}" for name in ("source", "target"))
    for topic in (source, target):
        fill(address, topic, PARTITIONS, [], 0)
    options = {
        "kafka.bootstrap.servers": address,
        "subscribe": source,
        "startingOffsets": "earliest",
    }
    frame = spark.readStream.format("kafka").options(**options).load()
    home = tempfile.TemporaryDirectory(prefix="buffer-bench-", ignore_cleanup_errors=True)
    with home as directory, taken_from_kafka(address, target, 0.005, joined=False) as take:
        sink = {"kafka.bootstrap.servers": address, "topic": target}
        produce = partial(beside, produce_kafka, address, source)
        return _delays(frame, "kafka", sink, directory, produce, take)


def _delays(
    frame: DataFrame,
    sink: str,
    options: dict[str, str],
    home: str,
    produce: Callable[[], Any],
    take: Callable[[], list[bytes]],
) -> list[float]:
    """Milliseconds of each record, without those of the warm-up."""
    wanted = int(RECORDS_S * (SECONDS + WARM_S))
    found: list[float] = []
    query = (
        frame.selectExpr(CHANGED)
        .writeStream.format(sink)
        .options(**options)
        .option("checkpointLocation", str(Path(home, "checkpoint")))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        producing = produce()
        until = time.monotonic() + SECONDS + WARM_S + PATIENCE_S
        while len(found) < wanted:
            records = take()
            assert all(record.endswith(b"-done") for record in records)
            found += [age_ms(record) for record in records]
            if not query.isActive or time.monotonic() > until:
                raise RuntimeError(f"{len(found)} of {wanted} came: {query.exception()}")
        producing.join(PATIENCE_S)
    finally:
        query.stop()
    return found[int(RECORDS_S * WARM_S) :]


def rows(spark: SparkSession, address: str) -> Iterator[Row]:
    """Ours and Kafka's connector in turns."""
    measures: dict[str, Callable[[], list[float]]] = {
        "ours": partial(ours, spark),
        "Kafka": partial(kafka, spark, address),
    }
    for name, found in in_turns(measures, WARM_UP + ROUNDS).items():
        rounds = found[WARM_UP:]
        middle = sorted(sorted(each)[len(each) // 2] for each in rounds)
        most = sorted(map(p99, rounds))
        yield Row(
            f"stateless query, {RECORDS_S:,} records/s, {PARTITIONS} partitions, topic to topic: "
            f"{name}",
            f"p50 {middle[len(middle) // 2]:.0f} ms, p99 {most[len(most) // 2]:.0f} ms",
            detail=f"p99 {most[0]:.0f} to {most[-1]:.0f} in {len(rounds)} rounds",
        )
