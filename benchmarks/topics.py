"""What do 16 partitions gain and cost, compared with one queue?

* :func:`process_rows`: several processes produce without a broker. They share a directory in which
  each request takes as long as on S3 Standard. The first row drives them at full speed, with the
  buffer of each process always full. The second drives them at an even pace, with which one queue
  can keep up.
* :func:`idle_row`: the time of ``latestOffset`` when nothing is new. Spark adds the same to both.
* :func:`spark_rows`: the streaming source and the streaming sink. The time that counts is
  ``addBatch``: Spark runs the tasks of a micro-batch, and the sink commits.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import MIB, in_random_turns, memory_folder, p99, paced, sized
from benchmarks.stores import as_slow_as_s3, fill, records_of
from benchmarks.tables import Row
from opendata_buffer import Producer, ProducerConfig, Topic, TopicProducer
from opendata_buffer.config import QueueConfig
from opendata_buffer.internal_parts import internals
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = sized(16, tiny=2)
PROCESSES = sized(4, tiny=1)
SECONDS = sized(8.0, tiny=0.3)
CALLS_PER_S = 20  # of each process, at an even pace
WAITING = sized(64, tiny=4)
"""Calls that wait in each process, for the queue or for each partition."""

CALL_BYTES = 420
"""Bytes of the buffer that a call with one record of 100 bytes takes."""

LATENCY_S = sized(0.060, tiny=0.001)
LOOKS = sized(20, tiny=2)

TASKS = 2
SOURCE_WARM_UP = SINK_WARM_UP = sized(1, tiny=0)
SOURCE_ROUNDS = sized(7, tiny=1)
MICRO_BATCHES = sized(4, tiny=2)  # of each query; the first one does not count
OBJECTS = sized(32, tiny=2)  # of a micro-batch
OBJECT_BYTES = sized(8 * MIB, tiny=MIB // 64)
RECORD_BYTES = 1_000

SINK_ROUNDS = sized(5, tiny=1)
SINK_ROWS = sized(800_000, tiny=100)
SINK_RECORD_BYTES = 100
KEYS = 10_000

Durable = tuple[int, list[float]]
"""Number of batches that became durable in time, and the seconds that each call took."""


def process_rows() -> Iterator[Row]:
    """Give the rows that need no Spark."""
    yield full_speed_row()
    yield even_pace_row()
    yield idle_row()


def spark_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Give the rows of the streaming source and sink."""
    yield source_row(spark, home / "source")
    yield from sink_rows(spark)


# ---- processes that produce


def full_speed_row() -> Row:
    """Compare the batches per second of processes that produce as fast as they can."""
    (one, _), (many, _) = _together(False, None), _together(True, None)
    return Row(
        f"{PROCESSES} processes without a broker, {PARTITIONS} partitions / one queue",
        f"{many / one:.1f} x the batches/s",
        ">= 4 x",
        many / one >= 4,
        f"{many:.0f} against {one:.0f} batches/s",
    )


def even_pace_row() -> Row:
    """Compare how long a call takes until it is durable."""
    (_, one), (_, many) = _together(False, CALLS_PER_S), _together(True, CALLS_PER_S)
    return Row(
        f"the same at {CALLS_PER_S * PROCESSES} calls/s: p99 until durable",
        f"{p99(many) * 1000:.0f} ms",
        "<= one queue's",
        p99(many) <= p99(one),
        f"one queue {p99(one) * 1000:.0f} ms; p50 {statistics.median(many) * 1000:.0f} against "
        f"{statistics.median(one) * 1000:.0f} ms",
    )


def _together(topic: bool, pace: float | None) -> tuple[float, list[float]]:
    """Return the batches per second of all processes, and the seconds that each call took."""
    context = multiprocessing.get_context("spawn")
    home = tempfile.mkdtemp(dir=memory_folder())
    try:
        if topic:
            Topic.create(home, PARTITIONS)
        start, results = context.Barrier(PROCESSES), context.Queue()
        processes = [
            context.Process(target=produce, args=(home, topic, pace, start, results))
            for _ in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        found: list[Durable] = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    finally:
        shutil.rmtree(home)
    rate = sum(count for count, _ in found) / SECONDS
    return rate, [delay for _, delays in found for delay in delays]


def produce(
    root: str, topic: bool, pace: float | None, start: Any, results: Queue[Durable]
) -> None:
    """Produce, in a process of its own.

    Args:
        root: Directory of the queue or topic.
        topic: Whether it is a topic.
        pace: Calls per second, or ``None`` to call as fast as the buffer allows.
        start: Barrier of all processes.
        results: Gets a :data:`Durable`.
    """
    store = as_slow_as_s3(LocalStore(Path(root)))
    delays: list[float] = []
    durable = 0
    end = 0.0

    def call() -> None:
        called = time.monotonic()
        handle = producer.produce([b"x" * 100])

        def done(_: object) -> None:
            nonlocal durable
            now = time.monotonic()
            delays.append(now - called)
            durable += now <= end

        handle.add_done_callback(done)

    with _producer(store, topic) as producer:
        for _ in range(2 * PARTITIONS):  # opens every partition and starts every thread
            producer.produce([b"warm up"])
        producer.flush()
        start.wait()
        end = time.monotonic() + SECONDS
        if pace is not None:
            paced(pace, SECONDS, call)
        else:
            while time.monotonic() < end:
                call()
        producer.flush()
    results.put((durable, delays))


def _producer(store: Store, topic: bool) -> Producer | TopicProducer:
    # Each call makes a batch: batches are counted, not the calls that fit into one.
    config = ProducerConfig(
        store="file:///bench",
        broker="off",
        flush_size_bytes=1,
        max_buffered_bytes=WAITING * CALL_BYTES * (PARTITIONS if topic else 1),
    )
    return (
        TopicProducer(config, **internals(store=store))
        if topic
        else Producer(config, **internals(store=store))
    )


# ---- the source


def idle_row() -> Row:
    """Compare idle triggers of the source, over the partitions and over one queue."""
    seconds = {"queue": _idle_seconds(is_topic=False), "topic": _idle_seconds(is_topic=True)}
    more_ms = (seconds["topic"] - seconds["queue"]) * 1000
    return Row(
        f"idle trigger over {PARTITIONS} partitions / over one queue, "
        f"{LATENCY_S * 1000:.0f} ms storage latency",
        f"{more_ms:+.0f} ms",
        "<= 30 ms more",
        more_ms <= 30,
        f"{seconds['topic'] * 1000:.0f} against {seconds['queue'] * 1000:.0f} ms",
    )


class FarStore(MemoryStore):
    """A store in memory in which each read and conditional put takes :data:`LATENCY_S`."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Read an object."""
        time.sleep(LATENCY_S)
        return super().get(*args, **kwargs)

    def put_if(self, *args: Any, **kwargs: Any) -> Any:
        """Write an object if its condition holds."""
        time.sleep(LATENCY_S)
        return super().put_if(*args, **kwargs)


def _idle_seconds(*, is_topic: bool) -> float:
    from buffer_source.micro_batch_stream import MicroBatchStream
    from buffer_source.options import SourceOptions

    store = FarStore()
    options = {"path": "/far", "gcEnabled": "false"}
    prefixes: tuple[str, ...] = ("ingest",)
    if is_topic:
        topic = Topic.create(QueueConfig(store="/far"), PARTITIONS, store=store)
        prefixes = tuple(topic.description.names)
    for prefix in prefixes:
        fill(store, [b"x"], 1, prefix=prefix)
    driver = MicroBatchStream(SourceOptions.from_spark(options), store, SystemRuntime())
    start = driver.latest_offset(None)
    driver.plan_input_partitions(None, start)
    driver.latest_offset(start)
    seconds = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        assert driver.latest_offset(start) is start
        seconds.append(time.perf_counter() - began)
    driver.stop()
    return statistics.median(seconds)


def source_row(spark: SparkSession, home: Path) -> Row:
    """Compare the rows per second that the source reads from the partitions and from one queue.

    Each has queries of its own, in random turns. The micro-batches after the first one of a query
    count, because the first one starts Python workers.
    """
    records = records_of(RECORD_BYTES, OBJECT_BYTES // (RECORD_BYTES + 4))
    batches = OBJECTS * MICRO_BATCHES
    one, many = home / "one", home / "many"
    queues = {
        one: [fill(open_store(str(one)), records, batches)],
        many: [
            fill(open_store(str(many)), records, batches // PARTITIONS, prefix=name)
            for name in Topic.create(str(many), PARTITIONS).description.names
        ],
    }
    os.sync()  # so that the disk does not write the queues during the measurement

    def measure(store: Path, turn: int) -> float:
        from benchmarks.queries import started

        def query(attempt: int) -> float:
            for queue in queues[store]:
                queue.rewind()
            return _source_seconds(spark, store, home / f"checkpoint-{turn}-{store.name}-{attempt}")

        return started(query)

    measures = {store.name: partial(measure, store) for store in (one, many)}
    seconds = in_random_turns(measures, SOURCE_ROUNDS, SOURCE_WARM_UP)
    shutil.rmtree(home)  # gigabytes
    one_s, many_s = (statistics.median(seconds[name]) for name in ("one", "many"))
    rows = len(records) * OBJECTS
    return Row(
        f"streaming source over {PARTITIONS} partitions / over one queue",
        f"{one_s / many_s:.0%}",
        ">= 95%",
        one_s / many_s >= 0.95,
        f"{rows / many_s / 1e3:,.0f} k rows/s against {rows / one_s / 1e3:,.0f} k rows/s",
    )


def _source_seconds(spark: SparkSession, store: Path, checkpoint: Path) -> float:
    from benchmarks.queries import micro_batch_seconds
    from buffer_source.schema import default_schema

    frame = (
        spark.readStream.format("opendata-buffer")
        .option("maxBatchesPerTrigger", OBJECTS)
        .option("minPartitions", TASKS)
        .option("gcEnabled", "false")
        .schema(default_schema())  # without it the topic would have one more column
        .load(str(store))
    )
    return micro_batch_seconds(frame, checkpoint, MICRO_BATCHES)


# ---- the sink


def sink_rows(spark: SparkSession) -> Iterator[Row]:
    """Compare the sink with random partitions and with keys to the sink of one queue."""
    from benchmarks.spark_sink import sink_seconds

    frame = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", SINK_ROWS)
        .option("numPartitions", TASKS)
        .load()
    )
    value = f"rpad(CAST(value AS STRING), {SINK_RECORD_BYTES}, 'x') AS value"
    plain = frame.selectExpr(value)
    keyed = frame.selectExpr(value, f"CAST(value % {KEYS} AS STRING) AS key")
    by_key = {"partitioner": "rendezvous"}
    ours = partial(sink_seconds, sink="opendata-buffer")
    measures = {
        "one queue": lambda _: ours(plain),
        "random": lambda _: ours(plain, partitions=PARTITIONS),
        "rendezvous": lambda _: ours(keyed, partitions=PARTITIONS, options=by_key),
    }
    found = in_random_turns(measures, SINK_ROUNDS, SINK_WARM_UP)
    seconds = {name: statistics.median(times) for name, times in found.items()}
    one = seconds["one queue"]
    for name in ("random", "rendezvous"):
        yield Row(
            f"streaming sink, {PARTITIONS} partitions ({name}) / one queue",
            f"{one / seconds[name]:.0%}",
            ">= 80 %",
            one / seconds[name] >= 0.8,
            f"{SINK_ROWS / seconds[name] / 1e3:,.0f} k rows/s of {SINK_ROWS / one / 1e3:,.0f} "
            "k rows/s",
        )
