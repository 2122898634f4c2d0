"""Reading a queue in a directory with the library alone: records a second, and memory.

Each way reads the same files, which are in the page cache, in a process of its own, so that the
memory is its own. Rates are by the time on the clock and by the processor's: the
former is what a reader gets on a machine with nothing else to do, the latter holds on a busy one,
too. Beside them the machine's own limits, by the same clock: copying what is in memory, and
bringing memory in that is fresh.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.queues import Queued, fill, records_of
from benchmarks.table import Row
from opendata_buffer import Consumer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.fetch import fetch_many
from opendata_buffer.stores.local import LocalStore

MIB = 1024 * 1024
OBJECT_BYTES = 8 * MIB
OBJECTS = 32
RUNS = 5

BARS = {("arrow", 100): 10.8, ("bytes", 100): 6.0, ("arrow", 1000): 1.3, ("bytes", 1000): 1.3}
NAMES = {
    "arrow": "fetch_many to Arrow",
    "bytes": "fetch_many to bytes",
    "next_batch": "next_batch",
}

Read = tuple[list[float], list[float], float]
"""Seconds of each run by the clock and of the processor, and MiB of memory beyond the start."""


def read(consumer: Consumer, way: str) -> int:
    handle = consumer.fetch_handle()
    if way == "next_batch":
        return sum(len(each.entries) for each in iter(consumer.next_batch, None))
    descriptors = consumer.next_descriptors(OBJECTS)
    if way == "arrow":
        return sum(len(each.values) for each in fetch_many(handle.fetch_arrow, descriptors))
    return sum(len(each.entries) for each in fetch_many(handle.fetch, descriptors))


def peak_mib() -> float:
    """Most memory of this process so far; of this program, and not of the one that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        (peak,) = [each for each in status.read_text().splitlines() if each.startswith("VmHWM")]
        return int(peak.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reader(queued: Queued, directory: str, way: str, results: Any) -> None:
    """One process: reads everything several times."""
    config = ConsumerConfig(store=directory, gc=GarbageCollectorConfig(enabled=False))
    clock: list[float] = []
    processor: list[float] = []
    began = 0.0
    for run in range(RUNS + 1):
        queued.rewind()
        with Consumer(config) as consumer:
            if run == 0:
                consumer.fetch_handle().fetch_arrow(consumer.queued(0, 1)[0])  # imports
                began = peak_mib()
            wall, used = time.perf_counter(), time.process_time()
            count = read(consumer, way)
            clock.append(time.perf_counter() - wall)
            processor.append(time.process_time() - used)
        assert count == OBJECTS * queued.records
    results.put((clock[1:], processor[1:], peak_mib() - began))


def apart(target: Callable[..., None], *arguments: Any) -> Any:
    """What a function puts into its last argument, a queue, in a new process that runs it alone."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=target, args=(*arguments, results))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process of {target.__name__} ended with {process.exitcode}")
    return results.get()


def measured(queued: Queued, directory: str, way: str) -> Read:
    found: Read = apart(reader, queued, directory, way)
    return found


def rows() -> Iterator[Row]:
    """Each way, with records of 100 and of 1,000 bytes."""
    for size in (100, 1000):
        with tempfile.TemporaryDirectory() as directory:
            queued = fill(
                LocalStore(directory), records_of(size, OBJECT_BYTES // (size + 4)), OBJECTS
            )
            records = queued.records * OBJECTS
            found = {way: measured(queued, directory, way) for way in NAMES}
        for way, (clock, processor, memory) in found.items():
            bar = BARS.get((way, size))
            rate = records / statistics.median(processor) / 1e6
            wall = sorted(records / each / 1e6 for each in clock)
            yield Row(
                f"{NAMES[way]}, {size:,}-byte records, per second of CPU time",
                f"{rate:.2f} M records/s",
                "" if bar is None else f">= {bar:g} M records/s",
                None if bar is None else rate >= bar,
                f"by the clock {statistics.median(wall):.2f} ({wall[0]:.2f} to {wall[-1]:.2f} in "
                f"{RUNS} runs); {memory:.0f} MiB beyond one batch in Arrow",
            )
        more = found["bytes"][2] - found["next_batch"][2]
        yield Row(
            f"memory of fetch_many beside next_batch, {size:,}-byte records",
            f"{more:+.0f} MiB",
            "<= 8 MiB more, an object",
            more <= 8,
        )


def limit_row() -> Row:
    """What the machine does at most: a copy of old memory, and of memory that is fresh."""
    source = bytearray(64 * MIB)
    target = bytearray(64 * MIB)

    def again() -> None:
        target[:] = source

    def fresh() -> None:
        bytes(source)

    old, new = (rate(each) for each in (again, fresh))
    return Row(
        "copying 64 MiB within memory that is in use / to fresh memory",
        f"{old:.1f} and {new:.1f} GB/s",
        detail="of CPU time: what any decoder is limited by",
    )


def floor_row() -> Row:
    """What no client can go below that gives each record as an object of its own."""
    count = OBJECT_BYTES // 1_004

    def make() -> None:
        for _ in range(OBJECTS):
            [bytes(1_000) for _ in range(count)]

    bytes(16 * MIB)  # freed memory is kept from now on, as it is where lists are decoded
    made = count * OBJECTS / seconds(make) / 1e6
    return Row(
        "making lists of 1,000-byte objects, and nothing else",
        f"{made:.2f} M records/s",
        detail="of CPU time: the limit of any client in Python",
    )


def rate(copy: Callable[[], None]) -> float:
    return 64 * MIB / seconds(copy) / 1e9


def seconds(call: Callable[[], None]) -> float:
    """CPU seconds of a call, median of five after the first."""
    call()
    times = []
    for _ in range(5):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return statistics.median(times)
