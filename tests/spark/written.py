"""A stream into a buffer, and what the sink wrote, seen without Spark."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import datasource

from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig, StoreOptions
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.formats.manifest import Manifest, Metadata
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Pipe:
    """Text files in, a buffer at ``url`` out; each file is a micro-batch."""

    def __init__(self, spark: SparkSession, url: str, checkpoint: str, home: Path) -> None:
        self.spark = spark
        self.url = url
        self.checkpoint = Path(checkpoint)
        self.input = home / "input"
        self.input.mkdir()
        self.options: dict[str, str] = {}
        self.files = 0

    def feed(self, *lines: str) -> None:
        path = self.input / f"{self.files:05}.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        # The file source takes them by modification time.
        os.utime(path, (1_700_000_000 + self.files, 1_700_000_000 + self.files))
        self.files += 1

    @property
    def frame(self) -> DataFrame:
        reader = self.spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
        return reader.text(str(self.input))

    def run(self, frame: DataFrame | None = None, mode: str = "append", each: Any = None) -> None:
        """Write all there is into the buffer, or give each micro-batch to a function; then stop.

        Raises what the query fails with.
        """
        writer = (self.frame if frame is None else frame).writeStream.outputMode(mode)
        if each is None:
            if not hasattr(datasource, "DataSourceStreamArrowWriter"):
                pytest.skip("this Spark has no streaming sink of Arrow batches in Python")
            writer = writer.format("opendata-buffer").options(path=self.url, **self.options)
        else:
            writer = writer.foreachBatch(each)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    def forget_commit(self, batch: int) -> None:
        """As if the driver died after the sink's commit, before Spark's."""
        (self.checkpoint / "commits" / str(batch)).unlink()


@dataclass(frozen=True)
class Queued:
    sequence: int
    location: str
    transaction: Transaction | None
    records: list[bytes]
    metadata: tuple[Metadata, ...]


def open_queue(
    store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX, options: StoreOptions | None = None
) -> Queue:
    options = options or StoreOptions()
    config = QueueConfig(store=store, data_path_prefix=prefix, store_options=options)
    return Queue(open_store(store, options), config, runtime=SystemRuntime(), role="test")


def queued(
    store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX, options: StoreOptions | None = None
) -> list[Queued]:
    """Every queued batch, decoded."""
    found = open_store(store, options or StoreOptions())
    manifest = open_queue(store, prefix, options).read() or Manifest.empty()
    result = []
    for entry in manifest.entries():
        blob: Any = found.get(entry.location)
        parsed = parse_location(entry.location, prefix)
        assert parsed is not None
        each = decode_batch(blob.data)
        result.append(Queued(entry.sequence, entry.location, parsed.txn, each, entry.metadata))
    return result


def records(batches: list[Queued]) -> list[bytes]:
    return [record for each in batches for record in each.records]


def filtered(batches: list[Queued], prefix: str = DEFAULT_DATA_PATH_PREFIX) -> list[bytes]:
    """The records a reader with a transaction filter passes on."""
    passes = TransactionFilter(prefix)
    return records([each for each in batches if passes.offer(each.sequence, each.location)])


def drain(store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX) -> list[Queued]:
    """Take everything, as a consumer does."""
    taken = queued(store, prefix)
    queue = open_queue(store, prefix)
    if taken:
        queue.dequeue(taken[-1].sequence, queue.claim_epoch(None).epoch)
    return taken
