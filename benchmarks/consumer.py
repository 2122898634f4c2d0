"""How fast does the library read a queue, without Spark?

* :func:`ack_row`, :func:`drain_row`: acknowledge and drain many small batches.
* :func:`near_row`: read ahead where a read does not wait.
* :func:`rate_rows`: records per second and memory, for files in the page cache. Each way reads in
  a process of its own, so that its memory is its own. Next to the rates stand the limits of the
  machine, which any client has: :func:`copy_row` and :func:`objects_row`.
* :func:`s3_rows`: the CPU time that direct reads of small objects save, compared with boto3.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.measuring import (
    MIB,
    apart,
    clock_seconds,
    in_turns,
    median_cpu_seconds,
    peak_mib,
    sized,
)
from benchmarks.stores import NO_COLLECTOR, Queued, as_slow_as_s3, bucket, fill, records_of
from benchmarks.tables import Row, not_run
from opendata_buffer import Consumer
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.fetch import fetch_many
from opendata_buffer.internal_parts import internals
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from tools.servers import VERSITYGW

if TYPE_CHECKING:
    from opendata_buffer.stores.s3 import S3Store

LATENCY_MS = 60
BATCHES = sized(10_000, tiny=20)
SERIAL_BATCHES = sized(200, tiny=2)
"""Batches that are also read one by one. Reading all of them so would take 20 minutes."""

DRAIN_S = 8.0
NEAR_BATCHES = sized(32, tiny=2)
NEAR_RECORDS = sized(4_000, tiny=4)
NEAR_ROUNDS = sized(5, tiny=1)
SLOW = FaultPlan(get_ms=LATENCY_MS, put_ms=LATENCY_MS, cas_ms=LATENCY_MS, list_ms=LATENCY_MS)
CONFIG = ConsumerConfig(store="memory://bench", gc=NO_COLLECTOR)

OBJECT_BYTES = sized(8 * MIB, tiny=MIB // 64)
OBJECTS = sized(32, tiny=2)
SIZES = sized((100, 1_000), tiny=(1_000,))  # bytes of a record
RUNS = sized(5, tiny=1)
COPY_BYTES = sized(64 * MIB, tiny=MIB // 64)
GOALS = {("arrow", 100): 10.8, ("bytes", 100): 6.0, ("arrow", 1000): 1.3, ("bytes", 1000): 1.3}
"""Million records per second of CPU time, by way of reading and size of records."""

NAMES = {
    "arrow": "fetch_many to Arrow",
    "bytes": "fetch_many to bytes",
    "next_batch": "next_batch",
}

S3_RECORDS = records_of(1_000, 100)
S3_OBJECTS = sized(2_000, tiny=4)
S3_ROUNDS = sized(3, tiny=1)
S3_GOAL = 0.25

Read = tuple[list[float], list[float], float]
"""Seconds of each run by the clock and of CPU time, and MiB of memory beyond the start."""


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    yield ack_row()
    yield drain_row()
    yield near_row()
    yield copy_row()
    yield objects_row()
    yield from rate_rows()


# ---- small batches


def small_batches() -> tuple[FaultyStore, Queued]:
    """Return a queue of many batches of 10 records, in a store that has no latency yet."""
    store = as_slow_as_s3(MemoryStore(), FaultPlan())
    return store, fill(store, records_of(100, 10), BATCHES)


def serial_seconds(consumer: Consumer, batches: int) -> float:
    """Return the seconds of the README's loop: read and acknowledge one batch after the other."""

    def read() -> None:
        for _ in range(batches):
            batch = consumer.next_batch()
            assert batch is not None
            consumer.ack(batch.sequence)

    return clock_seconds(read)


def ack_row() -> Row:
    """Count the writes of one acknowledgement of many batches."""
    store, _ = small_batches()
    with Consumer(CONFIG, **internals(store=store)) as consumer:
        last = consumer.next_descriptors(BATCHES)[-1].sequence
        with patch.object(store, "put_if", wraps=store.put_if) as put_if:
            taken = clock_seconds(lambda: consumer.ack_through(last))
        keys = [call.args[0] for call in put_if.call_args_list]
        assert len(consumer) == 0
    manifests = keys.count(CONFIG.manifest_path)
    return Row(
        f"ack_through over {BATCHES:,} entries",
        f"{manifests} manifest write{'s' if manifests != 1 else ''}",
        "1",
        manifests == 1,
        f"and {len(keys) - manifests} of notes; {taken * 1e3:.1f} ms without storage latency",
    )


def drain_row() -> Row:
    """Drain many small batches from a store with latency, with the default options."""
    store, queued = small_batches()
    with Consumer(CONFIG, **internals(store=store)) as consumer:
        store.plan = SLOW
        serial = serial_seconds(consumer, SERIAL_BATCHES) / SERIAL_BATCHES
        store.plan = FaultPlan()
    queued.rewind()
    with Consumer(CONFIG, **internals(store=store)) as consumer:
        store.plan = SLOW
        started = time.perf_counter()
        descriptors = consumer.next_descriptors(BATCHES)
        count = 0
        for batch in fetch_many(consumer.fetch_handle().fetch, descriptors):
            count += len(batch.values)
        consumer.ack_through(descriptors[-1].sequence)
        taken = time.perf_counter() - started
        assert count == BATCHES * queued.records
        assert len(consumer) == 0
        store.plan = FaultPlan()
    speedup = serial * BATCHES / taken
    return Row(
        f"drain {BATCHES:,} batches of 10 records, {LATENCY_MS} ms storage, default options",
        f"{taken:.1f} s",
        f"<= {DRAIN_S:g} s",
        taken <= DRAIN_S,
        f"{speedup:.0f} x next_batch and ack; one by one {serial * 1e3:.0f} ms a batch, "
        f"measured on {SERIAL_BATCHES}",
    )


def near_row() -> Row:
    """Compare ``fetch_many`` with ``next_batch`` on files in the page cache.

    A read of such a file does not wait, so reading ahead cannot save time. It must not cost any.
    """
    with tempfile.TemporaryDirectory() as directory:
        queued = fill(LocalStore(directory), records_of(1_000, NEAR_RECORDS), NEAR_BATCHES)
        config = ConsumerConfig(store=directory, gc=NO_COLLECTOR)

        def read(way: str) -> float:
            queued.rewind()
            with Consumer(config) as consumer:
                started = time.perf_counter()
                count = _read(consumer, way, NEAR_BATCHES)
                taken = time.perf_counter() - started
            assert count == NEAR_BATCHES * queued.records
            return taken

        ways = {"fetch_many": partial(read, "bytes"), "next_batch": partial(read, "next_batch")}
        times = in_turns(ways, NEAR_ROUNDS)
    ahead, serial = (statistics.median(seconds) for seconds in times.values())
    return Row(
        f"{NEAR_BATCHES} batches of 4 MB in a directory, fetch_many / next_batch",
        f"{ahead / serial:.2f} x the time",
        "<= 1.1 x",
        ahead / serial <= 1.1,
        f"{ahead * 1e3:.0f} and {serial * 1e3:.0f} ms, medians of {NEAR_ROUNDS}",
    )


# ---- records per second


def rate_rows() -> Iterator[Row]:
    """Measure each way to read, with records of 100 and of 1,000 bytes."""
    for size in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            queued = fill(
                LocalStore(directory), records_of(size, OBJECT_BYTES // (size + 4)), OBJECTS
            )
            records = queued.records * OBJECTS
            found: dict[str, Read] = {way: apart(read_all, queued, directory, way) for way in NAMES}
        for way, (clock, cpu, memory) in found.items():
            goal = GOALS.get((way, size))
            rate = records / statistics.median(cpu) / 1e6
            by_clock = sorted(records / seconds / 1e6 for seconds in clock)
            yield Row(
                f"{NAMES[way]}, {size:,}-byte records, per second of CPU time",
                f"{rate:.2f} M records/s",
                "" if goal is None else f">= {goal:g} M records/s",
                None if goal is None else rate >= goal,
                f"by the clock {statistics.median(by_clock):.2f} ({by_clock[0]:.2f} to "
                f"{by_clock[-1]:.2f} in {RUNS} runs); {memory:.0f} MiB beyond one batch in Arrow",
            )
        more = found["bytes"][2] - found["next_batch"][2]
        yield Row(
            f"memory of fetch_many compared with next_batch, {size:,}-byte records",
            f"{more:+.0f} MiB",
            "<= 8 MiB more, an object",
            more <= 8,
        )


def read_all(queued: Queued, directory: str, way: str, results: Any) -> None:
    """Read the queue several times, in a process of its own.

    Args:
        queued: The queue.
        directory: Its store.
        way: One of :data:`NAMES`.
        results: Gets a :data:`Read`.
    """
    config = ConsumerConfig(store=directory, gc=NO_COLLECTOR)
    clock: list[float] = []
    cpu: list[float] = []
    before = 0.0
    for run in range(RUNS + 1):
        queued.rewind()
        with Consumer(config) as consumer:
            if run == 0:
                consumer.fetch_handle().fetch_arrow(
                    consumer._entries.queued(0, 1)[0]
                )  # imports modules
                before = peak_mib()
            clock_s, cpu_s = time.perf_counter(), time.process_time()
            count = _read(consumer, way, OBJECTS)
            clock.append(time.perf_counter() - clock_s)
            cpu.append(time.process_time() - cpu_s)
        assert count == OBJECTS * queued.records
    results.put((clock[1:], cpu[1:], peak_mib() - before))


def _read(consumer: Consumer, way: str, batches: int) -> int:
    """Read all batches and return the number of records."""
    if way == "next_batch":
        return sum(len(batch.values) for batch in iter(consumer.next_batch, None))
    handle = consumer.fetch_handle()
    descriptors = consumer.next_descriptors(batches)
    if way == "arrow":
        return sum(len(batch.values) for batch in fetch_many(handle.fetch_arrow, descriptors))
    return sum(len(batch.values) for batch in fetch_many(handle.fetch, descriptors))


def copy_row() -> Row:
    """Measure how fast the machine copies memory, which limits any decoder."""
    source = bytearray(COPY_BYTES)
    target = bytearray(COPY_BYTES)

    def in_use() -> None:
        target[:] = source

    def fresh() -> None:
        bytes(source)

    in_use_rate, fresh_rate = (_gb_per_s(copy) for copy in (in_use, fresh))
    return Row(
        "copying 64 MiB within memory that is in use / to fresh memory",
        f"{in_use_rate:.1f} and {fresh_rate:.1f} GB/s",
        detail="of CPU time; any decoder has this limit",
    )


def _gb_per_s(copy: Callable[[], None]) -> float:
    return COPY_BYTES / median_cpu_seconds(copy) / 1e9


def objects_row() -> Row:
    """Measure how fast Python makes one object per record, which limits any client in Python."""
    count = OBJECT_BYTES // 1_004

    def make() -> None:
        for _ in range(OBJECTS):
            [bytes(1_000) for _ in range(count)]

    # From here on glibc keeps freed memory, as it does after the first list is decoded.
    bytes(16 * MIB)
    rate = count * OBJECTS / median_cpu_seconds(make) / 1e6
    return Row(
        "making lists of 1,000-byte objects, and nothing else",
        f"{rate:.2f} M records/s",
        detail="of CPU time; any client in Python has this limit",
    )


# ---- S3


def s3_rows() -> Iterator[Row]:
    """Compare direct reads with boto3's ``get_object``, in turns, on a real S3 server."""
    if not VERSITYGW.is_there:
        yield not_run("CPU of reading an object from S3", VERSITYGW.why_not)
        return
    with bucket() as store:
        queued = fill(store, S3_RECORDS, S3_OBJECTS)
        direct = store._direct._send

        def consume(is_direct: bool) -> float:
            queued.rewind()
            with patch.object(store._direct, "_send", direct if is_direct else lambda *_: None):
                return _cpu_ms_per_object(store)

        ways = {"direct": partial(consume, True), "boto3": partial(consume, False)}
        times = in_turns(ways, S3_ROUNDS)
    taken, base = (statistics.median(milliseconds) for milliseconds in times.values())
    saved = 1 - taken / base
    yield Row(
        f"CPU that direct reads save a consumer of {S3_OBJECTS:,} objects of 100 kB in S3",
        f"{saved:.0%}",
        f">= {S3_GOAL:.0%}",
        saved >= S3_GOAL,
        f"{taken:.2f} instead of {base:.2f} ms per object; medians of {S3_ROUNDS}",
    )


def _cpu_ms_per_object(store: S3Store) -> float:
    """Return the CPU milliseconds, of all threads, to fetch and decode one object."""
    config = ConsumerConfig(store="s3://bucket", gc=NO_COLLECTOR)
    with Consumer(config, **internals(store=store)) as consumer:
        descriptors = consumer.next_descriptors(S3_OBJECTS)
        started = time.process_time()
        fetched = fetch_many(consumer.fetch_handle().fetch, descriptors)
        records = sum(len(batch.values) for batch in fetched)
        taken = time.process_time() - started
    assert records == S3_OBJECTS * len(S3_RECORDS)
    return taken / S3_OBJECTS * 1e3
