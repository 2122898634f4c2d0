"""End to end: from the call that produces a record until a consumer, or a query, has it.

One process produces records at a steady rate, each with the time of its call; another one reads.
On one machine both see the same monotonic clock. Ours waits for the disk before a record counts,
Kafka does not unless its topic says so. Each is measured beside the one that promises the same:
ours on a disk beside a topic that is flushed at each message, and Kafka's defaults beside ours in
a directory that is memory, where there is nothing to wait for.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.kafka import client, fill
from benchmarks.table import Row
from opendata_buffer import (
    Consumer,
    ConsumerConfig,
    GarbageCollectorConfig,
    Producer,
    ProducerConfig,
    TopicConsumer,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

RECORDS_S = 500
SECONDS = 4.0
WARM_S = 1.0
ROUNDS = 3
SPARK_SECONDS, SPARK_WARM_S = 9.0, 4.0  # the first micro-batches compile and start workers
POLL_S = 0.001
PATIENCE_S = 60.0
FLUSH_MS = 10
DEFAULT_LINGER_MS = 5
"""Of Kafka's client."""

MEMORY = Path("/dev/shm")

KAFKA: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Kafka": ({}, {}),
    "Kafka, linger 0": ({"linger.ms": 0}, {}),
    "Kafka, linger 10 ms, waits for its disk": ({"linger.ms": 10}, {"flush.messages": "1"}),
}
"""Settings of producer and topic."""

DURABLE = "Kafka, linger 10 ms, waits for its disk"
"""The one that promises what we promise."""

Feed = Callable[[bytes], object]
T = TypeVar("T")


def stamped() -> bytes:
    return b"%020d" % time.monotonic_ns() + b"x" * 80


def age_ms(record: bytes) -> float:
    return (time.monotonic_ns() - int(record[:20])) / 1e6


def p99(delays: list[float]) -> float:
    return statistics.quantiles(delays, n=100)[98]


def feed(produce: Feed, seconds: float, poll: Callable[[], object] = lambda: None) -> int:
    """Open loop: records are due at fixed times, however long earlier ones take."""
    count = int(seconds * RECORDS_S)
    started = time.monotonic()
    for number in range(count):
        wait = started + number / RECORDS_S - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        produce(stamped())
        poll()
    return count


def produce_ours(directory: str, seconds: float, flush_ms: int) -> None:
    """One process."""
    with Producer(ProducerConfig(store=directory, flush_interval_ms=flush_ms)) as producer:
        feed(producer.send, seconds)


def produce_kafka(address: str, topic: str, seconds: float, settings: dict[str, Any]) -> None:
    """One process."""
    producer = client().Producer({"bootstrap.servers": address, **settings})
    producer.list_topics(topic, PATIENCE_S)  # connecting is not what is measured
    feed(lambda record: producer.produce(topic, record), seconds, lambda: producer.poll(0))
    producer.flush(PATIENCE_S)


def beside(target: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def delays_of(
    take: Callable[[], list[bytes]], producing: multiprocessing.process.BaseProcess
) -> list[float]:
    """Milliseconds of each record, without those of the warm-up."""
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


def ours(flush_ms: int, where: Path | None = None) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-", dir=where) as directory:
        config = ConsumerConfig(
            store=directory,
            create_if_missing=True,  # it starts before the producer's process
            gc=GarbageCollectorConfig(enabled=False),
        )
        with Consumer(config) as consumer:

            def take() -> list[bytes]:
                batch = consumer.next_batch()
                if batch is None:
                    time.sleep(POLL_S)
                    return []
                consumer.ack(batch.sequence)
                return list(batch.entries)

            return delays_of(take, beside(produce_ours, directory, SECONDS, flush_ms))


@contextmanager
def taken_from_kafka(
    address: str, topic: str, timeout_s: float, *, joined: bool
) -> Iterator[Callable[[], list[bytes]]]:
    """A call that takes what a topic has. ``joined``: the topic has one record, and the consumer
    has read it and so joined its group, which is not what is measured."""
    consumer = client().Consumer(
        {"bootstrap.servers": address, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        if joined and len(consumer.consume(1, timeout=PATIENCE_S)) != 1:
            raise RuntimeError("Kafka gave no record")
        yield lambda: [each.value() for each in consumer.consume(1_000, timeout=timeout_s)]
    finally:
        consumer.close()


@contextmanager
def taken_from_topic(directory: str, timeout_s: float) -> Iterator[Callable[[], list[bytes]]]:
    """A call that takes and acknowledges the next batch of a topic of ours."""
    with TopicConsumer(directory) as consumer:

        def take() -> list[bytes]:
            batch = consumer.next_batch(timeout=timeout_s)
            if batch is None:
                return []
            batch.ack()
            return list(batch.entries)

        yield take


def kafka(address: str, name: str) -> list[float]:
    to, settings = KAFKA[name]
    topic = f"latency-{time.monotonic_ns()}"
    fill(address, topic, 1, [b"%020d" % 0], 1, settings)
    with taken_from_kafka(address, topic, POLL_S, joined=True) as take:
        return delays_of(take, beside(produce_kafka, address, topic, SECONDS, to))


def latency_rows(address: str) -> Iterator[Row]:
    """p99 of each way without Spark, in turns."""
    durable = f"ours, {FLUSH_MS} ms flush, waits for its disk"
    measures: dict[str, Callable[[], list[float]]] = {
        durable: lambda: ours(FLUSH_MS),
        **{name: lambda name=name: kafka(address, name) for name in KAFKA},  # type: ignore[misc]
    }
    goals = {durable: DURABLE}
    if MEMORY.is_dir():
        in_memory = f"ours, {DEFAULT_LINGER_MS} ms flush, a directory in memory"
        measures[in_memory] = lambda: ours(DEFAULT_LINGER_MS, MEMORY)
        goals[in_memory] = "Kafka"
    yield from rows("end to end, one producer and one consumer", in_turns(measures), goals)


def spark_latency_rows(spark: SparkSession, address: str) -> Iterator[Row]:
    """p99 from the call of a producer until a query of Spark's has the record."""
    ours = f"ours, {FLUSH_MS} ms flush"
    measures: dict[str, Callable[[], list[float]]] = {
        ours: lambda: of_ours_in_spark(spark),
        "Kafka": lambda: of_kafka_in_spark(spark, address),
    }
    yield from rows("end to end, one producer and a query", in_turns(measures), {ours: "Kafka"})


def of_ours_in_spark(spark: SparkSession) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as home:
        store = f"{home}/store"
        with Producer(ProducerConfig(store=store)) as producer:
            producer.send(b"%020d" % 0)
        frame = spark.readStream.format("opendata-buffer").option("gcEnabled", "false").load(store)
        produce = partial(beside, produce_ours, store, SPARK_SECONDS, FLUSH_MS)
        return delays_in_query(frame, f"{home}/checkpoint", produce)


def of_kafka_in_spark(spark: SparkSession, address: str) -> list[float]:
    topic = f"latency-{time.monotonic_ns()}"
    fill(address, topic, 1, [b"%020d" % 0], 1)
    frame = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as home:
        produce = partial(beside, produce_kafka, address, topic, SPARK_SECONDS, {})
        return delays_in_query(frame, f"{home}/checkpoint", produce)


def delays_in_query(
    frame: DataFrame,
    checkpoint: str,
    produce: Callable[[], multiprocessing.process.BaseProcess],
) -> list[float]:
    """Milliseconds of each record, in a query that has started; without those of the warm-up."""
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
        producing = produce()
        _await(query, lambda: len(found) >= wanted)
        producing.join(PATIENCE_S)
    finally:
        query.stop()
    return found[1 + int(SPARK_WARM_S * RECORDS_S) :]


def _await(query: StreamingQuery, done: Callable[[], bool]) -> None:
    until = time.monotonic() + SPARK_SECONDS + PATIENCE_S
    while not done():
        if query.awaitTermination(0.05) or time.monotonic() > until:
            raise RuntimeError(f"not all records came: {query.exception()}")


def in_turns(measures: dict[str, Callable[[], T]], rounds: int = ROUNDS) -> dict[str, list[T]]:
    """So many rounds; each begins with another one."""
    found: dict[str, list[T]] = {name: [] for name in measures}
    names = list(measures)
    for turn in range(rounds):
        begin = turn % len(names)
        for name in names[begin:] + names[:begin]:
            found[name].append(measures[name]())
    return found


def rows(what: str, found: dict[str, list[list[float]]], goals: dict[str, str]) -> Iterator[Row]:
    """A row for each way: median p99 of its rounds, with least and most.

    Args:
        what: Was measured.
        found: Milliseconds of the records of each round.
        goals: For each of ours, which of the others it is to be no later than.
    """
    most = {name: sorted(map(p99, rounds)) for name, rounds in found.items()}
    for name, rounds in found.items():
        median = statistics.median(most[name])
        p50 = statistics.median(statistics.median(each) for each in rounds)
        goal = goals.get(name)
        bar = None if goal is None else statistics.median(most[goal])
        yield Row(
            f"{what}: {name}",
            f"p99 {median:.1f} ms",
            "" if bar is None else f"<= {bar:.1f} ms of {goal}",
            None if bar is None else median <= bar,
            f"{most[name][0]:.1f} to {most[name][-1]:.1f} in {len(rounds)} rounds, p50 {p50:.1f}",
        )
