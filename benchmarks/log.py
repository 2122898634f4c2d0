"""Does the cost of a log depend on how many batches wait in it?

The suite writes a log with ten million waiting batches as files, as movers would have left it, in
a directory in the page cache. The store over it then answers as slowly as S3 Standard, so the
figures contain the requests, their bytes, and the work in Python. Next to each figure stands the
same figure for a log without segments. The last row has 16 readers, each with a collector.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.measuring import median_clock_seconds, p99, sized
from benchmarks.stores import NO_COLLECTOR, as_slow_as_s3
from benchmarks.tables import Row
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from opendata_buffer.admin import add_v1_reader
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.internal_parts import internals
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import Part, parts_folder
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import claim_for_writing, claim_queue
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.runtime import SystemRuntime, ulid_of
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from buffer_source.partitions import SourceOffset

WAITING = sized(10_000_000, tiny=1_000)
AWAY = sized(6_050_000, tiny=600)
"""Batches between a starting reader and the end of the log: seven days at ten per second."""

SEGMENT = sized(8_192, tiny=64)
"""Batches of one segment."""

STEP_MS = 100
"""Milliseconds between two batches."""

APPENDS = sized(150, tiny=2)
ROUNDS = sized(4, tiny=1)
TRIES = sized(5, tiny=1)
TIME_TRIES = sized(9, tiny=1)
TRIGGERS = sized(5, tiny=1)
READERS = sized(16, tiny=2)


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    with tempfile.TemporaryDirectory() as folder:
        full, empty = f"{folder}/full", f"{folder}/empty"
        write_log(full, WAITING)
        write_log(empty, 0)
        yield from _append_rows(full, empty)
        yield from _start_rows(full)
        yield from _trigger_rows(full)
        yield _index_row(full)
    yield _readers_row()
    yield _v1_readers_row()


def _append_rows(full: str, empty: str) -> Iterator[Row]:
    """Compare appends to a full and to an empty log, in turns."""
    times: dict[str, list[float]] = {full: [], empty: []}
    largest = dict.fromkeys(times, 0)
    for number in range(ROUNDS):
        for url in (full, empty) if number % 2 else (empty, full):
            took, bytes_written = append_seconds(url)
            times[url] += took
            largest[url] = max(largest[url], bytes_written)
    kib = largest[full] / 1024
    yield Row(
        f"largest manifest of an append, {WAITING:,} batches waiting",
        f"{kib:.0f} KiB",
        "<= 256 KiB",
        kib <= 256,
        f"{largest[empty] / 1024:.0f} KiB in a log that was empty at first",
    )
    ratio = p99(times[full]) / p99(times[empty])
    yield Row(
        "p99 of an append, to that of an empty log",
        f"{ratio:.2f} x",
        "<= 1.1 x",
        ratio <= 1.1,
        f"{p99(times[full]) * 1000:.0f} ms and {p99(times[empty]) * 1000:.0f} ms",
    )


def _start_rows(full: str) -> Iterator[Row]:
    """Measure a reader's start, the search for a time, and ``status``."""
    taken = median_clock_seconds(partial(_read_first_record, full), TRIES)
    yield Row(
        f"first record of a reader that is {AWAY:,} batches behind",
        f"{taken:.2f} s",
        "<= 2 s",
        taken <= 2,
    )
    taken = median_clock_seconds(partial(_find_time, full), TIME_TRIES)
    yield Row("find the batch of any time", f"{taken:.2f} s", "<= 1 s", taken <= 1)
    command = [sys.executable, "-m", "opendata_buffer", "status", full]
    status = partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True)
    taken = median_clock_seconds(status, TRIES)
    yield Row("status, as a process", f"{taken:.2f} s", "<= 1 s", taken <= 1)


def _trigger_rows(full: str) -> Iterator[Row]:
    """Measure the planning of triggers in a process like Spark's driver."""
    code = f"from benchmarks.log import plan_triggers; plan_triggers({full!r})"
    output = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    taken, memory_mb = map(float, output.split())
    yield Row(
        f"plan a trigger of Spark, {AWAY:,} batches behind",
        f"{taken:.2f} s",
        "<= 3 s",
        taken <= 3,
    )
    yield Row("memory of that driver", f"{memory_mb:.0f} MB", "<= 300 MB", memory_mb <= 300)


def _index_row(full: str) -> Row:
    data = (Path(full) / "ingest" / "_log.json").read_bytes()
    kib = len(data) / 1024
    levels = len(LogIndex.from_json(data).levels)
    return Row("index", f"{kib:.0f} KiB", "<= 256 KiB", kib <= 256, f"{levels} levels")


def _readers_row() -> Row:
    """Compare appends while many readers follow with appends while one does."""
    found: dict[int, list[float]] = {1: [], READERS: []}
    for number in range(ROUNDS):
        for readers in (1, READERS) if number % 2 else (READERS, 1):
            found[readers] += _append_seconds_with_readers(readers)
    ratio = p99(found[READERS]) / p99(found[1])
    return Row(
        f"p99 of an append with {READERS} readers, to that with one",
        f"{ratio:.2f} x",
        "<= 1.05 x",
        ratio <= 1.05,
        f"{p99(found[READERS]) * 1000:.0f} ms and {p99(found[1]) * 1000:.0f} ms, in another "
        "process",
    )


def _v1_readers_row() -> Row:
    """Compare appends to a log with two v1 consumers with appends to one without."""
    found: dict[int, list[float]] = {0: [], 2: []}
    writes = 0
    for number in range(2 * ROUNDS):
        for readers in (0, 2) if number % 2 else (2, 0):
            took, fed = _append_seconds_with_v1_readers(readers)
            found[readers] += took
            writes += fed
    ratio = p99(found[2]) / p99(found[0])
    return Row(
        "p99 of an append with two v1 consumers, to that without one",
        f"{ratio:.2f} x",
        "<= 1.05 x",
        ratio <= 1.05,
        f"{p99(found[2]) * 1000:.0f} ms and {p99(found[0]) * 1000:.0f} ms; "
        f"{writes / len(found[2]):.2f} more small writes for each append",
    )


# ---- a large log


def write_log(url: str, waiting: int) -> None:
    """Write a log with ``waiting`` batches.

    Only those batches have an object that the suite reads.

    Args:
        url: An empty directory.
        waiting: Number of batches.
    """
    runtime, store, config = SystemRuntime(), open_store(url), QueueConfig(store=url)
    claim = claim_queue(store, config, runtime=runtime)
    start_ms = runtime.now_ms() - waiting * STEP_MS
    enable_readers(store, config, claim, runtime, retention_ms=None, reader_expiry_ms=10**11)
    log = Log(store, config, runtime)
    index = log.need()
    tail = waiting - waiting % SEGMENT
    for first in range(0, tail, SEGMENT):
        end = first + SEGMENT
        times_ms = range(start_ms + first * STEP_MS, start_ms + end * STEP_MS, STEP_MS)
        entries = [
            NewEntry(batch_key("ingest", ulid_of(at, os.urandom(10))), (Metadata(0, at),))
            for at in times_ms
        ]
        segment = Manifest.starting_at(first, 0).append(entries)
        name = f"{first:020d}-{end:020d}-x.segment"
        part = Part(first, end, times_ms[0], times_ms[-1], name)
        store.put(parts_folder(config) + part.name, segment.raw)
        index = log.segments.with_pages(index.with_segment(part))
        if first <= waiting - AWAY < end:
            for entry in entries:
                store.put(entry.location, encode_batch([b"record"]))
    log.change(lambda before: index)
    store.put("ingest/manifest", Manifest.starting_at(tail, 1).raw)


class LargestManifest:
    """A store that remembers the size of the largest manifest written to it.

    Args:
        inner: The store that holds the objects.

    Attributes:
        most: That size in bytes.
        fed: Number of writes to manifests of v1 consumers.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.most = 0
        self.fed = 0

    def put_if(self, key: str, data: bytes, condition: Any) -> Any:
        """Write an object if its condition holds."""
        if key == "ingest/manifest":
            self.most = max(self.most, len(data))
        elif key.endswith("/manifest"):
            self.fed += 1
        return self._inner.put_if(key, data, condition)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def append_seconds(url: str) -> tuple[list[float], int]:
    """Append batches one after the other.

    Args:
        url: The store of the log.

    Returns:
        The seconds from each call until its batch was durable, and the bytes of the largest
        manifest that was written.
    """
    took, store = _append_to(url)
    return took, store.most


def _append_to(url: str) -> tuple[list[float], LargestManifest]:
    store = LargestManifest(as_slow_as_s3(open_store(url)))
    took = []
    config = ProducerConfig(store=url, flush_interval_ms=1, broker="off")
    with Producer(config, **internals(store=cast(Store, store))) as producer:
        producer.produce([b"record"]).result(60)
        for _ in range(APPENDS):
            started = time.perf_counter()
            producer.produce([b"record"]).result(60)
            took.append(time.perf_counter() - started)
    return took, store


def _read_first_record(url: str) -> None:
    """Start a reader that was away, and read its first record."""
    # A collector would delete the batches that the next rows read.
    config = ConsumerConfig(store=url, reader="away", gc=NO_COLLECTOR)
    position = WAITING - AWAY - 1
    with Consumer(config, position, **internals(store=as_slow_as_s3(open_store(url)))) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        assert batch.sequence == position + 1


def _find_time(url: str) -> None:
    """Find the batch of a random time. This reads the index, a page or two, and a segment."""
    store, runtime, config = as_slow_as_s3(open_store(url)), SystemRuntime(), QueueConfig(store=url)
    manifest = read_manifest(store, config, runtime)
    assert manifest is not None
    log = Log(store, config, runtime)
    view = LogView.of(log, log.need(), manifest)
    back = int.from_bytes(os.urandom(4), "little") % (AWAY - 2 * SEGMENT)
    assert view.first_sequence < view.since(runtime.now_ms() - (back + SEGMENT) * STEP_MS)


def plan_triggers(url: str) -> None:
    """Plan micro-batches of a reader that was away, as Spark's driver does.

    Prints the median of the seconds, and the memory of this process in MB.
    """
    from buffer_source.micro_batch_stream import MicroBatchStream
    from buffer_source.options import SourceOptions

    settings = {
        "path": url,
        "reader": "spark",
        "gcEnabled": "false",
        "startingOffsets": str(WAITING - AWAY),
    }
    store = as_slow_as_s3(open_store(url))
    stream = MicroBatchStream(SourceOptions.from_spark(settings), store, SystemRuntime())
    took = []
    start: SourceOffset | None = None
    for _ in range(TRIGGERS):
        started = time.perf_counter()
        end = stream.latest_offset(start)
        assert stream.plan_input_partitions(start, end)
        took.append(time.perf_counter() - started)
        stream.commit(end)
        start = end
    stream.stop()
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(statistics.median(took), memory_mb)


# ---- readers that follow


@contextmanager
def _followed_log(follower: str, readers: int, prepare: Callable[[str], None]) -> Iterator[str]:
    """Make a log that another process follows during the block, and yield its URL.

    Args:
        follower: Function of this module that the process calls with the URL and the number.
        readers: Number of readers.
        prepare: Is called with the URL before the process starts.
    """
    with tempfile.TemporaryDirectory() as url, ExitStack() as stack:
        runtime, config, store = SystemRuntime(), QueueConfig(store=url), open_store(url)
        claim = claim_for_writing(store, config, runtime=runtime)
        enable_readers(store, config, claim, runtime, retention_ms=None, reader_expiry_ms=10**9)
        prepare(url)
        code = f"from benchmarks.log import {follower}; {follower}({url!r}, {readers})"
        others = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(others.communicate)  # closes the standard input, which ends the readers
        assert others.stdout is not None
        others.stdout.readline()
        yield url


def _run_until_closed(read: Callable[[str, threading.Event], None], names: Sequence[str]) -> None:
    """Run a reader of each name in a thread, until standard input is closed."""
    ended = threading.Event()
    threads = [threading.Thread(target=read, args=(name, ended)) for name in names]
    for thread in threads:
        thread.start()
    print("started", flush=True)
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()


def _append_seconds_with_readers(readers: int) -> list[float]:
    """Return the seconds of appends to a log that readers in another process follow."""
    with _followed_log("follow", readers, lambda _: None) as url:
        return append_seconds(url)[0]


def follow(url: str, readers: int) -> None:
    """Follow the log with several readers, each in a thread, until standard input is closed."""

    def read(name: str, ended: threading.Event) -> None:
        store = as_slow_as_s3(open_store(url))
        with Consumer(ConsumerConfig(store=url, reader=name), **internals(store=store)) as consumer:
            while not ended.is_set():
                batch = consumer.next_batch(timeout=0.5)
                if batch is not None:
                    consumer.ack_through(batch.sequence)

    _run_until_closed(read, [f"r{number}" for number in range(readers)])


# ---- v1 consumers


def _append_seconds_with_v1_readers(readers: int) -> tuple[list[float], int]:
    """Return the seconds of appends while v1 consumers in another process read the log.

    Returns:
        The seconds, and how often the queues of these consumers were written.
    """

    def add_readers(url: str) -> None:
        for number in range(readers):
            add_v1_reader(url, f"v{number}", f"v{number}")

    with _followed_log("follow_v1", readers, add_readers) as url:
        took, appended = _append_to(url)
        return took, appended.fed


def follow_v1(url: str, readers: int) -> None:
    """Consume the queues of v1 consumers, each in a thread, until standard input is closed."""

    def read(prefix: str, ended: threading.Event) -> None:
        config = QueueConfig(store=url, data_path_prefix=prefix)
        store = as_slow_as_s3(open_store(url))
        queue = Queue(store, config, runtime=SystemRuntime(), role="consumer")
        epoch = queue.claim_epoch(None).epoch
        while not ended.wait(0.1):
            manifest = queue.read()
            if manifest is not None and manifest.entry_count:
                for entry in manifest.entries():
                    store.get(entry.location)
                queue.dequeue(manifest.next_sequence - 1, epoch)

    _run_until_closed(read, [f"v{number}" for number in range(readers)])
