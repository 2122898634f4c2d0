"""How does each cost grow with the work: waiting batches, partitions, objects, and age?

Each row is measured at several sizes, each 4 or 10 times the one before. If the cost grows in a
straight line, a unit of work costs the same at each size, which is 1 x. The figure that counts is
the worst step from one size to the next, because a fixed cost hides the growth at small sizes.
A cost that must not grow at all counts by its last step, when everything that has a limit has
reached it.

Times are CPU times, over stores in memory that answer at once. :mod:`benchmarks.log` and
:mod:`benchmarks.producer` measure requests by the clock.
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

from benchmarks.log import write_log
from benchmarks.measuring import apart, median_cpu_seconds, memory_folder, sized
from benchmarks.stores import NO_COLLECTOR, fill
from benchmarks.tables import Row
from buffer_sink.committer import Group, QueueCommitter, TopicCommitter, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from opendata_buffer import Consumer, ConsumerConfig, GarbageCollectorConfig, TopicConsumer
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.trimming import collect
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.internal_parts import internals
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
"""Goal for a cost that may grow in a straight line: a unit of work, to that at the size before."""

FLAT = 1.1
"""Goal for a cost that must not grow: the last size, compared with the one before."""

WAITING = sized((100, 1_000, 10_000, 100_000), tiny=(2, 4))
IN_LOG = sized((16_000, 64_000, 256_000, 1_024_000), tiny=(700, 800))
PARTITIONS = sized((4, 16, 64, 256), tiny=(2, 4))
OF_EACH = sized(10, tiny=2)  # batches that wait in a partition
OBJECTS = sized((1_000, 4_000, 16_000, 64_000), tiny=(4, 8))
CYCLES = sized(5, tiny=1)
AGES = sized((1_000, 10_000, 100_000, 1_000_000), tiny=(4, 8))
EVERY_S = 10.0  # between two micro-batches of a query
PER_APP = 50_000  # micro-batches, after which another query writes
DAYS_OF_A_YEAR = sized(365, tiny=31)
YEARS = sized((1, 4, 16), tiny=(1, 2))
A_DAY = sized(200, tiny=2)  # batches into a queue and into a log
KEPT_DAYS = 300  # in the log
OF_PARTITIONS = "sidecars of a topic's partitions, of which one leaves each month"
STORE = "memory://growth"
RECORD = encode_batch([b"record"])


class ListingStore(MemoryStore):
    """A store in memory that lists a page in the same time however many objects there are.

    Object storage does so, too.

    Args:
        now_ms: Clock of the objects, milliseconds since 1970.
    """

    def __init__(self, *, now_ms: Callable[[], int] | None = None) -> None:
        super().__init__("growth", now_ms=now_ms)
        self._keys: list[str] = []

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.base.List.list`."""
        with self._lock:
            keys = self._keys = self._keys or sorted(self._objects)
            at = max(bisect_left(keys, prefix), bisect_right(keys, start_after))
            found: list[ObjectInfo] = []
            while at < len(keys) and keys[at].startswith(prefix):
                stored = self._objects.get(keys[at])
                if stored is not None:
                    if len(found) == limit:
                        return Listing(tuple(found), self._now_ms(), truncated=True)
                    found.append(ObjectInfo(keys[at], len(stored.data), stored.last_modified_ms))
                at += 1
            return Listing(tuple(found), self._now_ms())

    def _write(self, key: str, data: bytes | memoryview) -> str:
        if key not in self._objects:
            self._keys = []
        return super()._write(key, data)


def rows() -> Iterator[Row]:
    """Give all rows of this suite."""
    yield from queue_rows()
    yield from log_rows()
    yield partitions_row()
    yield from collector_rows()
    yield from sidecar_rows()
    yield from query_rows()


def line_row(name: str, costs: Mapping[int, float], unit: str, scale: float = 1.0) -> Row:
    """Make a row for a cost that may grow as the work does.

    Args:
        name: The cost, and the work by which it grows.
        costs: The cost at each size of the work.
        unit: Unit of the costs after they are multiplied by ``scale``.
        scale: Factor for showing the costs.

    Returns:
        The row.
    """
    steps = [costs[more] / costs[less] / (more / less) for less, more in pairwise(costs)]
    return _row(name, max(steps), "the cost of a unit", LINE, costs, unit, scale)


def flat_row(
    name: str, costs: Mapping[int, float], unit: str, goal: float = FLAT, scale: float = 1.0
) -> Row:
    """Make a row for a cost that must not grow.

    Args:
        name: The cost, and the work by which it must not grow.
        costs: The cost at each size of the work.
        unit: Unit of the costs after they are multiplied by ``scale``.
        goal: Highest ratio of the last cost to the one before it.
        scale: Factor for showing the costs.

    Returns:
        The row.
    """
    *_, before, last = costs.values()
    return _row(name, last / before, "as much", goal, costs, unit, scale)


def _row(
    name: str,
    worst: float,
    of: str,
    goal: float,
    costs: Mapping[int, float],
    unit: str,
    scale: float,
) -> Row:
    shown = ", ".join(f"{size:,}: {cost * scale:.3g}" for size, cost in costs.items())
    return Row(name, f"{worst:.2f} x {of}", f"<= {goal:g} x", worst <= goal, f"{shown} {unit}")


# ---- a queue, and a log


def queue_rows() -> Iterator[Row]:
    """Measure an append, a consumer's start, and the plan of a trigger, by waiting batches."""
    costs: dict[str, dict[int, float]] = {"append": {}, "open": {}, "plan": {}}
    for waiting in WAITING:
        store = ListingStore()
        fill(store, [b"record"], waiting)
        costs["plan"][waiting] = plan_seconds(store, waiting)
        costs["open"][waiting] = open_seconds(store, ConsumerConfig(store=STORE, gc=NO_COLLECTOR))
        costs["append"][waiting] = append_seconds(store, QueueConfig(store=STORE))
    yield line_row("an append, by waiting batches", costs["append"], "ms", 1e3)
    yield line_row("a consumer's start, by waiting batches", costs["open"], "ms", 1e3)
    yield line_row("a trigger over all waiting batches, by their number", costs["plan"], "ms", 1e3)


def log_rows() -> Iterator[Row]:
    """Measure an append and a reader's start in a log, by the batches in its segments."""
    appends: dict[int, float] = {}
    opens: dict[int, float] = {}
    for waiting in IN_LOG:
        with tempfile.TemporaryDirectory() as folder:
            write_log(folder, waiting)
            store = open_store(folder)
            appends[waiting] = append_seconds(store, QueueConfig(store=folder))
            config = ConsumerConfig(store=folder, gc=NO_COLLECTOR, reader="r")
            opens[waiting] = open_seconds(store, config)
    yield flat_row("an append to a log, by waiting batches", appends, "ms", LINE, 1e3)
    yield flat_row("a reader's start, by waiting batches", opens, "ms", LINE, 1e3)


def append_seconds(store: Store, config: QueueConfig) -> float:
    """Return the CPU seconds of one append of one batch."""
    runtime = SystemRuntime()
    claim = claim_for_writing(store, config, runtime=runtime)
    queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)

    def append() -> None:
        queue.append([NewEntry(batch_key(config.data_path_prefix, runtime.ulid()))])

    return median_cpu_seconds(append)


def open_seconds(store: Store, config: ConsumerConfig) -> float:
    """Return the CPU seconds until a starting consumer has its first descriptor."""

    def start() -> None:
        with Consumer(config, **internals(store=store)) as consumer:
            assert len(consumer.next_descriptors(1)) == 1

    return median_cpu_seconds(start)


# ---- the driver of a query


def _driver(store: Store, runtime: Runtime) -> MicroBatchStream:
    options = SourceOptions.from_spark({"path": "/growth", "gcEnabled": "false"})
    return MicroBatchStream(options, store, runtime)


def plan_seconds(store: Store, expected: int) -> float:
    """Measure the first trigger of a query, from ``latestOffset`` to the tasks.

    Args:
        store: The store.
        expected: Number of batches in all tasks.

    Returns:
        CPU seconds, the median of some tries.
    """

    def trigger() -> None:
        stream = _driver(store, SystemRuntime())
        tasks = stream.plan_input_partitions(None, stream.latest_offset(None))
        assert sum(len(task.batches) for task in tasks) == expected
        stream.stop()

    return median_cpu_seconds(trigger)


def partitions_row() -> Row:
    """Measure the plan of a trigger over a topic, by its partitions."""
    costs = {}
    for count in PARTITIONS:
        store = ListingStore()
        topic = Topic.create(QueueConfig(store=STORE), count, store=store)
        for name in topic.description.names:
            fill(store, [b"record"], OF_EACH, prefix=name)
        costs[count] = plan_seconds(store, count * OF_EACH)
    name = f"a trigger over {OF_EACH} batches of each partition, by partitions"
    return line_row(name, costs, "ms", 1e3)


def query_rows() -> Iterator[Row]:
    """Measure the memory and the offsets of a query, by its age in micro-batches."""
    found: dict[int, tuple[float, float]] = apart(live, AGES)
    memory = {age: memory_mib for age, (memory_mib, _) in found.items()}
    offsets = {age: offset_kib for age, (_, offset_kib) in found.items()}
    yield flat_row("memory of a query's driver, by micro-batches", memory, "MiB")
    # It names the queries that wrote within 30 days (isolation.HORIZON_DAYS).
    yield line_row("the offset in its checkpoint, by micro-batches", offsets, "KiB")


def live(ages: tuple[int, ...], results: Any) -> None:
    """Be the driver of a query that grows old, in a process of its own.

    Each micro-batch reads a batch of a producer and a batch of a Spark sink, whose query changes
    now and then. Offsets go through JSON, as they do in Spark.

    Args:
        ages: The numbers of micro-batches at which to measure.
        results: Gets the memory in MiB and the size of an offset in KiB, by age.
    """
    runtime = ManualRuntime()
    store = MemoryStore("growth", now_ms=runtime.now_ms)
    queue = Queue(store, QueueConfig(store=STORE), runtime=runtime, role="producer")
    stream = _driver(store, runtime)
    start: SourceOffset | None = None
    found: dict[int, tuple[float, float]] = {}
    for number in range(max(ages)):
        runtime.advance(EVERY_S)
        runtime.slept.clear()  # the list belongs to the clock of this test, not to the driver
        txn = Transaction(f"app-{number // PER_APP}", number)
        metadata = (Metadata(0, runtime.now_ms()),)
        names = [batch_key("ingest", runtime.ulid(), writer) for writer in (None, txn)]
        queue.append([NewEntry(name, metadata) for name in names])
        end = stream.latest_offset(start)
        if start is not None:
            stream.commit(start)
        tasks = stream.plan_input_partitions(start, end)
        assert sum(len(task.batches) for task in tasks) == 2
        text = json.dumps(end.to_json())
        start = SourceOffset.from_json(json.loads(text))
        if number + 1 in ages:
            found[number + 1] = _memory_mib(), len(text) / 1024
    results.put(found)


def _memory_mib() -> float:
    """Return the memory of this process now, in MiB."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    (memory,) = [text for text in status if text.startswith("VmRSS")]
    return int(memory.split()[1]) / 1024


# ---- sidecars


def sidecar_rows() -> Iterator[Row]:
    """Measure the small objects next to a queue, a log and a topic, by years.

    Each day batches are written and read, a Spark query writes, and the collector runs. Each
    month ``opendata-buffer gc`` runs over the topic, one partition leaves it, and another one
    comes. The log keeps 300 days. A partition that leaves keeps its sidecars forever, so that no
    process writes to it again. That may grow with the number of partitions that left.
    """
    runtime = ManualRuntime()
    store, topic = (ListingStore(now_ms=runtime.now_ms) for _ in range(2))
    live_a_day = [
        _queue_day(store, runtime),
        _log_day(store, runtime),
        _topic_day(topic, runtime),
    ]
    sizes: dict[str, dict[int, float]] = defaultdict(dict)
    for day in range(1, DAYS_OF_A_YEAR * max(YEARS) + 1):
        runtime.advance(86_400)
        for live_day in live_a_day:
            live_day(day)
        years, rest = divmod(day, DAYS_OF_A_YEAR)
        if rest == 0 and years in YEARS:
            for info in (*store.list("").objects, *topic.list("").objects):
                if info.key.endswith(".json"):
                    by_years = sizes[OF_PARTITIONS if info.key.startswith("p-") else info.key]
                    by_years[years] = by_years.get(years, 0.0) + info.size / 1024
    yield line_row(f"{OF_PARTITIONS}, by years", sizes.pop(OF_PARTITIONS), "KiB")
    for key, by_years in sorted(sizes.items()):
        yield flat_row(f"{key}, by years", by_years, "KiB")


def _queue_day(store: Store, runtime: ManualRuntime) -> Callable[[int], None]:
    config = ConsumerConfig(store=STORE, gc=NO_COLLECTOR)
    claim = claim_for_writing(store, config, runtime=runtime)
    queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)
    sink = QueueCommitter(store, SinkOptions(queue=QueueConfig(store=STORE)), runtime)
    consumer = Consumer(config, **internals(store=store, runtime=runtime))
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
    consumer = Consumer(config, **internals(store=store, runtime=runtime))
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
    consumer = TopicConsumer(config, **internals(store=store, runtime=runtime))

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
            read += len(batch.values)
            consumer.ack(batch)
        assert read == len(uploads)
        consumer.flush()

    return day


# ---- the collector


def collector_rows() -> Iterator[Row]:
    """Measure a cycle over objects of which one half is queued and the other half is garbage."""
    for where in ("object storage", "a directory"):
        times: dict[int, float] = {}
        requests: dict[int, float] = {}
        for count in OBJECTS:
            found = []
            for _ in range(CYCLES):
                with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
                    inner = ListingStore() if where == "object storage" else LocalStore(folder)
                    found.append(collector_cycle(inner, count))
            times[count], requests[count] = sorted(found)[CYCLES // 2]
        yield line_row(f"a cycle of the collector over {where}, by objects", times, "s")
        yield line_row(f"its requests, over {where}", requests, "requests")


def collector_cycle(inner: Store, count: int) -> tuple[float, float]:
    """Run a cycle of the collector.

    Args:
        inner: An empty store.
        count: Number of objects.

    Returns:
        CPU seconds, and the number of requests.
    """
    config = ConsumerConfig(store=STORE, gc=GarbageCollectorConfig(grace_period_ms=1))
    claim_for_writing(inner, config, runtime=SystemRuntime(), grace_ms=1)
    for _ in range(2):  # the manifest has the second half only
        fill(inner, [b"record"], count // 2)
        time.sleep(0.01)  # more than the grace period, and the times in the names differ
    store = FaultyStore(inner, SystemRuntime())
    began = time.process_time()
    report = GarbageCollector(store, config).run_once()
    took = time.process_time() - began
    assert report.deleted == count // 2
    return took, float(sum(store.operations.values()))
