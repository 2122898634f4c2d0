"""Many small batches through the source, from a store as slow as S3 Standard.

A store that is slow on purpose is nothing the product should offer, so a data source of our own
puts one between the source and its directory, in whichever process that runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import buffer_source.stream_reader
import opendata_buffer.consumer.fetch
from benchmarks.consumer import BATCHES, LATENCY_MS, SERIAL_BATCHES, SLOW, serial_seconds
from benchmarks.queries import started
from benchmarks.queues import fill, records_of
from benchmarks.table import Row
from buffer_source.options import SourceOptions
from buffer_source.stream_reader import BufferStreamReader
from opendata_buffer import Consumer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, StoreOptions
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.testing.faults import FaultyStore
from pyspark_opendata_buffer import DefaultSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
    from pyspark.sql.types import StructType

DIRECTORY = "slow-store"


def slow_store(url: str, options: StoreOptions | None = None) -> Store:
    store = open_store(url, options)
    return FaultyStore(store, SystemRuntime(), SLOW) if url.endswith(DIRECTORY) else store


def slow_down() -> None:
    for module in (buffer_source.stream_reader, opendata_buffer.consumer.fetch):
        module.open_store = slow_store  # type: ignore[attr-defined]


class SlowSource(DefaultSource):
    @classmethod
    def name(cls) -> str:
        return "slow-buffer"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return SlowReader(SourceOptions.from_spark(self.options), schema)


class SlowReader(BufferStreamReader):
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        slow_down()
        return super().read(partition)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        slow_down()  # the first call to the driver's reader
        super().prepareForTriggerAvailableNow()


def drain_row(spark: SparkSession, home: Path) -> Row:
    """Trigger.AvailableNow from the first look at the queue to the last acknowledgement."""
    spark.dataSource.register(SlowSource)
    directory = str(home / DIRECTORY)
    queued = fill(open_store(directory), records_of(100, 10), BATCHES)
    config = ConsumerConfig(store=directory, gc=GarbageCollectorConfig(enabled=False))
    with Consumer(config, store=slow_store(directory)) as consumer:
        serial = serial_seconds(consumer, SERIAL_BATCHES) / SERIAL_BATCHES
    frame = spark.readStream.format("slow-buffer").option("gcEnabled", "false").load(directory)

    def drain(attempt: int) -> float:
        queued.rewind()
        began = time.perf_counter()
        query = (
            frame.writeStream.format("noop")
            .option("checkpointLocation", str(home / f"drained-{attempt}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        taken = time.perf_counter() - began
        rows = sum(each["numInputRows"] for each in query.recentProgress)
        assert rows == BATCHES * queued.records, rows
        return taken

    taken = started(drain)
    speedup = serial * BATCHES / taken
    return Row(
        f"{BATCHES:,} batches of 10 records through Spark, {LATENCY_MS} ms storage / next_batch "
        "and ack",
        f"{speedup:.0f} x",
        ">= 20 x",
        speedup >= 20,
        f"{taken:.1f} s, the query's start included; one by one {serial * 1e3:.0f} ms a batch, "
        f"measured on {SERIAL_BATCHES}",
    )
