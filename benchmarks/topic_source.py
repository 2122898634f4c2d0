"""The streaming source over the partitions of a topic, beside one queue with the same batches.

Throughput: both are read by a query of their own, in turns and in random order; of each query the
micro-batches after the first count (the first one starts workers), by ``addBatch``. An idle
trigger: what ``latestOffset`` takes where nothing is new and each request takes as long as object
storage does; Spark adds the same to both.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.queries import started
from benchmarks.queues import fill, records_of
from benchmarks.table import Row
from buffer_source.options import SourceOptions
from buffer_source.schema import default_schema
from buffer_source.stream_reader import MicroBatchStream
from opendata_buffer.config import QueueConfig
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 16
TASKS = 2
WARM_UP = 1  # rounds that do not count
ROUNDS = 7
MICRO_BATCHES = 4  # of each query; the first does not count
OBJECTS = 32  # of a micro-batch
OBJECT_BYTES = 8 * 1024 * 1024
RECORD_BYTES = 1000
LATENCY_S = 0.060
LOOKS = 20


def speed_row(spark: SparkSession, home: Path) -> Row:
    """Rows per second out of 16 partitions and out of one queue."""
    records = records_of(RECORD_BYTES, OBJECT_BYTES // (RECORD_BYTES + 4))
    batches = OBJECTS * MICRO_BATCHES
    one, many = home / "one", home / "many"
    queues = {
        one: [fill(open_store(str(one)), records, batches)],
        many: [
            fill(open_store(str(many)), records, batches // PARTITIONS, prefix=name)
            for name in _topic(many).description.names
        ],
    }
    os.sync()  # or the disk writes what was queued while we measure
    seconds: dict[Path, list[float]] = {one: [], many: []}
    order = random.Random(7)
    for turn in range(WARM_UP + ROUNDS):
        for store in order.sample([one, many], 2):

            def query(attempt: int, store: Path = store, turn: int = turn) -> float:
                for queue in queues[store]:
                    queue.rewind()
                return _seconds(spark, store, home / f"checkpoint-{turn}-{store.name}-{attempt}")

            seconds[store].append(started(query))
    shutil.rmtree(home)  # gigabytes
    one_s, many_s = (statistics.median(seconds[each][WARM_UP:]) for each in (one, many))
    rows = len(records) * OBJECTS
    return Row(
        f"streaming source over {PARTITIONS} partitions / over one queue",
        f"{one_s / many_s:.0%}",
        ">= 95%",
        one_s / many_s >= 0.95,
        f"{rows / many_s / 1e3:,.0f} k rows/s against {rows / one_s / 1e3:,.0f} k rows/s",
    )


def idle_row() -> Row:
    """What an idle trigger costs more over 16 partitions than over one queue."""
    seconds = {name: _idle_seconds(name) for name in ("queue", "topic")}
    more_ms = (seconds["topic"] - seconds["queue"]) * 1000
    return Row(
        f"idle trigger over {PARTITIONS} partitions / over one queue, "
        f"{LATENCY_S * 1000:.0f} ms storage latency",
        f"{more_ms:+.0f} ms",
        "<= 30 ms more",
        more_ms <= 30,
        f"{seconds['topic'] * 1000:.0f} against {seconds['queue'] * 1000:.0f} ms",
    )


class FarStore(MemoryStore):
    """Each request takes as long as one to object storage in the same region, and more."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(LATENCY_S)
        return super().get(*args, **kwargs)

    def put_if(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(LATENCY_S)
        return super().put_if(*args, **kwargs)


def _idle_seconds(kind: str) -> float:
    store = FarStore()
    options = {"path": "/far", "gcEnabled": "false"}
    prefixes = ["ingest"]
    if kind == "topic":
        config = QueueConfig(store="/far")
        prefixes = Topic.create(config, PARTITIONS, store=store).description.names
    for prefix in prefixes:
        fill(store, [b"x"], 1, prefix=prefix)
    driver = MicroBatchStream(SourceOptions.from_spark(options), store, SystemRuntime())
    start = driver.latest_offset(None)
    driver.plan_input_partitions(None, start)
    driver.latest_offset(start)
    seconds = []
    for _ in range(LOOKS):
        began = time.perf_counter()
        assert driver.latest_offset(start) is start
        seconds.append(time.perf_counter() - began)
    driver.stop()
    return statistics.median(seconds)


def _topic(store: Path) -> Topic:
    return Topic.create(str(store), PARTITIONS)


def _seconds(spark: SparkSession, store: Path, checkpoint: Path) -> float:
    """Median of the micro-batches after the first."""
    frame = (
        spark.readStream.format("opendata-buffer")
        .option("maxBatchesPerTrigger", OBJECTS)
        .option("minPartitions", TASKS)
        .option("gcEnabled", "false")
        .schema(default_schema())  # or the topic would have a column more
        .load(str(store))
    )
    query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        while (query.lastProgress or {"batchId": -1})["batchId"] < MICRO_BATCHES - 1:
            if query.awaitTermination(0.1):
                break
    finally:
        query.stop()
    return statistics.median(
        each["durationMs"]["addBatch"] / 1000
        for each in query.recentProgress
        if 0 < each["batchId"] < MICRO_BATCHES
    )
