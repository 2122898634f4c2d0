"""What each cost does where the work grows: waiting batches, partitions, objects, a query's age.

Each row is measured at several sizes, each 4 or 10 times the one before. On a straight line a unit
of work costs the same at each size, 1 x; counted is the worst step from one size to the next,
because where there is little work a fixed cost hides the rest. What must not grow at all counts by
its last step, when all that has a limit has reached it.

Times are the processor's, over stores in memory that answer at once: what requests take by the
clock is in :mod:`benchmarks.log` and :mod:`benchmarks.producers`.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.latency import MEMORY
from benchmarks.log import written
from benchmarks.queues import fill
from benchmarks.reading import apart, seconds
from benchmarks.table import Row
from buffer_sink.committer import Group, QueueCommitter, TopicCommitter, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from buffer_source.stream_reader import MicroBatchStream
from opendata_buffer import Consumer, ConsumerConfig, GarbageCollectorConfig, TopicConsumer
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.trim import collect
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers
from opendata_buffer.runtime import Moment, Runtime, SystemRuntime
from opendata_buffer.stores.base import Listing, ObjectInfo, Store
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.open import open_store
from opendata_buffer.testing.faults import FaultyStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic

LINE = 1.5
"""How much more a unit of work may cost than at the size before."""
FLAT = 1.1
"""How much more of what is not to grow there may be in the last step."""

WAITING = (100, 1_000, 10_000, 100_000)
IN_LOG = (16_000, 64_000, 256_000, 1_024_000)
PARTITIONS = (4, 16, 64, 256)
OF_EACH = 10  # batches that wait in a partition
OBJECTS = (1_000, 4_000, 16_000, 64_000)
CYCLES = 5
AGES = (1_000, 10_000, 100_000, 1_000_000)
EVERY_S = 10.0  # of a query's life, for a micro-batch
PER_APP = 50_000  # micro-batches, after which another query writes
YEARS = (1, 4, 16)
A_DAY = 200  # batches into a queue and into a log
KEPT_DAYS = 300  # in the log
OF_PARTITIONS = "sidecars of a topic's partitions, of which one leaves each month"
STORE = "memory://growth"
RECORD = encode_batch([b"record"])
NO_COLLECTOR = GarbageCollectorConfig(enabled=False)


class ListingStore(MemoryStore):
    """Lists a page in the time of a page however many objects there are, as object storage does."""

    def __init__(self, *, now_ms: Callable[[], int] | None = None) -> None:
        super().__init__("growth", now_ms=now_ms)
        self._keys: list[str] = []

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`."""
        with self._lock:
            keys = self._keys = self._keys or sorted(self._objects)
            at = max(bisect_left(keys, prefix), bisect_right(keys, start_after))
            found: list[ObjectInfo] = []
            while at < len(keys) and keys[at].startswith(prefix):
                if (each := self._objects.get(keys[at])) is not None:
                    if len(found) == limit:
                        return Listing(tuple(found), self._now_ms(), truncated=True)
                    found.append(ObjectInfo(keys[at], len(each.data), each.last_modified_ms))
                at += 1
            return Listing(tuple(found), self._now_ms())

    def _write(self, key: str, data: bytes | memoryview) -> str:
        if key not in self._objects:
            self._keys = []
        return super()._write(key, data)


def line(what: str, costs: Mapping[int, float], unit: str, scale: float = 1.0) -> Row:
    """A row of what may grow as the work does.

    Args:
        what: Costs what, and by what it grows.
        costs: By the size of the work.
        unit: Of the costs as they are shown, times ``scale``.
    """
    steps = [costs[b] / costs[a] / (b / a) for a, b in pairwise(costs)]
    return _row(what, max(steps), "the cost of a unit", LINE, costs, unit, scale)


def flat(
    what: str, costs: Mapping[int, float], unit: str, most: float = FLAT, scale: float = 1.0
) -> Row:
    """A row of what is not to grow; see :func:`line`."""
    *_, before, last = costs.values()
    return _row(what, last / before, "as much", most, costs, unit, scale)


def _row(
    what: str,
    worst: float,
    of: str,
    most: float,
    costs: Mapping[int, float],
    unit: str,
    scale: float,
) -> Row:
    shown = ", ".join(f"{size:,}: {cost * scale:.3g}" for size, cost in costs.items())
    return Row(what, f"{worst:.2f} x {of}", f"<= {most:g} x", worst <= most, f"{shown} {unit}")


# ---- a queue, and a log


def batches_waiting() -> Iterator[Row]:
    """An append, an opening and a trigger's plan, by how many batches wait."""
    costs: dict[str, dict[int, float]] = {"append": {}, "open": {}, "plan": {}}
    for waiting in WAITING:
        store = ListingStore()
        fill(store, [b"record"], waiting)
        costs["plan"][waiting] = plan_s(store, waiting)
        costs["open"][waiting] = open_s(store, ConsumerConfig(store=STORE, gc=NO_COLLECTOR))
        costs["append"][waiting] = append_s(store, QueueConfig(store=STORE))
    yield line("an append, by waiting batches", costs["append"], "ms", 1e3)
    yield line("a consumer's start, by waiting batches", costs["open"], "ms", 1e3)
    yield line("a trigger over all that wait, by batches", costs["plan"], "ms", 1e3)


def log_waiting() -> Iterator[Row]:
    """The same of a log, behind whose manifest the batches lie in segments."""
    appends, opens = dict[int, float](), dict[int, float]()
    for waiting in IN_LOG:
        with tempfile.TemporaryDirectory() as folder:
            written(folder, waiting)
            store = open_store(folder)
            appends[waiting] = append_s(store, QueueConfig(store=folder))
            config = ConsumerConfig(store=folder, gc=NO_COLLECTOR, reader="r")
            opens[waiting] = open_s(store, config)
    yield flat("an append to a log, by waiting batches", appends, "ms", LINE, 1e3)
    yield flat("a reader's start, by waiting batches", opens, "ms", LINE, 1e3)


def append_s(store: Store, config: QueueConfig) -> float:
    """Seconds of one append of one batch."""
    runtime = SystemRuntime()
    claim = claim_for_writing(store, config, runtime=runtime)
    queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)

    def append() -> None:
        queue.append([NewEntry(batch_key(config.data_path_prefix, runtime.ulid()))])

    return seconds(append)


def open_s(store: Store, config: ConsumerConfig) -> float:
    """Seconds until a consumer that starts has its first descriptor."""

    def start() -> None:
        with Consumer(config, store=store) as consumer:
            assert len(consumer.next_descriptors(1)) == 1

    return seconds(start)


# ---- the driver of a query


def driver(store: Store, runtime: Runtime) -> MicroBatchStream:
    options = SourceOptions.from_spark({"path": "/growth", "gcEnabled": "false"})
    return MicroBatchStream(options, store, runtime)


def plan_s(store: Store, expected: int) -> float:
    """Seconds of the first trigger of a run, from ``latestOffset`` to the tasks."""

    def trigger() -> None:
        stream = driver(store, SystemRuntime())
        tasks = stream.plan_input_partitions(None, stream.latest_offset(None))
        assert sum(len(task.batches) for task in tasks) == expected
        stream.stop()

    return seconds(trigger)


def partitions() -> Row:
    """A trigger's plan over a topic."""
    costs = {}
    for count in PARTITIONS:
        store = ListingStore()
        topic = Topic.create(QueueConfig(store=STORE), count, store=store)
        for name in topic.description.names:
            fill(store, [b"record"], OF_EACH, prefix=name)
        costs[count] = plan_s(store, count * OF_EACH)
    what = f"a trigger over {OF_EACH} batches of each partition, by partitions"
    return line(what, costs, "ms", 1e3)


def rss_mib() -> float:
    """Memory of this process now."""
    gc.collect()
    (found,) = [
        each for each in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in each
    ]
    return int(found.split()[1]) / 1024


def lives(ages: tuple[int, ...], results: Any) -> None:
    """One process: the driver of a query that gets older, and the world around it.

    Each micro-batch reads a batch of a producer and one of a Spark sink, whose query is now and
    then another one. Offsets go through JSON as they do in Spark.
    """
    runtime = ManualRuntime()
    store = MemoryStore("growth", now_ms=runtime.now_ms)
    queue = Queue(store, QueueConfig(store=STORE), runtime=runtime, role="producer")
    stream = driver(store, runtime)
    start: SourceOffset | None = None
    found: dict[int, tuple[float, float]] = {}
    for number in range(max(ages)):
        runtime.advance(EVERY_S)
        runtime.slept.clear()  # what the clock of a test keeps is no memory of a driver
        txn = Transaction(f"app-{number // PER_APP}", number)
        metadata = (Metadata(0, runtime.now_ms()),)
        names = [batch_key("ingest", runtime.ulid(), each) for each in (None, txn)]
        queue.append([NewEntry(name, metadata) for name in names])
        end = stream.latest_offset(start)
        if start is not None:
            stream.commit(start)
        tasks = stream.plan_input_partitions(start, end)
        assert sum(len(task.batches) for task in tasks) == 2
        text = json.dumps(end.to_json())
        start = SourceOffset.from_json(json.loads(text))
        if number + 1 in ages:
            found[number + 1] = rss_mib(), len(text) / 1024
    results.put(found)


def query_age() -> Iterator[Row]:
    """Memory and offsets of a query that never ends."""
    found: dict[int, tuple[float, float]] = apart(lives, AGES)
    memory, offsets = ({age: each[n] for age, each in found.items()} for n in (0, 1))
    yield flat("memory of a query's driver, by micro-batches", memory, "MiB")
    # It names the queries that wrote within 30 days (isolation.HORIZON_DAYS).
    yield line("the offset in its checkpoint, by micro-batches", offsets, "KiB")


# ---- sidecars


def sidecars(days_of_a_year: int = 365) -> Iterator[Row]:
    """The sizes of the small objects beside a queue, a log and a topic, by years.

    Each day batches are written and read, a Spark query writes, and the collector runs; each month
    a partition leaves the topic and another one comes, and ``opendata-buffer gc`` has run over the
    topic. The log keeps 300 days. What a partition leaves behind is kept for ever, so that
    nobody writes to it again: that may grow as they leave.
    """
    runtime = ManualRuntime()
    store, topic = (ListingStore(now_ms=runtime.now_ms) for _ in range(2))
    days = [_queue_day(store, runtime), _log_day(store, runtime), _topic_day(topic, runtime)]
    sizes = defaultdict[str, dict[int, float]](dict)
    for day in range(1, days_of_a_year * max(YEARS) + 1):
        runtime.advance(86_400)
        for each in days:
            each(day)
        years, rest = divmod(day, days_of_a_year)
        if rest == 0 and years in YEARS:
            for info in (*store.list("").objects, *topic.list("").objects):
                if info.key.endswith(".json"):
                    of = sizes[OF_PARTITIONS if info.key.startswith("p-") else info.key]
                    of[years] = of.get(years, 0.0) + info.size / 1024
    yield line(f"{OF_PARTITIONS}, by years", sizes.pop(OF_PARTITIONS), "KiB")
    for key, by_years in sorted(sizes.items()):
        yield flat(f"{key}, by years", by_years, "KiB")


def _queue_day(store: Store, runtime: ManualRuntime) -> Callable[[int], None]:
    config = ConsumerConfig(store=STORE, gc=NO_COLLECTOR)
    claim = claim_for_writing(store, config, runtime=runtime)
    queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)
    sink = QueueCommitter(store, SinkOptions(queue=QueueConfig(store=STORE)), runtime)
    consumer = Consumer(config, store=store, runtime=runtime)
    collector = GarbageCollector(store, config, runtime=runtime)

    def day(number: int) -> None:
        queue.append([NewEntry(batch_key("ingest", runtime.ulid())) for _ in range(A_DAY)])
        txn = Transaction("query", number)
        upload = UploadedBatch(batch_key("ingest", runtime.ulid(), txn), 1, (Metadata(0, 7),))
        assert sink.append(Group(Moment.now(runtime), (upload,), txn, "query"))
        read = consumer.next_descriptors(10 * A_DAY)
        assert len(read) == A_DAY + 1
        consumer.ack_through(read[-1].sequence)
        assert collector.run_once().plan.held is None

    return day


def _log_day(store: Store, runtime: ManualRuntime) -> Callable[[int], None]:
    config = ConsumerConfig(store=STORE, data_path_prefix="log", gc=NO_COLLECTOR, reader="r")
    claim = claim_for_writing(store, config, runtime=runtime)
    kept_ms = KEPT_DAYS * 86_400_000
    enable_readers(store, config, claim, runtime, retention_ms=kept_ms, reader_expiry_ms=kept_ms)
    queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)
    consumer = Consumer(config, store=store, runtime=runtime)
    collector = GarbageCollector(store, config, runtime=runtime)

    def day(number: int) -> None:
        queue.append([NewEntry(batch_key("log", runtime.ulid())) for _ in range(A_DAY)])
        read = consumer.next_descriptors(10 * A_DAY)
        assert len(read) == A_DAY
        consumer.ack_through(read[-1].sequence)
        assert collector.run_once().plan.held is None

    return day


def _topic_day(store: Store, runtime: ManualRuntime) -> Callable[[int], None]:
    config, sink_config = ConsumerConfig(store=STORE, gc=NO_COLLECTOR), QueueConfig(store=STORE)
    topic = Topic.create(sink_config, 4, store=store, runtime=runtime)
    sink = TopicCommitter(store, SinkOptions(queue=sink_config), runtime)
    consumer = TopicConsumer(config, store=store, runtime=runtime)

    def day(number: int) -> None:
        if number % 30 == 0:
            collect(Target(store, config, runtime, topic))
            topic.drain(topic.read().active[0])
            topic.expand(4)
        write = TopicWrite.planned(topic.read(), runtime)
        txn = Transaction("query", number)
        uploads = []
        for name in write.active:
            key = write.location(name, runtime.ulid(), txn, write.clock(0, 0))
            store.put(key, RECORD)
            uploads.append(UploadedBatch(key, 1, (Metadata(0, 7),), name, write.clock(0, 0)))
        assert sink.append(Group(Moment.now(runtime), tuple(uploads), txn, "query", write))
        read = 0
        while (batch := consumer.next_batch()) is not None:
            read += len(batch.entries)
            consumer.ack(batch)
        assert read == len(uploads)
        consumer.flush()

    return day


# ---- the collector


def collector() -> Iterator[Row]:
    """A cycle over objects of which one half is queued and the other garbage."""
    for where in ("object storage", "a directory"):
        times, requests = dict[int, float](), dict[int, float]()
        for count in OBJECTS:
            found = list[tuple[float, float]]()
            for _ in range(CYCLES):
                with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
                    inner = ListingStore() if where == "object storage" else LocalStore(folder)
                    found.append(cycle(inner, count))
            times[count], requests[count] = sorted(found)[CYCLES // 2]
        yield line(f"a cycle of the collector over {where}, by objects", times, "s")
        yield line(f"its requests, over {where}", requests, "requests")


def cycle(inner: Store, count: int) -> tuple[float, float]:
    """Seconds and requests of a cycle."""
    config = ConsumerConfig(store=STORE, gc=GarbageCollectorConfig(grace_period_ms=1))
    claim_for_writing(inner, config, runtime=SystemRuntime(), grace_ms=1)
    for _ in range(2):  # the manifest has the second half only
        fill(inner, [b"record"], count // 2)
        time.sleep(0.01)  # the grace period; and the names of both halves differ in time
    store = FaultyStore(inner, SystemRuntime())
    began = time.process_time()
    report = GarbageCollector(store, config).run_once()
    took = time.process_time() - began
    assert report.deleted == count // 2
    return took, float(sum(store.operations.values()))


def run() -> Iterator[Row]:
    """All lines of this suite, in the order of the report."""
    yield from batches_waiting()
    yield from log_waiting()
    yield partitions()
    yield from collector()
    yield from sidecars()
    yield from query_age()
