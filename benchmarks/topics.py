"""Topics: 16 partitions beside one queue.

Several processes that produce, without a broker: they share a directory in which each
request takes as long as on S3 Standard. As much as they can: batches a second, when each process
always has as many calls waiting as its buffer takes. At an even pace, which one queue can keep up
with: the time until a call is durable. Then what reading takes, in :mod:`benchmarks.topic_source`.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from benchmarks.producers import CAS_MS, GET_MS, PUT_MS, paced
from benchmarks.table import Row
from benchmarks.topic_sink import sink_rows
from benchmarks.topic_source import idle_row, speed_row
from opendata_buffer import Producer, ProducerConfig, Topic, TopicProducer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

PARTITIONS = 16
PROCESSES = 4
SECONDS = 8.0
CALLS_PER_S = 20
"""Of each process, at an even pace."""
WAITING = 64
"""Calls that wait in each process, of the queue or of each partition."""
CALL_BYTES = 420
"""What a call of one record of 100 bytes holds of the buffer."""

Made = tuple[int, list[float]]


def producing(store: Store, topic: bool) -> Producer | TopicProducer:
    # Each call is a batch: what is counted is batches, and not how many calls fit into one.
    config = ProducerConfig(
        store="file:///bench",
        broker="off",
        flush_size_bytes=1,
        max_buffered_bytes=WAITING * CALL_BYTES * (PARTITIONS if topic else 1),
    )
    return TopicProducer(config, store=store) if topic else Producer(config, store=store)


def process(root: str, topic: bool, pace: float | None, start: Any, results: Queue[Made]) -> None:
    """One process: how many batches became durable in time, and the seconds each call took."""
    plan = FaultPlan(put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS)
    store = FaultyStore(LocalStore(Path(root)), SystemRuntime(), plan=plan)
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

    with producing(store, topic) as producer:
        for _ in range(2 * PARTITIONS):  # every partition is open, and every thread is there
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


def together(topic: bool, pace: float | None) -> tuple[float, list[float]]:
    """Batches a second of all processes, and how long each call took."""
    context = multiprocessing.get_context("spawn")
    # In memory where there is such a directory: the disk is not what is measured.
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    home = tempfile.mkdtemp(dir=shared)
    try:
        if topic:
            Topic.create(home, PARTITIONS)
        start, results = context.Barrier(PROCESSES), context.Queue()
        processes = [
            context.Process(target=process, args=(home, topic, pace, start, results))
            for _ in range(PROCESSES)
        ]
        for each in processes:
            each.start()
        found = [results.get(timeout=300) for _ in processes]
        for each in processes:
            each.join()
    finally:
        shutil.rmtree(home)
    return sum(count for count, _ in found) / SECONDS, [d for _, delays in found for d in delays]


def p99(delays: list[float]) -> float:
    return statistics.quantiles(delays, n=100)[98]


def as_much_as_they_can() -> Row:
    (one, _), (many, _) = together(False, None), together(True, None)
    return Row(
        f"{PROCESSES} processes without a broker, {PARTITIONS} partitions / one queue",
        f"{many / one:.1f} x the batches/s",
        ">= 4 x",
        many / one >= 4,
        f"{many:.0f} against {one:.0f} batches/s",
    )


def at_an_even_pace() -> Row:
    (_, one), (_, many) = together(False, CALLS_PER_S), together(True, CALLS_PER_S)
    return Row(
        f"the same at {CALLS_PER_S * PROCESSES} calls/s: p99 until durable",
        f"{p99(many) * 1000:.0f} ms",
        "<= one queue's",
        p99(many) <= p99(one),
        f"one queue {p99(one) * 1000:.0f} ms; p50 {statistics.median(many) * 1000:.0f} against "
        f"{statistics.median(one) * 1000:.0f} ms",
    )


def in_spark() -> Iterator[Row]:
    """The lines that need Spark, in a session of their own."""
    from benchmarks.spark import session

    home = Path(tempfile.mkdtemp(prefix="buffer-bench-"))
    spark = session(home)
    try:
        yield speed_row(spark, home)
        yield from sink_rows(spark)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)


def run() -> Iterator[Row]:
    """All lines of this suite, in the order of the report."""
    yield as_much_as_they_can()
    yield at_an_even_pace()
    yield idle_row()
    yield from in_spark()
