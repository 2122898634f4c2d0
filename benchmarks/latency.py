"""How long does a record take from the call that produces it to a consumer, or to a query?

One process produces records at a steady pace, each with the time of its call, and another process
reads them. Both see the same monotonic clock. Our producer waits for the disk before a record
counts as durable. Kafka does not, unless the topic says so. So each of our rows is compared with
the setup that promises the same: a directory on a disk with a topic that is flushed after each
message, and a directory in memory, where there is nothing to wait for, with Kafka's defaults.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from benchmarks import kafka
from benchmarks.measuring import (
    MEMORY,
    age_ms,
    in_turns,
    p99,
    paced,
    sized,
    stamped,
    start_process,
)
from benchmarks.stores import NO_COLLECTOR
from benchmarks.tables import Row
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig, TopicConsumer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

RECORD_BYTES = 100
RECORDS_S = sized(500, tiny=40)
SECONDS = sized(4.0, tiny=0.5)
WARM_S = sized(1.0, tiny=0.1)
ROUNDS = sized(3, tiny=1)
SPARK_SECONDS, SPARK_WARM_S = sized((9.0, 4.0), tiny=(0.5, 0.1))
"""The first micro-batches compile code and start Python workers."""

POLL_S = 0.001
PATIENCE_S = 60.0
FLUSH_MS = 10
DEFAULT_LINGER_MS = 5
"""Default of Kafka's client."""

DURABLE = "Kafka, linger 10 ms, waits for its disk"
"""The setup of Kafka that promises what our producer promises."""

SETUPS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Kafka": ({}, {}),
    "Kafka, linger 0": ({"linger.ms": 0}, {}),
    DURABLE: ({"linger.ms": 10}, {"flush.messages": "1"}),
}
"""Settings of Kafka's producer and topic."""

Take = Callable[[], list[bytes]]


def rows(address: str | None) -> Iterator[Row]:
    """Measure one producer and one consumer in Python.

    Args:
        address: Address of Kafka, or ``None`` to measure our side alone.

    Yields:
        The rows of the measurement.
    """
    durable = f"ours, {FLUSH_MS} ms flush, waits for its disk"
    measures: dict[str, Callable[[], list[float]]] = {durable: partial(_ours, FLUSH_MS, None)}
    if address is not None:
        measures |= {name: partial(_of_kafka, address, name) for name in SETUPS}
    goals = {durable: DURABLE}
    if MEMORY.is_dir():
        in_memory = f"ours, {DEFAULT_LINGER_MS} ms flush, a directory in memory"
        measures[in_memory] = partial(_ours, DEFAULT_LINGER_MS, str(MEMORY))
        goals[in_memory] = "Kafka"
    found = in_turns(measures, ROUNDS)
    yield from _report("end to end, one producer and one consumer", found, goals)


def spark_rows(spark: SparkSession, address: str | None) -> Iterator[Row]:
    """Measure one producer and a query.

    Args:
        spark: A session.
        address: Address of Kafka, or ``None`` to measure our side alone.

    Yields:
        The row of the measurement.
    """
    ours = f"ours, {FLUSH_MS} ms flush"
    measures: dict[str, Callable[[], list[float]]] = {ours: partial(_ours_in_spark, spark)}
    if address is not None:
        measures["Kafka"] = partial(_kafka_in_spark, spark, address)
    found = in_turns(measures, ROUNDS)
    yield from _report("end to end, one producer and a query", found, {ours: "Kafka"})


def _report(
    what: str, found: Mapping[str, Sequence[Sequence[float]]], goals: Mapping[str, str]
) -> Iterator[Row]:
    """Give a row for each way: the median of the p99 of its rounds, with the least and the most.

    Args:
        what: The thing that was measured.
        found: The milliseconds of all records of each round.
        goals: For each of our ways, the other way that it must not be slower than.
    """
    p99s = {name: sorted(map(p99, rounds)) for name, rounds in found.items()}
    for name, rounds in found.items():
        median = statistics.median(p99s[name])
        p50 = statistics.median(statistics.median(delays) for delays in rounds)
        other = goals.get(name)
        goal = statistics.median(p99s[other]) if other in p99s else None
        yield Row(
            f"{what}: {name}",
            f"p99 {median:.1f} ms",
            "" if goal is None else f"<= {goal:.1f} ms of {other}",
            None if goal is None else median <= goal,
            f"{p99s[name][0]:.1f} to {p99s[name][-1]:.1f} in {len(rounds)} rounds, p50 {p50:.1f}",
        )


# ---- processes that produce


def produce(directory: str, seconds: float, flush_ms: int) -> None:
    """Produce to a queue, in a process of its own."""
    with Producer(ProducerConfig(store=directory, flush_interval_ms=flush_ms)) as producer:
        paced(RECORDS_S, seconds, lambda: producer.send(stamped(RECORD_BYTES)))


def produce_to_kafka(address: str, topic: str, seconds: float, settings: dict[str, Any]) -> None:
    """Produce to a topic of Kafka, in a process of its own."""
    producer = kafka.client().Producer({"bootstrap.servers": address, **settings})
    producer.list_topics(topic, PATIENCE_S)  # connects, which is not part of the measurement

    def call() -> None:
        producer.produce(topic, stamped(RECORD_BYTES))
        producer.poll(0)

    paced(RECORDS_S, seconds, call)
    producer.flush(PATIENCE_S)


# ---- a consumer in Python


@contextmanager
def consuming_topic(directory: str, timeout_s: float) -> Iterator[Take]:
    """Open a consumer of one of our topics.

    Args:
        directory: Directory of the topic.
        timeout_s: Seconds that the function waits for a batch.

    Yields:
        A function that takes and acknowledges the next batch.
    """
    with TopicConsumer(directory) as consumer:

        def take() -> list[bytes]:
            batch = consumer.next_batch(timeout=timeout_s)
            if batch is None:
                return []
            batch.ack()
            return list(batch.values)

        yield take


def _ours(flush_ms: int, where: str | None) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-", dir=where) as directory:
        config = ConsumerConfig(
            store=directory,
            create_if_missing=True,  # it starts before the process that produces
            gc=NO_COLLECTOR,
        )
        with Consumer(config) as consumer:

            def take() -> list[bytes]:
                batch = consumer.next_batch()
                if batch is None:
                    time.sleep(POLL_S)
                    return []
                consumer.ack(batch.sequence)
                return list(batch.values)

            return _delays(take, start_process(produce, directory, SECONDS, flush_ms))


def _of_kafka(address: str, name: str) -> list[float]:
    producer_settings, topic_settings = SETUPS[name]
    topic = f"latency-{time.monotonic_ns()}"
    kafka.fill(address, topic, 1, [b"%020d" % 0], 1, topic_settings)
    with kafka.consuming(address, topic, POLL_S, first_record=True) as take:
        arguments = (address, topic, SECONDS, producer_settings)
        return _delays(take, start_process(produce_to_kafka, *arguments))


def _delays(take: Take, producing: BaseProcess) -> list[float]:
    """Return the milliseconds of each record after the warm-up."""
    wanted = int(SECONDS * RECORDS_S)
    found: list[float] = []
    until = time.monotonic() + SECONDS + PATIENCE_S
    while len(found) < wanted:
        found += [age_ms(record) for record in take()]
        if time.monotonic() > until:
            raise RuntimeError(f"{len(found)} of {wanted} records came")
    producing.join(PATIENCE_S)
    if producing.exitcode:
        raise RuntimeError(f"the process that produces ended with {producing.exitcode}")
    return found[int(WARM_S * RECORDS_S) :]


# ---- a query


def _ours_in_spark(spark: SparkSession) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as home:
        store = f"{home}/store"
        with Producer(ProducerConfig(store=store)) as producer:
            producer.send(b"%020d" % 0)
        frame = spark.readStream.format("opendata-buffer").option("gcEnabled", "false").load(store)
        start = partial(start_process, produce, store, SPARK_SECONDS, FLUSH_MS)
        return _delays_in_query(frame, f"{home}/checkpoint", start)


def _kafka_in_spark(spark: SparkSession, address: str) -> list[float]:
    topic = f"latency-{time.monotonic_ns()}"
    kafka.fill(address, topic, 1, [b"%020d" % 0], 1)
    frame = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as home:
        start = partial(start_process, produce_to_kafka, address, topic, SPARK_SECONDS, {})
        return _delays_in_query(frame, f"{home}/checkpoint", start)


def _delays_in_query(
    frame: DataFrame, checkpoint: str, start_producing: Callable[[], BaseProcess]
) -> list[float]:
    """Return the milliseconds of each record after the warm-up, in a query that has started.

    Args:
        frame: A stream with one record, which shows that the query has started.
        checkpoint: A directory that does not exist yet.
        start_producing: Starts the process that produces.
    """
    found: list[float] = []

    def take(batch: DataFrame, number: int) -> None:
        del number
        records = [bytes(row["value"]) for row in batch.select("value").collect()]
        found.extend(age_ms(record) for record in records)

    wanted = 1 + int(SPARK_SECONDS * RECORDS_S)
    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
    query = writer.start()
    try:
        _await(query, lambda: len(found) >= 1)
        producing = start_producing()
        _await(query, lambda: len(found) >= wanted)
        producing.join(PATIENCE_S)
    finally:
        query.stop()
    return found[1 + int(SPARK_WARM_S * RECORDS_S) :]


def _await(query: StreamingQuery, done: Callable[[], bool]) -> None:
    from benchmarks.queries import ended_within

    until = time.monotonic() + SPARK_SECONDS + PATIENCE_S
    while not done():
        if ended_within(query, 0.05) or time.monotonic() > until:
            raise RuntimeError(f"not all records came: {query.exception()}")
