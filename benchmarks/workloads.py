"""Workloads that others have published, by their rules.

Beside a Kafka in the same run: OpenMessaging's (:mod:`benchmarks.openmessaging`), the one of
Spark's SPARK-56543 (:mod:`benchmarks.spark_pipe`) and Nexmark's (:mod:`benchmarks.nexmark`).

**OpenData's own** (the announcement of Buffer): three producers of 10 MB/s each and one consumer on
S3 for some $90 a month. Here each producer is a process, records have 1,000 bytes and come in calls
of 100 at fixed times, and one of the producers is the broker of all. The consumer polls ten times a
second, acknowledges each 100th batch as by default, and runs the collector. All share a directory
in memory in which each request takes as long as on S3 Standard (:mod:`benchmarks.producers`).
Latency is from a call of ``produce`` until the consumer has the decoded record. Dollars are those
of requests, counted where they leave for the store, lost races included, by the prices of
:mod:`benchmarks.prices`::

    dollars a month = (PUT + conditional PUT + LIST) a second x 2,629,800 s x $0.000005
                    + GET a second x 2,629,800 s x $0.0000004,    DELETE is free

and of bytes that lie there for 15 minutes. From and to machines of the region bytes are free.

No setting reaches all three bars where a PUT takes 100 ms, and a read and a conditional PUT 60.
With a flush every F seconds the median is at least F/2 for the flush, 0.1 for the batch, 0.06 for
the append, 0.12 to see and to read it, and 0.05 for the poll: 0.4 s need F <= 0.14. Three producers
write 3/F objects, and all together at least 1/F manifests, and $91 buy 6.9 writes a second:
F >= 0.58. So there is a row for each bar.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import nexmark, openmessaging, spark_pipe
from benchmarks.kafka import client, running, why_not
from benchmarks.latency import MEMORY, age_ms, p99
from benchmarks.peers_spark import session_with_kafka
from benchmarks.prices import S3, SECONDS_A_MONTH
from benchmarks.producers import CAS_MS, GET_MS, PUT_MS, paced
from benchmarks.table import Row
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig, fetch_many
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

PLAN = FaultPlan(put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS, list_ms=GET_MS, delete_ms=GET_MS)
PRODUCERS = 3
BYTES_S = 10_000_000  # of each
RECORD_BYTES = 1_000
RECORDS = 100  # of a call
CALLS_S = BYTES_S / RECORD_BYTES / RECORDS
SECONDS = 20.0
WARM_S = 4.0
POLL_S = 0.1
KEPT_S = 900.0
FLUSHES_MS = (140, 1_000)
P50_MS, P99_MS, DOLLARS = 400, 1_000, 91
SENT_AS = {
    "put": "PutObject", "put_if": "PutObject", "list": "ListObjectsV2", "get": "GetObject",
    "delete_many": "DeleteObjects",
}  # fmt: skip
"""What a store's operation is on S3."""


def near(root: str) -> FaultyStore:
    """The directory as slow as S3; counts requests."""
    return FaultyStore(LocalStore(Path(root)), SystemRuntime(), plan=PLAN)


def stamped_call() -> list[bytes]:
    record = b"%020d" % time.monotonic_ns()
    return [record + bytes(RECORD_BYTES - len(record))] * RECORDS


def produce(root: str, flush_ms: int, seconds: float, start: Any, results: Any) -> None:
    """One process: produces at an even pace, then tells its requests from the start on."""
    store = near(root)
    config = ProducerConfig(store="file:///bench", flush_interval_ms=flush_ms, broker="host")
    with Producer(config, store=store) as producer:
        start.wait()
        before = Counter(store.operations)
        paced(CALLS_S, seconds, lambda: producer.produce(stamped_call()))
        counted = Counter(store.operations) - before
        producer.flush()
    results.put(counted)


def dollars_a_month(a_second: Mapping[str, float]) -> float:
    """What operations of a store, by how many there are in a second, and the bytes kept cost."""
    requests = Counter[str]()
    for name, number in a_second.items():
        requests[SENT_AS[name]] += number * SECONDS_A_MONTH  # type: ignore[assignment]
    return S3.requests(dict(requests)) + PRODUCERS * BYTES_S / 1e9 * KEPT_S * S3.gb_month


def opendata(flush_ms: int, seconds: float = SECONDS, warm_s: float = WARM_S) -> Row:
    """One run, with its latency and what it comes to a month."""
    context = multiprocessing.get_context("spawn")
    calls = PRODUCERS * int(CALLS_S * (seconds + warm_s))
    ages: list[float] = []
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
        start, results = context.Barrier(PRODUCERS + 1), context.SimpleQueue()
        arguments = (root, flush_ms, seconds + warm_s, start, results)
        processes = [context.Process(target=produce, args=arguments) for _ in range(PRODUCERS)]
        for each in processes:
            each.start()
        store = near(root)
        config = ConsumerConfig(store="file:///bench", create_if_missing=True)
        with Consumer(config, store=store) as consumer:
            start.wait()
            before = Counter(store.operations)
            handle, unacknowledged = consumer.fetch_handle(), 0
            while len(ages) < calls:
                polled = time.monotonic()
                descriptors = consumer.next_descriptors(1_000)
                if not descriptors:
                    time.sleep(max(0.0, polled + POLL_S - time.monotonic()))
                    continue
                for batch in fetch_many(handle.fetch, descriptors):
                    assert len(batch.entries) % RECORDS == 0
                    ages += [age_ms(each) for each in batch.entries[::RECORDS]]
                unacknowledged += len(descriptors)
                if unacknowledged >= config.ack_interval:
                    consumer.ack_through(descriptors[-1].sequence)
                    unacknowledged = 0
            counted = Counter(store.operations) - before
        for each in processes:
            counted += results.get()
            each.join()
    ages = ages[PRODUCERS * int(CALLS_S * warm_s) :]
    a_second = {name: number / (seconds + warm_s) for name, number in counted.items()}
    dollars = dollars_a_month(a_second)
    p50_ms, p99_ms = statistics.median(ages), p99(ages)
    listed = ", ".join(f"{number:.1f} {name}" for name, number in sorted(a_second.items()))
    return Row(
        f"OpenData's workload, {PRODUCERS} x {BYTES_S // 10**6} MB/s, flush every {flush_ms} ms",
        f"p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms, ${dollars:.0f} a month",
        f"p50 <= {P50_MS}, p99 <= {P99_MS} ms, <= ${DOLLARS}",
        p50_ms <= P50_MS and p99_ms <= P99_MS and dollars <= DOLLARS,
        f"requests a second: {listed}; {len(ages):,} calls",
    )


def beside_kafka() -> Iterator[Row]:
    """The workloads that a Kafka runs in the same run."""
    if missing := why_not():
        yield Row("workloads beside Kafka", "-", "", None, missing)
        return
    client()
    with running() as address:
        yield from openmessaging.rows(address)
        with session_with_kafka() as (spark, home):
            yield from spark_pipe.rows(spark, address)
            yield from nexmark.rows(spark, address, home / "nexmark")


def run() -> Iterator[Row]:
    """All lines of this suite."""
    for flush_ms in FLUSHES_MS:
        yield opendata(flush_ms)
    yield from beside_kafka()
