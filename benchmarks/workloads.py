"""How does the library do in workloads that others have published, by their rules?

:func:`rows` runs four workloads. A Kafka runs three of them in the same run, if Java and Maven are
there. :mod:`benchmarks.nexmark` has Nexmark's queries; the others are in this module.

**OpenMessaging.** Two producers send records of 1 KiB without a key, at an even pace, to 16
partitions of one topic, and one consumer reads all of them. Latency is from the call that sends a
record to the consumer. Then the backlog: the consumer waits until 100 MB are there, and drains
them while the producers go on. The figure is the number of records per second until it has caught
up. All processes run on one machine. Our topic is a directory on a disk, and our producers wait
for the disk. So does ``Kafka, waits for its disk``. Kafka's defaults do not.

**SPARK-56543** (``pipe``). Spark's own benchmark of real-time mode feeds a stateless query with
1,000 records per second over five partitions. Here one process sends records at that pace, a query
changes each record and writes it to another topic with five partitions, and a consumer reads that
topic. Latency is from the call that sends a record to the consumer of the changed record. Both
systems run in micro-batches without a pause (``processingTime="0 seconds"``), because no Python
source has real-time mode.

**OpenData's own** (the announcement of Buffer). Three producers of 10 MB/s each and one consumer
on S3 cost about $90 a month. Here each producer is a process, records have 1,000 bytes and come in
calls of 100 at fixed times, and one of the producers is the broker of all. The consumer polls ten
times per second, acknowledges each 100th batch as by default, and runs the collector. All share a
directory in memory in which each request takes as long as on S3 Standard. Latency is from a call of
``produce`` to the decoded record in the consumer. The cost is that of the requests, counted where
they leave for the store, lost races included, by the prices of :mod:`benchmarks.costs`::

    dollars a month = (PUT + conditional PUT + LIST) a second x 2,629,800 s x $0.000005
                    + GET a second x 2,629,800 s x $0.0000004,    DELETE is free

and of bytes that are stored for 15 minutes. Bytes to and from machines of the region are free.

No setting reaches all three goals if a PUT takes 100 ms, and a read and a conditional PUT 60. With
a flush every F seconds the median is at least F/2 for the flush, 0.1 for the batch, 0.06 for the
append, 0.12 for noticing and reading it, and 0.05 for the poll, so 0.4 s need F <= 0.14. Three
producers write 3/F objects and together at least 1/F manifests, and $91 buy 6.9 writes per second,
so F >= 0.58. Therefore one row is for the first goal and one for the last.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import kafka
from benchmarks.costs import S3, SECONDS_A_MONTH
from benchmarks.latency import Take, consuming_topic
from benchmarks.measuring import (
    age_ms,
    in_turns,
    memory_folder,
    p99,
    paced,
    sized,
    stamped,
    start_process,
)
from benchmarks.stores import CAS_MS, GET_MS, PUT_MS, as_slow_as_s3
from benchmarks.tables import Row, not_run
from opendata_buffer import (
    Consumer,
    ConsumerConfig,
    Producer,
    ProducerConfig,
    Topic,
    TopicProducer,
    fetch_many,
)
from opendata_buffer.internal_parts import internals
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATIENCE_S = 120.0

MESSAGING_PARTITIONS = sized(16, tiny=2)
MESSAGING_PRODUCERS = sized(2, tiny=1)
MESSAGING_RECORD_BYTES = 1_024
MESSAGING_RECORDS_S = sized(2_500, tiny=40)  # of each producer
MESSAGING_SECONDS, MESSAGING_WARM_S = sized((8.0, 2.0), tiny=(0.5, 0.1))
MESSAGING_ROUNDS = sized(3, tiny=1)
BACKLOG = sized(100_000_000 // MESSAGING_RECORD_BYTES, tiny=100)
AT_ONCE = 20_000
"""Records after which a producer that fills the backlog waits until they are durable."""

LINGER_MS = 10
MESSAGING_SETUPS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Kafka": ({}, {}),
    "Kafka, tuned": ({"linger.ms": LINGER_MS, "batch.size": 1_000_000}, {}),
    "Kafka, waits for its disk": ({"linger.ms": LINGER_MS}, {"flush.messages": "1"}),
}
"""Settings of Kafka's producer and topic."""

PIPE_PARTITIONS = sized(5, tiny=1)
PIPE_RECORD_BYTES = 100
PIPE_RECORDS_S = sized(1_000, tiny=40)
PIPE_SECONDS, PIPE_WARM_S = sized((15.0, 8.0), tiny=(0.5, 0.1))
"""The first micro-batches compile code and start Python workers."""

PIPE_ROUNDS = sized(3, tiny=1)
PIPE_WARM_UP = sized(1, tiny=0)
"""Rounds that do not count: the first micro-batch of a session takes seconds."""

PIPE_FLUSH_MS = 50
"""Of our producer: a batch is an object, and five partitions make a hundred of them per second.
Kafka's client sends after 5 ms, its default."""

PIPE_CHANGE = "CAST(concat(CAST(value AS STRING), '-done') AS BINARY) AS value"

OPENDATA_TIMES = FaultPlan(
    put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS, list_ms=GET_MS, delete_ms=GET_MS
)
OPENDATA_PRODUCERS = sized(3, tiny=2)
OPENDATA_BYTES_S = sized(10_000_000, tiny=1_000_000)  # of each producer
OPENDATA_RECORD_BYTES = 1_000
OPENDATA_RECORDS = 100  # of a call
OPENDATA_CALLS_S = OPENDATA_BYTES_S / OPENDATA_RECORD_BYTES / OPENDATA_RECORDS
OPENDATA_SECONDS, OPENDATA_WARM_S = sized((20.0, 4.0), tiny=(1.0, 0.2))
OPENDATA_POLL_S = 0.1
OPENDATA_KEPT_S = 900.0
OPENDATA_FLUSHES_MS = sized((140, 1_000), tiny=(140,))
P50_MS, P99_MS, DOLLARS = 400, 1_000, 91
SENT_AS = {
    "put": "PutObject",
    "put_if": "PutObject",
    "list": "ListObjectsV2",
    "get": "GetObject",
    "delete_many": "DeleteObjects",
}
"""The request to S3 that an operation of a store makes."""


def rows(part: str = "") -> Iterator[Row]:
    """Give the rows of this suite.

    Args:
        part: ``opendata``, ``openmessaging``, ``pipe`` or ``nexmark`` for one workload only.
    """
    if part in ("", "opendata"):
        for flush_ms in OPENDATA_FLUSHES_MS:
            yield opendata_row(flush_ms)
    if part == "opendata":
        return
    with kafka.running_if_possible() as address:
        if address is None:
            yield not_run("Kafka", kafka.why_not())
        if part in ("", "openmessaging"):
            yield from openmessaging_rows(address)
        if part in ("", "pipe", "nexmark"):
            with kafka.spark_session(address) as (spark, home):
                if part in ("", "pipe"):
                    yield from pipe_rows(spark, address)
                if part in ("", "nexmark"):
                    from benchmarks import nexmark

                    yield from nexmark.rows(spark, home, address)


# ---- OpenMessaging


@dataclass(frozen=True)
class Messaging:
    """The result of one run.

    Attributes:
        delays_ms: Milliseconds of each record at the even pace.
        drained_per_s: Records per second while the backlog was drained.
    """

    delays_ms: list[float]
    drained_per_s: float


def openmessaging_rows(address: str | None) -> Iterator[Row]:
    """Measure latency, and the drain of a backlog.

    Args:
        address: Address of Kafka, or ``None`` to measure our side alone.

    Yields:
        The rows of the measurement.
    """
    measures: dict[str, Callable[[], Messaging]] = {"ours": _our_messaging}
    if address is not None:
        measures |= {name: partial(_kafka_messaging, address, name) for name in MESSAGING_SETUPS}
    found = in_turns(measures, MESSAGING_ROUNDS)
    shape = f"OpenMessaging, {MESSAGING_PARTITIONS} partitions of 1 KiB"
    pace = MESSAGING_PRODUCERS * MESSAGING_RECORDS_S
    for name, rounds in found.items():
        p99s = sorted(p99(messaging.delays_ms) for messaging in rounds)
        p50 = statistics.median(statistics.median(messaging.delays_ms) for messaging in rounds)
        yield Row(
            f"{shape}, {pace:,} records/s: {name}",
            f"p50 {p50:.1f} ms, p99 {statistics.median(p99s):.1f} ms",
            detail=f"p99 {p99s[0]:.1f} to {p99s[-1]:.1f} in {len(rounds)} rounds",
        )
    for name, rounds in found.items():
        speeds = sorted(messaging.drained_per_s / 1e3 for messaging in rounds)
        yield Row(
            f"{shape}, a backlog of 100 MB drained while producing: {name}",
            f"{statistics.median(speeds):.0f} k records/s",
            detail=f"{speeds[0]:.0f} to {speeds[-1]:.0f} in {len(rounds)} rounds",
        )


def _our_messaging() -> Messaging:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as directory:
        Topic.create(directory, MESSAGING_PARTITIONS)
        with consuming_topic(directory, 0.1) as take:
            return _messaging("ours", directory, "", take)


def _kafka_messaging(address: str, name: str) -> Messaging:
    _, settings = MESSAGING_SETUPS[name]
    topic = f"openmessaging-{time.monotonic_ns()}"
    kafka.fill(address, topic, MESSAGING_PARTITIONS, [b"%020d" % 0], 1, settings)
    with kafka.consuming(address, topic, 0.01, first_record=True) as take:
        return _messaging(name, address, topic, take)


def _messaging(system: str, address: str, topic: str, take: Take) -> Messaging:
    """Run the producers and consume their records.

    Args:
        system: ``ours``, or one of :data:`MESSAGING_SETUPS`.
        address: Directory of our topic, or address of Kafka.
        topic: Kafka's topic.
        take: Takes the next records.
    """
    context = multiprocessing.get_context("spawn")
    backlog, drained = context.Barrier(MESSAGING_PRODUCERS + 1), context.Event()
    arguments = (system, address, topic, backlog, drained)
    processes = [start_process(send, *arguments) for _ in range(MESSAGING_PRODUCERS)]
    seconds = MESSAGING_SECONDS + MESSAGING_WARM_S
    try:
        delays = _delays(take, int(MESSAGING_PRODUCERS * MESSAGING_RECORDS_S * seconds), seconds)
        backlog.wait(PATIENCE_S)  # the producers begin to fill the backlog
        backlog.wait(PATIENCE_S)  # they are done
        began, count, oldest_ms = time.perf_counter(), 0, 1e9
        # It has caught up when it gets records that were sent while it drained, and that are not
        # older than usual.
        until = time.monotonic() + PATIENCE_S
        while count < BACKLOG or oldest_ms > 1_000:
            records = take()
            count += len(records)
            if records:
                oldest_ms = age_ms(records[0])
            if time.monotonic() > until:
                raise RuntimeError(f"{system} drained {count} of {BACKLOG} records")
        taken = time.perf_counter() - began
    finally:
        drained.set()
        backlog.abort()
        for process in processes:
            process.join(PATIENCE_S)
            process.kill()
    warm = int(MESSAGING_PRODUCERS * MESSAGING_RECORDS_S * MESSAGING_WARM_S)
    return Messaging(delays[warm:], count / taken)


def send(system: str, address: str, topic: str, backlog: Any, drained: Any) -> None:
    """Be one producer, in a process of its own.

    It sends at an even pace, then its part of the backlog, then at the pace until the backlog is
    drained.

    Args:
        system: ``ours``, or one of :data:`MESSAGING_SETUPS`.
        address: Directory of our topic, or address of Kafka.
        topic: Kafka's topic.
        backlog: Barrier before and after the backlog is sent.
        drained: Event that is set when the backlog is drained.
    """
    with ExitStack() as stack:
        send_record: Callable[[bytes], object]
        flush: Callable[[], object]
        if system == "ours":
            ours = stack.enter_context(TopicProducer(address, flush_interval_ms=LINGER_MS))
            send_record, flush = ours.send, ours.flush
        else:
            settings, _ = MESSAGING_SETUPS[system]
            theirs = kafka.client().Producer({"bootstrap.servers": address, **settings})
            theirs.list_topics(topic, PATIENCE_S)  # connects, which is not part of the measurement
            flush = partial(theirs.flush, PATIENCE_S)

            def send_record(record: bytes) -> None:
                theirs.produce(topic, record)
                theirs.poll(0)

        def call() -> None:
            send_record(stamped(MESSAGING_RECORD_BYTES))

        paced(MESSAGING_RECORDS_S, MESSAGING_SECONDS + MESSAGING_WARM_S, call)
        backlog.wait()
        for number in range(BACKLOG // MESSAGING_PRODUCERS):
            call()
            if number % AT_ONCE == 0:
                flush()
        flush()
        backlog.wait()
        while not drained.is_set():
            paced(MESSAGING_RECORDS_S, 0.1, call)
        flush()


def _delays(take: Take, wanted: int, seconds: float) -> list[float]:
    """Return the milliseconds of each of ``wanted`` records."""
    found: list[float] = []
    until = time.monotonic() + seconds + PATIENCE_S
    while len(found) < wanted:
        found += [age_ms(record) for record in take()]
        if time.monotonic() > until:
            raise RuntimeError(f"{len(found)} of {wanted} records came")
    return found


# ---- SPARK-56543


def pipe_rows(spark: SparkSession, address: str | None) -> Iterator[Row]:
    """Measure a stateless query from topic to topic.

    Args:
        spark: A session, with Kafka's connector if there is an address.
        address: Address of Kafka, or ``None`` to measure our side alone.

    Yields:
        The rows of the measurement.
    """
    measures: dict[str, Callable[[], list[float]]] = {"ours": partial(_our_pipe, spark)}
    if address is not None:
        measures["Kafka"] = partial(_kafka_pipe, spark, address)
    for name, rounds in in_turns(measures, PIPE_ROUNDS, PIPE_WARM_UP).items():
        p50s = sorted(sorted(delays)[len(delays) // 2] for delays in rounds)
        p99s = sorted(map(p99, rounds))
        yield Row(
            f"stateless query, {PIPE_RECORDS_S:,} records/s, {PIPE_PARTITIONS} partitions, "
            f"topic to topic: {name}",
            f"p50 {p50s[len(p50s) // 2]:.0f} ms, p99 {p99s[len(p99s) // 2]:.0f} ms",
            detail=f"p99 {p99s[0]:.0f} to {p99s[-1]:.0f} in {len(rounds)} rounds",
        )


def _our_pipe(spark: SparkSession) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-", ignore_cleanup_errors=True) as home:
        source, target = f"{home}/source", f"{home}/target"
        for directory in (source, target):
            Topic.create(directory, PIPE_PARTITIONS)
        frame = spark.readStream.format("opendata-buffer").load(source)
        with consuming_topic(target, 0.05) as take:
            start = partial(start_process, produce_to_pipe, source)
            return _pipe_delays(frame, "opendata-buffer", {"path": target}, home, start, take)


def _kafka_pipe(spark: SparkSession, address: str) -> list[float]:
    source, target = (f"{name}-{time.monotonic_ns()}" for name in ("source", "target"))
    for topic in (source, target):
        kafka.fill(address, topic, PIPE_PARTITIONS, [], 0)
    options = {
        "kafka.bootstrap.servers": address,
        "subscribe": source,
        "startingOffsets": "earliest",
    }
    frame = spark.readStream.format("kafka").options(**options).load()
    with ExitStack() as stack:
        home = tempfile.TemporaryDirectory(prefix="buffer-bench-", ignore_cleanup_errors=True)
        directory = stack.enter_context(home)
        take = stack.enter_context(kafka.consuming(address, target, 0.005, first_record=False))
        sink = {"kafka.bootstrap.servers": address, "topic": target}
        start = partial(start_process, produce_to_kafka_pipe, address, source)
        return _pipe_delays(frame, "kafka", sink, directory, start, take)


def produce_to_pipe(directory: str) -> None:
    """Produce to our topic at an even pace, in a process of its own."""
    with TopicProducer(directory, flush_interval_ms=PIPE_FLUSH_MS) as producer:
        paced(
            PIPE_RECORDS_S,
            PIPE_SECONDS + PIPE_WARM_S,
            lambda: producer.send(stamped(PIPE_RECORD_BYTES)),
        )


def produce_to_kafka_pipe(address: str, topic: str) -> None:
    """Produce to Kafka's topic at an even pace, in a process of its own."""
    producer = kafka.client().Producer({"bootstrap.servers": address})
    producer.list_topics(topic, PATIENCE_S)  # connects, which is not part of the measurement

    def call() -> None:
        producer.produce(topic, stamped(PIPE_RECORD_BYTES))
        producer.poll(0)

    paced(PIPE_RECORDS_S, PIPE_SECONDS + PIPE_WARM_S, call)
    producer.flush(PATIENCE_S)


def _pipe_delays(
    frame: DataFrame,
    sink: str,
    options: Mapping[str, str],
    home: str,
    start_producing: Callable[[], BaseProcess],
    take: Take,
) -> list[float]:
    """Return the milliseconds of each record after the warm-up."""
    wanted = int(PIPE_RECORDS_S * (PIPE_SECONDS + PIPE_WARM_S))
    found: list[float] = []
    query = (
        frame.selectExpr(PIPE_CHANGE)
        .writeStream.format(sink)
        .options(**options)
        .option("checkpointLocation", str(Path(home, "checkpoint")))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        producing = start_producing()
        until = time.monotonic() + PIPE_SECONDS + PIPE_WARM_S + PATIENCE_S
        while len(found) < wanted:
            records = take()
            assert all(record.endswith(b"-done") for record in records)
            found += [age_ms(record) for record in records]
            if not query.isActive or time.monotonic() > until:
                raise RuntimeError(f"{len(found)} of {wanted} came: {query.exception()}")
        producing.join(PATIENCE_S)
    finally:
        query.stop()
    return found[int(PIPE_RECORDS_S * PIPE_WARM_S) :]


# ---- OpenData's own


def opendata_row(flush_ms: int) -> Row:
    """Run OpenData's workload, and report its latency and its cost a month.

    Args:
        flush_ms: ``flush_interval_ms`` of the producers.

    Returns:
        The row of the measurement.
    """
    context = multiprocessing.get_context("spawn")
    seconds = OPENDATA_SECONDS + OPENDATA_WARM_S
    calls = OPENDATA_PRODUCERS * int(OPENDATA_CALLS_S * seconds)
    with tempfile.TemporaryDirectory(dir=memory_folder()) as root:
        start, results = context.Barrier(OPENDATA_PRODUCERS + 1), context.SimpleQueue()
        arguments = (root, flush_ms, seconds, start, results)
        processes = [start_process(produce_calls, *arguments) for _ in range(OPENDATA_PRODUCERS)]
        ages, counted = _consume_calls(_slow_directory(root), calls, start)
        for process in processes:
            counted += results.get()
            process.join()
    ages = ages[OPENDATA_PRODUCERS * int(OPENDATA_CALLS_S * OPENDATA_WARM_S) :]
    per_second = {name: number / seconds for name, number in counted.items()}
    dollars = dollars_a_month(per_second)
    p50_ms, p99_ms = statistics.median(ages), p99(ages)
    listed = ", ".join(f"{number:.1f} {name}" for name, number in sorted(per_second.items()))
    return Row(
        f"OpenData's workload, {OPENDATA_PRODUCERS} x {OPENDATA_BYTES_S // 10**6} MB/s, flush "
        f"every {flush_ms} ms",
        f"p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms, ${dollars:.0f} a month",
        f"p50 <= {P50_MS}, p99 <= {P99_MS} ms, <= ${DOLLARS}",
        p50_ms <= P50_MS and p99_ms <= P99_MS and dollars <= DOLLARS,
        f"requests a second: {listed}; {len(ages):,} calls",
    )


def _slow_directory(root: str) -> FaultyStore:
    return as_slow_as_s3(LocalStore(Path(root)), OPENDATA_TIMES)


def _consume_calls(store: FaultyStore, calls: int, start: Any) -> tuple[list[float], Counter[str]]:
    """Consume all calls.

    Returns:
        The milliseconds of each call, and the number of requests by operation.
    """
    ages: list[float] = []
    config = ConsumerConfig(store="file:///bench", create_if_missing=True)
    with Consumer(config, **internals(store=store)) as consumer:
        start.wait()
        before = Counter(store.operations)
        handle, unacknowledged = consumer.fetch_handle(), 0
        while len(ages) < calls:
            polled = time.monotonic()
            descriptors = consumer.next_descriptors(1_000)
            if not descriptors:
                time.sleep(max(0.0, polled + OPENDATA_POLL_S - time.monotonic()))
                continue
            for batch in fetch_many(handle.fetch, descriptors):
                assert len(batch.values) % OPENDATA_RECORDS == 0
                ages += [age_ms(record) for record in batch.values[::OPENDATA_RECORDS]]
            unacknowledged += len(descriptors)
            if unacknowledged >= config.ack_interval:
                consumer.ack_through(descriptors[-1].sequence)
                unacknowledged = 0
        counted = Counter(store.operations) - before
    return ages, counted


def produce_calls(root: str, flush_ms: int, seconds: float, start: Any, results: Any) -> None:
    """Produce at an even pace, in a process of its own.

    Args:
        root: Directory of the queue.
        flush_ms: ``flush_interval_ms``.
        seconds: Duration.
        start: Barrier of all processes.
        results: Gets the number of requests by operation, from the start on.
    """
    store = _slow_directory(root)
    config = ProducerConfig(store="file:///bench", flush_interval_ms=flush_ms, broker="host")
    with Producer(config, **internals(store=store)) as producer:
        start.wait()
        before = Counter(store.operations)
        paced(
            OPENDATA_CALLS_S,
            seconds,
            lambda: producer.produce([stamped(OPENDATA_RECORD_BYTES)] * OPENDATA_RECORDS),
        )
        counted = Counter(store.operations) - before
        producer.flush()
    results.put(counted)


def dollars_a_month(per_second: Mapping[str, float]) -> float:
    """Compute the cost of the requests and of the bytes that are kept.

    Args:
        per_second: Operations of a store per second.

    Returns:
        Dollars a month.
    """
    requests: dict[str, float] = {}
    for name, number in per_second.items():
        sent_as = SENT_AS[name]
        requests[sent_as] = requests.get(sent_as, 0.0) + number * SECONDS_A_MONTH
    gb_per_s = OPENDATA_PRODUCERS * OPENDATA_BYTES_S / 1e9
    return S3.requests(requests) + gb_per_s * OPENDATA_KEPT_S * S3.gb_month
