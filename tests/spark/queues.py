"""A queue to stream from, and a sink that remembers: what the source tests have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from opendata_buffer.config import ConsumerConfig, ProducerConfig, QueueConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer.producer import Producer
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

T = TypeVar("T")

TELLS = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether this Spark tells a Python source its start, limit and trigger, and shows its report. On
Spark 4.0 and 4.1 a run with AvailableNow is one micro-batch, or the repeat of an unfinished one."""


def until_done(checkpoint: str, run: Callable[[], T]) -> T:
    """Run with AvailableNow: once, or where Spark does not tell that, until nothing is left."""
    while True:
        before = logged(checkpoint, "commits")
        result = run()
        if TELLS or logged(checkpoint, "commits") == before:
            return result


def logged(checkpoint: str, name: str) -> list[int]:
    """Batches in the checkpoint's ``offsets`` or ``commits``."""
    paths = (Path(checkpoint) / name).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdigit())


def produce(
    store: str,
    batches: Iterable[Iterable[bytes]],
    metadata: bytes = b"m",
    *,
    recreate: bool = False,
) -> None:
    """Append one batch for each group of records."""
    with Producer(ProducerConfig(store=store, recreate=recreate)) as producer:
        for records in batches:
            producer.produce(list(records), metadata)
            producer.flush()


def numbered(begin: int, end: int) -> list[list[bytes]]:
    """Batches of one record each, which is its number."""
    return [[b"%d" % number] for number in range(begin, end)]


def manifest(store: str) -> Manifest:
    config = QueueConfig(store=store)
    opened = open_store(store)
    read = Queue(opened, config, runtime=SystemRuntime(), role="test").read()
    assert read is not None
    return read


def queued(store: str) -> list[int]:
    return [entry.sequence for entry in manifest(store).entries()]


def consume(store: str, through: int) -> None:
    """Another consumer takes the queue over and reads up to a sequence."""
    with Consumer(ConsumerConfig(store=store)) as consumer:
        consumer.next_descriptors(1_000_000)
        consumer.ack_through(through)


class Interrupted(Exception):
    """A sink that fails, on purpose."""


@dataclass
class Sink:
    """Remembers each micro-batch; fails in those it is told to, after it wrote them."""

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
    """One query over its restarts."""

    spark: SparkSession
    store: str
    checkpoint: str
    sink: Sink = field(default_factory=Sink)
    options: dict[str, str] = field(default_factory=dict)

    def start(self, write: Callable[[Any], Any] | None = None, **options: str) -> StreamingQuery:
        frame = (
            self.spark.readStream.format("opendata-buffer")
            .options(**{"gcEnabled": "false", **self.options, **options})
            .load(self.store)
        )
        writer = frame.writeStream.option("checkpointLocation", self.checkpoint)
        writer = writer.foreachBatch(self.sink)
        return (write(writer) if write else writer).start()

    @contextmanager
    def running(
        self, write: Callable[[Any], Any] | None = None, **options: str
    ) -> Iterator[StreamingQuery]:
        query = self.start(write, **options)
        try:
            yield query
        finally:
            query.stop()

    def available_now(self, **options: str) -> StreamingQuery:
        """Read all that is there with Trigger.AvailableNow; returns the last run."""

        def run() -> StreamingQuery:
            query = self.start(lambda writer: writer.trigger(availableNow=True), **options)
            assert query.awaitTermination(600)
            return query

        return until_done(self.checkpoint, run)

    def log(self, name: str) -> list[int]:
        """Batches in the checkpoint's ``offsets`` or ``commits``."""
        return logged(self.checkpoint, name)
