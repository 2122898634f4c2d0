"""What a log costs however much waits: appends, a reader's start, a time, 16 readers that follow.

A log of ten million waiting batches is written as files, as movers would have left it, in a
directory in the page cache. Its store then answers as slowly as S3 Standard (:mod:`.producers`), so
what is measured are requests, their bytes and Python's part. Beside each figure stands the same on
a queue without segments. Of 16 readers each follows with a collector of its own.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.producers import CAS_MS, GET_MS, PUT_MS
from benchmarks.table import Row
from buffer_source.options import SourceOptions
from buffer_source.stream_reader import MicroBatchStream
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from opendata_buffer.config import GarbageCollectorConfig, QueueConfig
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.log import Log, LogIndex, Part, parts_folder
from opendata_buffer.queue.ownership import claim_for_writing, claim_queue
from opendata_buffer.queue.reader_admin import enable_readers
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.runtime import SystemRuntime, ulid_of
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

WAITING = 10_000_000
AWAY = 6_050_000
"""Batches behind the end at which a reader starts: seven days at ten a second."""
EACH = 8_192
STEP_MS = 100
APPENDS = 150
ROUNDS = 4
SECONDS = 12.0
PLAN = FaultPlan(put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS)


def written(url: str, waiting: int) -> None:
    """A log with so many waiting batches, of which only those that are read have an object."""
    runtime, store, config = SystemRuntime(), open_store(url), QueueConfig(store=url)
    claim = claim_queue(store, config, runtime=runtime)
    now_ms = runtime.now_ms()
    start_ms = now_ms - waiting * STEP_MS
    enable_readers(
        store,
        config,
        claim,
        runtime,
        retention_ms=None,
        reader_expiry_ms=10**11,
    )
    log = Log(store, config, runtime)
    index = log.need()
    tail = waiting - waiting % EACH
    for first in range(0, tail, EACH):
        entries = [
            NewEntry(batch_key("ingest", ulid_of(at, os.urandom(10))), (Metadata(0, at),))
            for at in range(
                start_ms + first * STEP_MS, start_ms + (first + EACH) * STEP_MS, STEP_MS
            )
        ]
        segment = Manifest.starting_at(first, 0).append(entries)
        end, at = first + EACH, start_ms + first * STEP_MS
        part = Part(first, end, at, at + (EACH - 1) * STEP_MS, f"{first:020d}-{end:020d}-x.segment")
        store.put(parts_folder(config) + part.name, segment.raw)
        index = log.with_pages(index.with_segment(part))
        if first <= waiting - AWAY < end:
            for entry in entries:
                store.put(entry.location, encode_batch([b"record"]))
    log.change(lambda before: index)
    store.put("ingest/manifest", Manifest.starting_at(tail, 1).raw)


class Uploads:
    """The largest manifest that was written, in bytes."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.most = 0

    def put_if(self, key: str, data: bytes, condition: Any) -> Any:
        if key == "ingest/manifest":
            self.most = max(self.most, len(data))
        return self._inner.put_if(key, data, condition)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def appends(url: str, count: int) -> tuple[list[float], int]:
    """Seconds from each call until its batch is durable, and the largest manifest written."""
    store = Uploads(FaultyStore(open_store(url), SystemRuntime(), PLAN))
    took = []
    config = ProducerConfig(store=url, flush_interval_ms=1, broker="off")
    with Producer(config, store=store) as producer:  # type: ignore[arg-type]
        producer.produce([b"record"]).result(60)
        for _ in range(count):
            started = time.perf_counter()
            producer.produce([b"record"]).result(60)
            took.append(time.perf_counter() - started)
    return took, store.most


def p99(found: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(found, n=100)[98]


def seconds(call: Callable[[], object], tries: int = 5) -> float:
    """The median of some tries."""
    found = []
    for _ in range(tries):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def first_record(url: str, name: str) -> Callable[[], object]:
    """A reader that was away starts, and gets its first record."""
    store = FaultyStore(open_store(url), SystemRuntime(), PLAN)

    def start() -> None:
        gc = GarbageCollectorConfig(enabled=False)  # it would delete what comes next here
        config = ConsumerConfig(store=url, reader=name, gc=gc)
        position = WAITING - AWAY - 1
        with Consumer(config, position, store=store) as consumer:
            batch = consumer.next_batch()
            assert batch is not None
            assert batch.sequence == position + 1

    return start


def find_times(url: str) -> Callable[[], object]:
    """Any time is found: the index, a page or two, a segment."""
    store, runtime = FaultyStore(open_store(url), SystemRuntime(), PLAN), SystemRuntime()
    config = QueueConfig(store=url)

    def find() -> None:
        manifest = read_manifest(store, config, runtime)
        assert manifest is not None
        log = Log(store, config, runtime)
        view = log.view(log.need(), manifest)
        back = int.from_bytes(os.urandom(4), "little") % (AWAY - 2 * EACH)
        assert view.first_sequence < view.since(runtime.now_ms() - (back + EACH) * STEP_MS)

    return find


def plan_triggers(url: str) -> None:
    """As Spark's driver: plan micro-batches of a reader that was away, and print the median of
    their seconds and the process's memory in MB."""
    settings = {
        "path": url,
        "reader": "spark",
        "gcEnabled": "false",
        "startingOffsets": str(WAITING - AWAY),
    }
    store = FaultyStore(open_store(url), SystemRuntime(), PLAN)
    stream = MicroBatchStream(SourceOptions.from_spark(settings), store, SystemRuntime())
    took, start = [], None
    for _ in range(5):
        started = time.perf_counter()
        end = stream.latest_offset(start)
        assert stream.plan_input_partitions(start, end)
        took.append(time.perf_counter() - started)
        stream.commit(end)
        start = end
    stream.stop()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(statistics.median(took), memory)


def followed(readers: int) -> list[float]:
    """As :func:`appends`, while so many readers follow."""
    with tempfile.TemporaryDirectory() as url, ExitStack() as stack:
        runtime, config = SystemRuntime(), QueueConfig(store=url)
        claim = claim_for_writing(open_store(url), config, runtime=runtime)
        enable_readers(
            open_store(url),
            config,
            claim,
            runtime,
            retention_ms=None,
            reader_expiry_ms=10**9,
        )
        code = f"from benchmarks.log import follow; follow({url!r}, {readers})"
        others = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(others.communicate)  # closes its input, which ends it
        assert others.stdout is not None
        others.stdout.readline()
        return appends(url, APPENDS)[0]


def follow(url: str, readers: int) -> None:
    """So many readers, each in a thread, until standard input is closed."""
    ended = threading.Event()

    def read(name: str) -> None:
        store = FaultyStore(open_store(url), SystemRuntime(), PLAN)
        with Consumer(ConsumerConfig(store=url, reader=name), store=store) as consumer:
            while not ended.is_set():
                batch = consumer.next_batch(timeout=0.5)
                if batch is not None:
                    consumer.ack_through(batch.sequence)

    threads = [threading.Thread(target=read, args=(f"r{n}",)) for n in range(readers)]
    for each in threads:
        each.start()
    print("started", flush=True)
    sys.stdin.read()
    ended.set()
    for each in threads:
        each.join()


def run() -> Iterator[Row]:
    """A row for each promise."""
    with tempfile.TemporaryDirectory() as folder:
        full, empty = f"{folder}/full", f"{folder}/empty"
        written(full, WAITING)
        written(empty, 0)
        times: dict[str, list[float]] = {full: [], empty: []}
        most = dict.fromkeys(times, 0)
        for number in range(ROUNDS):
            for url in (full, empty) if number % 2 else (empty, full):
                took, bytes_written = appends(url, APPENDS)
                times[url] += took
                most[url] = max(most[url], bytes_written)
        kib = most[full] / 1024
        yield Row(
            f"largest manifest of an append, {WAITING:,} batches waiting",
            f"{kib:.0f} KiB",
            "<= 256 KiB",
            kib <= 256,
            f"{most[empty] / 1024:.0f} KiB where none waited at first",
        )
        ratio = p99(times[full]) / p99(times[empty])
        yield Row(
            "p99 of an append, to that of an empty log",
            f"{ratio:.2f} x",
            "<= 1.1 x",
            ratio <= 1.1,
            f"{p99(times[full]) * 1000:.0f} ms and {p99(times[empty]) * 1000:.0f} ms",
        )
        took_s = seconds(first_record(full, "away"))
        yield Row(
            f"first record of a reader that is {AWAY:,} batches behind",
            f"{took_s:.2f} s",
            "<= 2 s",
            took_s <= 2,
        )
        took_s = seconds(find_times(full), 9)
        yield Row("any time is found", f"{took_s:.2f} s", "<= 1 s", took_s <= 1)
        command = [sys.executable, "-m", "opendata_buffer", "status", full]
        took_s = seconds(lambda: subprocess.run(command, stdout=subprocess.DEVNULL))
        yield Row("status, as a process", f"{took_s:.2f} s", "<= 1 s", took_s <= 1)
        code = f"from benchmarks.log import plan_triggers; plan_triggers({full!r})"
        said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
        took_s, memory = map(float, said.stdout.split())
        yield Row(
            f"a trigger of Spark is planned, {AWAY:,} batches behind",
            f"{took_s:.2f} s",
            "<= 3 s",
            took_s <= 3,
        )
        yield Row("memory of that driver", f"{memory:.0f} MB", "<= 300 MB", memory <= 300)
        size = len((Path(full) / "ingest" / "_log.json").read_bytes()) / 1024
        index = LogIndex.from_json((Path(full) / "ingest" / "_log.json").read_bytes())
        yield Row(
            "index", f"{size:.0f} KiB", "<= 256 KiB", size <= 256, f"{len(index.levels)} levels"
        )
    found: dict[int, list[float]] = {1: [], 16: []}
    for number in range(ROUNDS):
        for readers in (1, 16) if number % 2 else (16, 1):
            found[readers] += followed(readers)
    ratio = p99(found[16]) / p99(found[1])
    yield Row(
        "p99 of an append with 16 readers, to that with one",
        f"{ratio:.2f} x",
        "<= 1.05 x",
        ratio <= 1.05,
        f"{p99(found[16]) * 1000:.0f} ms and {p99(found[1]) * 1000:.0f} ms, in another process",
    )
