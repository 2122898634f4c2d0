"""Helpers that access queues without Spark, and queries that restart."""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from opendata_buffer import Producer
from opendata_buffer.config import (
    DEFAULT_DATA_PATH_PREFIX,
    ProducerConfig,
    QueueConfig,
    StoreOptions,
)
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.formats.batch import (
    Transaction,
    batch_key,
    decode_batch,
    encode_batch,
    parse_location,
)
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

T = TypeVar("T")

FORMAT = "opendata-buffer"

TELLS = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether this Spark passes start, limit, and trigger to a Python source, and shows its report. On
Spark 4.0 and 4.1 a run with AvailableNow is one micro-batch, or the repeat of an unfinished one."""

LONG_S = 600
"""Milliseconds to wait for a query. Spark reports whether it ended in this time."""


def until_done(checkpoint: str, run: Callable[[], T]) -> T:
    """Run with AvailableNow once, or until nothing is left if Spark does not pass the trigger."""
    while True:
        before = logged(checkpoint, "commits")
        result = run()
        if TELLS or logged(checkpoint, "commits") == before:
            return result


def logged(checkpoint: str, name: str) -> list[int]:
    """Return the batches in the checkpoint's ``offsets`` or ``commits``."""
    paths = (Path(checkpoint) / name).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdigit())


# Filling and reading queues.


def produce(store: str, batches: Iterable[Iterable[bytes]], metadata: bytes = b"m") -> None:
    """Append one batch for each group of records."""
    with Producer(ProducerConfig(store=store)) as producer:
        for records in batches:
            producer.produce(list(records), metadata)
            producer.flush()


def orders(ids: Iterable[int]) -> list[bytes]:
    """Return records that the examples read."""
    return [json.dumps({"id": number, "amount": number * 10.0}).encode() for number in ids]


def numbered(begin: int, end: int) -> list[list[bytes]]:
    """Return batches of one record each, which is a number."""
    return [[b"%d" % number] for number in range(begin, end)]


def append(
    store: str,
    prefix: str,
    values: list[bytes],
    txn: Transaction | None = None,
    message: uuid.UUID | None = None,
) -> str:
    """Append a batch of a transaction, or a message of a partition. Return its location."""
    location = batch_key(prefix, SystemRuntime().ulid(), txn, message=message)
    open_store(store).put(location, encode_batch(values))
    ranges = (Metadata(0, SystemRuntime().now_ms(), b"m"),)
    open_queue(store, prefix).append([NewEntry(location, ranges)])
    return location


def open_queue(
    store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX, options: StoreOptions | None = None
) -> Queue:
    options = options or StoreOptions()
    config = QueueConfig(store=store, data_path_prefix=prefix, store_options=options)
    return Queue(open_store(store, options), config, runtime=SystemRuntime(), role="test")


def manifest(
    store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX, options: StoreOptions | None = None
) -> Manifest:
    """Return the manifest, which is empty if there is no queue."""
    return open_queue(store, prefix, options).read() or Manifest.empty()


def queued(store: str) -> list[int]:
    """Return the queued sequences."""
    return [entry.sequence for entry in manifest(store).entries()]


@dataclass(frozen=True)
class Written:
    """A decoded batch in a queue."""

    sequence: int
    location: str
    transaction: Transaction | None
    records: list[bytes]
    metadata: tuple[Metadata, ...]


def written(
    store: str, prefix: str = DEFAULT_DATA_PATH_PREFIX, options: StoreOptions | None = None
) -> list[Written]:
    """Return every queued batch."""
    found = open_store(store, options or StoreOptions())
    result = []
    for entry in manifest(store, prefix, options).entries():
        blob: Any = found.get(entry.location)
        parsed = parse_location(entry.location, prefix)
        assert parsed is not None
        each = decode_batch(blob.data)
        result.append(Written(entry.sequence, entry.location, parsed.txn, each, entry.metadata))
    return result


def records(batches: list[Written]) -> list[bytes]:
    return [record for batch in batches for record in batch.records]


def filtered(batches: list[Written], prefix: str = DEFAULT_DATA_PATH_PREFIX) -> list[bytes]:
    """Return the records that a reader with a transaction filter delivers."""
    passes = TransactionFilter(prefix)
    return records([batch for batch in batches if passes.offer(batch.sequence, batch.location)])


def drain(store: str) -> list[Written]:
    """Read and remove everything, as a consumer does."""
    taken, queue = written(store), open_queue(store)
    if taken:
        queue.dequeue(taken[-1].sequence, queue.claim_epoch(None).epoch)
    return taken


# Queries.


class Interrupted(Exception):
    """A sink that fails, on purpose."""


@dataclass
class Sink:
    """A sink that remembers each micro-batch, and fails in the given ones after the write."""

    batches: list[tuple[int, list[int]]] = field(default_factory=list)
    fail_in: int | None = None

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        values = sorted(int(bytes(row["value"])) for row in frame.select("value").collect())
        self.batches.append((batch_id, values))
        if batch_id == self.fail_in:
            self.fail_in = None
            raise Interrupted(f"failing in batch {batch_id}")

    @property
    def values(self) -> list[int]:
        return [value for _, values in self.batches for value in values]


@dataclass
class Query:
    """One query from a queue into a :class:`Sink`, including its restarts."""

    spark: SparkSession
    store: str
    checkpoint: str
    sink: Sink = field(default_factory=Sink)
    options: dict[str, str] = field(default_factory=dict)

    def start(self, write: Callable[[Any], Any] | None = None, **options: str) -> StreamingQuery:
        frame = (
            self.spark.readStream.format(FORMAT)
            .options(**{"gcEnabled": "false", **self.options, **options})
            .load(self.store)
        )
        writer = frame.writeStream.option("checkpointLocation", self.checkpoint)
        writer = writer.foreachBatch(self.sink)
        return (write(writer) if write else writer).start()

    @contextmanager
    def running(self, **options: str) -> Iterator[StreamingQuery]:
        query = self.start(**options)
        try:
            yield query
        finally:
            query.stop()

    def available_now(self, **options: str) -> StreamingQuery:
        """Read everything with Trigger.AvailableNow. Return the last run."""

        def run() -> StreamingQuery:
            query = self.start(lambda writer: writer.trigger(availableNow=True), **options)
            assert query.awaitTermination(LONG_S)
            return query

        return until_done(self.checkpoint, run)


class Pipe:
    """A query from text files into a buffer at ``url``. Each file is a micro-batch."""

    def __init__(self, spark: SparkSession, url: str, home: Path) -> None:
        self.spark = spark
        self.url = url
        self.checkpoint = home / "checkpoint"
        self.input = home / "input"
        self.input.mkdir()
        self.options: dict[str, str] = {}
        self.files = 0

    def feed(self, *lines: str) -> None:
        path = self.input / f"{self.files:05}.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        # The file source reads files by modification time.
        os.utime(path, (1_700_000_000 + self.files, 1_700_000_000 + self.files))
        self.files += 1

    @property
    def frame(self) -> DataFrame:
        reader = self.spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
        return reader.text(str(self.input))

    def run(self, frame: DataFrame | None = None, mode: str = "append", each: Any = None) -> None:
        """Write everything into the buffer, or pass each micro-batch to a function, then stop.

        Raises:
            Exception: The error of the query.
        """
        import pytest
        from pyspark.sql import datasource

        writer = (self.frame if frame is None else frame).writeStream.outputMode(mode)
        if each is None:
            if not hasattr(datasource, "DataSourceStreamArrowWriter"):
                pytest.skip("this Spark has no streaming sink of Arrow batches in Python")
            writer = writer.format(FORMAT).options(path=self.url, **self.options)
        else:
            writer = writer.foreachBatch(each)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    def forget_commit(self, batch: int) -> None:
        """Undo Spark's commit, as if the driver had died between the sink's commit and Spark's."""
        (self.checkpoint / "commits" / str(batch)).unlink()


def program(path: Path) -> Any:
    """Load a program of the examples as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
