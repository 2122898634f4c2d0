"""How many records and batches do producers make durable, and how long does a record wait?

* :func:`call_rows`: records per second of CPU time that one process takes in, encodes and writes
  to a directory.
* :func:`one_producer` and :func:`many_producers`: batches per second, on a store with the latency
  of S3 Standard.
* :func:`pace_rows`: the wait on a store that accepts one write per second to one object, as GCS
  does.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.measuring import MIB, apart, cpu_seconds, p99, paced, peak_mib, sized
from benchmarks.stores import as_slow_as_s3
from benchmarks.tables import Row, not_run
from opendata_buffer import Producer, ProducerConfig
from opendata_buffer.config import StoreOptions
from opendata_buffer.internal_parts import internals
from opendata_buffer.stores.memory import MemoryStore
from tests.http_scripts import Asked, FaultProxy, Reply
from tools.servers import FAKE_GCS

RECORDS = sized(1_000_000, tiny=2_000)
RUNS = sized(5, tiny=1)
SECONDS = sized(10.0, tiny=0.5)
PRODUCERS = sized(64, tiny=4)
WRITE_EVERY_S = sized(1.0, tiny=0.2)
"""The store accepts one write of an object in this time."""

PACE_SECONDS = sized(60.0, tiny=0.5)

CALLS: dict[str, tuple[float, Callable[[Producer, list[bytes]], object]]] = {
    "send(record)": (
        1.2,
        lambda producer, records: [producer.send(record) for record in records],
    ),
    "produce([record])": (
        1.2,
        lambda producer, records: [producer.produce([record]) for record in records],
    ),
    "produce() of lists of 100": (
        3.0,
        lambda producer, records: [
            producer.produce(records[first : first + 100]) for first in range(0, len(records), 100)
        ],
    ),
}
"""Ways to call a producer: the goal in million records per second, and the calls."""


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    yield from call_rows()
    yield one_producer()
    yield many_producers()


# ---- calls


def call_rows() -> Iterator[Row]:
    """Measure records of 100 bytes, one or a hundred per call."""
    records = _records()
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    for turn in range(RUNS + 1):
        for name, (_, calls) in CALLS.items():
            taken = producer_cpu_seconds(partial(_call, calls, records))
            if turn:  # the first turn imports modules
                times[name].append(taken)
    for name, (goal, _) in CALLS.items():
        rates = sorted(RECORDS / taken / 1e6 for taken in times[name])
        median = statistics.median(rates)
        waiting_mib: float = apart(memory_of, name)
        yield Row(
            f"{name}, 100-byte records into a directory, per second of CPU time",
            f"{median:.2f} M records/s",
            f">= {goal:g} M records/s",
            median >= goal,
            f"{rates[0]:.2f} to {rates[-1]:.2f} in {RUNS} runs; at most {waiting_mib:.0f} MiB of "
            f"memory for waiting records and their handles "
            f"({ProducerConfig(store='.').max_buffered_bytes // MIB} allowed)",
        )


def producer_cpu_seconds(produce: Callable[[Producer], object]) -> float:
    """Measure a producer until all records are durable.

    Args:
        produce: Produces the records and returns their handles, which are kept until all records
            are durable, as a caller would.

    Returns:
        CPU seconds of the process.
    """
    with tempfile.TemporaryDirectory() as home:

        def run() -> object:
            with Producer(ProducerConfig(store=home)) as producer:
                return produce(producer)

        return cpu_seconds(run)


def memory_of(name: str, results: Any) -> None:
    """Measure, in a process of its own, the memory that waiting records take besides themselves.

    Args:
        name: One of :data:`CALLS`.
        results: Gets MiB.
    """
    records = _records()
    producer_cpu_seconds(lambda producer: producer.produce(records[:2_000]))  # imports modules
    before = peak_mib()
    producer_cpu_seconds(partial(_call, CALLS[name][1], records))
    results.put(peak_mib() - before)


def _records() -> list[bytes]:
    return [b"%0100d" % number for number in range(RECORDS)]


def _call(
    calls: Callable[[Producer, list[bytes]], object], records: list[bytes], producer: Producer
) -> object:
    return calls(producer, records)


# ---- batches


def one_producer() -> Row:
    """Measure one producer that is called 100 times per second."""
    delays: list[float] = []
    locations: set[str] = set()

    def produce(producer: Producer) -> None:
        called = time.monotonic()
        handle = producer.produce([b"x" * 100])

        def durable(_: object) -> None:
            delays.append(time.monotonic() - called)
            result = handle.result()
            locations.add(result.location)

        handle.add_done_callback(durable)

    store = as_slow_as_s3(MemoryStore())
    with Producer(ProducerConfig(store="memory://bench"), **internals(store=store)) as producer:
        started = time.monotonic()
        paced(100, SECONDS, partial(produce, producer))
        producer.flush()
        elapsed = time.monotonic() - started
    rate = len(locations) / elapsed
    p99_ms = p99(delays) * 1000
    return Row(
        "one producer, 100 small calls/s, 100/60/60 ms storage",
        f"{rate:.1f} batches/s, p99 {p99_ms:.0f} ms",
        ">= 9.5 batches/s, p99 <= 450 ms",
        rate >= 9.5 and p99_ms <= 450,
        f"p50 {statistics.median(delays) * 1000:.0f} ms, {len(delays)} calls in {elapsed:.1f} s",
    )


def many_producers() -> Row:
    """Measure many producers in one process, each called ten times per second."""
    store = as_slow_as_s3(MemoryStore())
    config = ProducerConfig(store="memory://bench", flush_size_bytes=1)
    producers = [Producer(config, **internals(store=store)) for _ in range(PRODUCERS)]
    delays: list[float] = []

    def produce(producer: Producer) -> None:
        called = time.monotonic()
        handle = producer.produce([b"x" * 100])
        handle.add_done_callback(lambda _: delays.append(time.monotonic() - called))

    threads = [
        threading.Thread(target=paced, args=(10, SECONDS, partial(produce, producer)))
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
    return Row(
        f"{PRODUCERS} producers in one process x 10 batches/s, same storage",
        f"{rate:.0f} batches/s, {wasted:.1%} wasted CAS",
        ">= 600 batches/s, < 5 %",
        rate >= 600 and wasted < 0.05,
        f"p50 {statistics.median(delays) * 1000:.0f} ms, p99 {p99(delays) * 1000:.0f} ms, "
        f"{attempts} CAS",
    )


# ---- a store that limits writes


def pace_rows() -> Iterator[Row]:
    """Measure one producer on a store that accepts one write per second to one object."""
    name = "one producer, 20 records/s, one write a second to one object"
    if not FAKE_GCS.is_there:
        yield not_run(name, FAKE_GCS.why_not)
        return
    import urllib3

    with FAKE_GCS.start() as target:
        urllib3.request("POST", f"{target}/storage/v1/b?project=p", json={"name": "bucket"})
        delays, refused = _durations(PACE_SECONDS, WRITE_EVERY_S, target)
    p50_ms, p99_ms = statistics.median(delays) * 1000, p99(delays) * 1000
    yield Row(
        name,
        f"p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms",
        "p99 <= 1300 ms",
        p99_ms <= 1300,
        f"{len(delays)} records, {refused} writes refused",
    )


class RateProxy(FaultProxy):
    """Passes requests on to a GCS server, but limits the writes of each object, as Google does.

    It answers a write that comes too early with 429 and does not carry it out.

    Args:
        target: URL of the server.
        every_s: Seconds between two writes of one object.

    Attributes:
        refused: The names of the objects whose writes were refused, in order.
    """

    def __init__(self, target: str, every_s: float) -> None:
        super().__init__(target)
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last_write: dict[str, float] = {}
        self.refused: list[str] = []

    def answer(self, asked: Asked) -> Reply:
        """Answer one request."""
        written = re.search(rb'"name": ("(?:[^"\\]|\\.)*")', asked.body[:2_000])
        if asked.method != "POST" or written is None:
            return self.passed_on(asked)
        name = json.loads(written[1])
        with self._lock:
            now = time.monotonic()
            if now - self._last_write.get(name, -self._every_s) < self._every_s:
                self.refused.append(name)
                error = {"code": 429, "errors": [{"reason": "rateLimitExceeded"}]}
                return Reply(429, json.dumps({"error": error}).encode())
            self._last_write[name] = now
        return self.passed_on(asked)


def _durations(seconds: float, every_s: float, target: str) -> tuple[list[float], int]:
    """Return the seconds until each record was durable, and the number of refused writes.

    The first refusals teach the producer the pace of the store. They do not count.
    """
    proxy = RateProxy(target, every_s)
    delays: list[float] = []

    def produce(producer: Producer) -> None:
        called = time.monotonic()
        handle = producer.produce([b"x" * 100])
        handle.add_done_callback(lambda _: delays.append(time.monotonic() - called))

    with proxy.running() as url:
        config = ProducerConfig(
            store=f"gs://bucket/pace-{id(proxy)}",
            store_options=StoreOptions(endpoint_url=url),
            broker="off",
        )
        with Producer(config) as producer:
            while not any(name.endswith("/manifest") for name in proxy.refused):
                producer.produce([b"x"]).result(60)
            learned = len(proxy.refused)
            paced(20, seconds, partial(produce, producer))
            producer.flush()
    return delays, len(proxy.refused) - learned
