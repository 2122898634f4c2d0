"""How many batches per second become durable, on a store with the latency of S3 Standard, and how
many records a second a processor takes in, encodes and writes to a directory."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.reading import MIB, apart, peak_mib
from benchmarks.table import Row
from opendata_buffer import Producer, ProducerConfig
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

PUT_MS, GET_MS, CAS_MS = 100, 60, 60


def slow_store() -> FaultyStore:
    plan = FaultPlan(put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS)
    return FaultyStore(MemoryStore(), SystemRuntime(), plan=plan)


def paced(calls_per_s: float, seconds: float, call: Callable[[], object]) -> None:
    """Open loop: calls are due at fixed times, whether or not earlier ones were slow."""
    started = time.monotonic()
    for n in range(int(calls_per_s * seconds)):
        wait = started + n / calls_per_s - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        call()


def one_producer(seconds: float = 10.0) -> Row:
    delays: list[float] = []
    locations: set[str] = set()

    def produce_one(producer: Producer) -> None:
        called = time.monotonic()
        handle = producer.produce([b"x" * 100])

        def durable(_: object) -> None:
            delays.append(time.monotonic() - called)
            result = handle.result()
            locations.add(result.location)

        handle.add_done_callback(durable)

    with Producer(ProducerConfig(store="memory://bench"), store=slow_store()) as producer:
        started = time.monotonic()
        paced(100, seconds, partial(produce_one, producer))
        producer.flush()
        elapsed = time.monotonic() - started
    rate = len(locations) / elapsed
    p50 = statistics.median(delays) * 1000
    p99 = statistics.quantiles(delays, n=100)[98] * 1000
    return Row(
        "one producer, 100 small calls/s, 100/60/60 ms storage",
        f"{rate:.1f} batches/s, p99 {p99:.0f} ms",
        ">= 9.5 batches/s, p99 <= 450 ms",
        rate >= 9.5 and p99 <= 450,
        f"p50 {p50:.0f} ms, {len(delays)} calls in {elapsed:.1f} s",
    )


def many_producers(count: int = 64, seconds: float = 10.0) -> Row:
    store = slow_store()
    config = ProducerConfig(store="memory://bench", flush_size_bytes=1)
    producers = [Producer(config, store=store) for _ in range(count)]
    delays: list[float] = []

    def produce_one(producer: Producer) -> None:
        called = time.monotonic()
        handle = producer.produce([b"x" * 100])
        handle.add_done_callback(lambda _: delays.append(time.monotonic() - called))

    threads = [
        threading.Thread(target=paced, args=(10, seconds, partial(produce_one, producer)))
        for producer in producers
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for producer in producers:
        producer.flush()
    elapsed = time.monotonic() - started
    committer = producers[0]._sender.committer
    attempts, conflicts = committer.attempts, committer.conflicts
    for producer in producers:
        producer.close()
    rate = len(delays) / elapsed
    wasted = conflicts / attempts
    p99 = statistics.quantiles(delays, n=100)[98] * 1000
    return Row(
        f"{count} producers in one process x 10 batches/s, same storage",
        f"{rate:.0f} batches/s, {wasted:.1%} wasted CAS",
        ">= 600 batches/s, < 5 %",
        rate >= 600 and wasted < 0.05,
        f"p50 {statistics.median(delays) * 1000:.0f} ms, p99 {p99:.0f} ms, {attempts} CAS",
    )


RECORDS = 1_000_000
RUNS = 5


def cpu_seconds(produce: Callable[[Producer], object]) -> float:
    """Of the whole process, until everything is durable. The handles are kept, as callers do."""
    with tempfile.TemporaryDirectory() as home:
        started = time.process_time()
        with Producer(ProducerConfig(store=home)) as producer:
            handles = produce(producer)
        taken = time.process_time() - started
        del handles
        return taken


WAYS: dict[str, tuple[float, Callable[[Producer, list[bytes]], object]]] = {
    "send(record)": (1.2, lambda producer, records: [producer.send(each) for each in records]),
    "produce([record])": (
        1.2,
        lambda producer, records: [producer.produce([each]) for each in records],
    ),
    "produce() of lists of 100": (
        3.0,
        lambda producer, records: [
            producer.produce(records[n : n + 100]) for n in range(0, len(records), 100)
        ],
    ),
}
"""Bar, M records/s, and call."""


def records_100() -> list[bytes]:
    return [b"%0100d" % n for n in range(RECORDS)]


def memory_of(way: str, results: Any) -> None:
    """One process: its memory beyond the records, which it has anyway."""
    records = records_100()
    cpu_seconds(lambda producer: producer.produce(records[:2_000]))  # imports
    began = peak_mib()
    cpu_seconds(lambda producer: WAYS[way][1](producer, records))
    results.put(peak_mib() - began)


def memory_mib(way: str) -> float:
    found: float = apart(memory_of, way)
    return found


def call_rows() -> Iterator[Row]:
    """Records of 100 bytes, one a call and a hundred a call."""
    records = records_100()
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(RUNS + 1):
        for name, (_, produce) in WAYS.items():
            taken = cpu_seconds(lambda producer, produce=produce: produce(producer, records))  # type: ignore[misc]
            if turn:  # the first one imports
                times[name].append(taken)
    for name, (bar, _) in WAYS.items():
        rates = sorted(RECORDS / taken / 1e6 for taken in times[name])
        median = statistics.median(rates)
        yield Row(
            f"{name}, 100-byte records into a directory, per second of CPU time",
            f"{median:.2f} M records/s",
            f">= {bar:g} M records/s",
            median >= bar,
            f"{rates[0]:.2f} to {rates[-1]:.2f} in {RUNS} runs; at most {memory_mib(name):.0f} MiB"
            f" of memory for what waits ({ProducerConfig(store='.').max_buffered_bytes // MIB} "
            "allowed), handles and all",
        )


def run() -> Iterator[Row]:
    """All lines of this suite, in the order of the report."""
    yield from call_rows()
    yield one_producer()
    yield many_producers()
