"""Spark's sources and sinks beside each other: ours, Kafka's, and those of files.

A query reads the same rows in micro-batches of the same size into ``noop``; what counts is the
``addBatch`` of those after the first one, which starts workers. A sink writes what a source of
rates makes. Records that become columns are those of ``benchmarks.typed_source``, as many in as
many files and micro-batches.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.codec import logs
from benchmarks.kafka import CONNECTOR, fill, jars
from benchmarks.latency import spark_latency_rows
from benchmarks.peers import PARTITIONS, Turns
from benchmarks.queries import started
from benchmarks.queues import fill as fill_queue
from benchmarks.queues import records_of
from benchmarks.spark_sink import NullSink
from benchmarks.table import Row
from benchmarks.typed_source import MICRO_BATCHES as TYPED_MICRO_BATCHES
from benchmarks.typed_source import OBJECTS, SCHEMA, typed_records
from opendata_buffer.stores.local import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MIB = 1024 * 1024
OBJECT_BYTES = 8 * MIB
MICRO_BATCHES = 2  # of a query of bytes; the second one counts
FIRST_WARM_UP, WARM_UP = 2, 1
"""Rounds that do not count: the JVM compiles what all of them run."""

SINK_ROWS = 400_000
CONNECTOR_JARS = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")
"""The rest of what it depends on is Spark's own."""

TUNED_SOURCE = {
    "kafka.max.partition.fetch.bytes": "16000000",
    "kafka.fetch.max.bytes": "64000000",
    "kafka.max.poll.records": "20000",
    "kafka.receive.buffer.bytes": "4000000",
    "kafka.check.crcs": "false",
}
TUNED_SINK = {
    "kafka.linger.ms": "50",
    "kafka.batch.size": "1000000",
    "kafka.buffer.memory": "134217728",
    "kafka.compression.type": "lz4",
}
THROWN_AWAY = "a writer in Python that throws the rows away, the limit of any sink in Python"
NOOP = "noop, the rows made and thrown away in the JVM"


class Sources:
    """The same records in a queue, in a topic of Kafka's, and in files.

    Args:
        spark: A session with Kafka's connector.
        address: Of the broker.
        home: A directory of their own.
        records: Of one object, or file.
        forms: Of files that are written as well: ``text``, ``json``, ``parquet``.
        micro_batches: Of a query; the first one does not count.
    """

    def __init__(
        self,
        spark: SparkSession,
        address: str,
        home: Path,
        records: list[bytes],
        *,
        forms: tuple[str, ...],
        micro_batches: int = MICRO_BATCHES,
    ) -> None:
        home.mkdir()
        self._spark = spark
        self._address = address
        self._home = home
        self._turn = 0
        self.rows = len(records) * OBJECTS
        self._micro_batches = micro_batches
        batches = OBJECTS * micro_batches
        self._topic = f"topic-{home.name}"
        self._queued = fill_queue(LocalStore(home / "queue"), records, batches)
        fill(address, self._topic, PARTITIONS, records, batches)
        lines = b"\n".join(records) + b"\n"
        table = pa.table({"value": pa.array(records, pa.string())})
        for form in forms:
            (home / form).mkdir()
            for number in range(batches):
                file = home / form / f"{number:05d}"
                if form == "parquet":
                    pq.write_table(table, file.with_suffix(".parquet"))
                else:
                    file.write_bytes(lines)
        os.sync()  # or the disk writes what was made while we measure

    def ours(self, **options: str) -> DataFrame:
        """A stream from the queue."""
        self._queued.rewind()
        reader = self._spark.readStream.format("opendata-buffer").options(
            maxBatchesPerTrigger=OBJECTS, minPartitions=2, gcEnabled="false", **options
        )
        if "valueFormat" in options:
            reader = reader.schema(SCHEMA)
        return reader.load(str(self._home / "queue"))

    def kafka(self, options: dict[str, str], *, typed: bool = False) -> DataFrame:
        """A stream from the topic."""
        frame = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self._address)
            .option("subscribe", self._topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self.rows)
            .options(**options)
            .load()
        )
        if not typed:
            return frame
        return frame.selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS r").select("r.*")

    def files(self, form: str) -> DataFrame:
        """A stream from files."""
        schema = SCHEMA if form == "json" else "value STRING"
        reader = self._spark.readStream.format(form).schema(schema)
        return reader.option("maxFilesPerTrigger", OBJECTS).load(str(self._home / form))

    def rate(self, frame: Callable[[], DataFrame]) -> float:
        """M rows/s of a query."""

        def query(attempt: int) -> float:
            del attempt
            self._turn += 1
            checkpoint = self._home / f"checkpoint-{self._turn}"
            return _seconds(frame(), "noop", str(checkpoint), {}, self._micro_batches)

        return self.rows / started(query) / 1e6


@contextmanager
def session_with_kafka() -> Iterator[tuple[SparkSession, Path]]:
    """A session with Kafka's connector, and a directory of its own."""
    from benchmarks.spark import session

    home = Path(tempfile.mkdtemp(prefix="buffer-bench-"))
    found = [str(jar) for jar in jars(CONNECTOR) if jar.name.startswith(CONNECTOR_JARS)]
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {','.join(found)} pyspark-shell"
    spark = session(home)
    try:
        yield spark, home
    finally:
        spark.stop()
        del os.environ["PYSPARK_SUBMIT_ARGS"]
        shutil.rmtree(home, ignore_errors=True)


def spark_rows(address: str) -> Iterator[Row]:
    """All lines that need Spark, in one session."""
    with session_with_kafka() as (spark, home):
        for size, times in ((100, 2.5), (1000, 1.0)):
            yield from _bytes_rows(spark, address, home / f"bytes-{size}", size, times)
        yield from _json_rows(spark, address, home / "json")
        yield from _sink_rows(spark, address)
        yield from spark_latency_rows(spark, address)


def _bytes_rows(
    spark: SparkSession, address: str, home: Path, size: int, times: float
) -> Iterator[Row]:
    records = [record[:size] for record in logs(random.Random(7), max(size, 263))]
    records = (records * 4)[: OBJECT_BYTES // (size + 4)]
    records = records if size <= 263 else records_of_text(size, OBJECT_BYTES // (size + 4))
    sources = Sources(spark, address, home, records, forms=("text", "parquet"))
    turns = Turns(
        {
            "ours": partial(sources.rate, sources.ours),
            "Kafka": partial(sources.rate, partial(sources.kafka, {})),
            "Kafka, tuned": partial(sources.rate, partial(sources.kafka, TUNED_SOURCE)),
            "text files": partial(sources.rate, partial(sources.files, "text")),
            "Parquet files": partial(sources.rate, partial(sources.files, "parquet")),
        }
    )
    turns.run(warm_up=FIRST_WARM_UP if size == 100 else WARM_UP)
    goals = {"ours": (times, ("Kafka", "Kafka, tuned"))}
    yield from turns.rows(f"Spark source, values of {size:,} bytes", goals)
    shutil.rmtree(home)


def _json_rows(spark: SparkSession, address: str, home: Path) -> Iterator[Row]:
    sources = Sources(
        spark,
        address,
        home,
        typed_records(),
        forms=("json",),
        micro_batches=TYPED_MICRO_BATCHES,
    )
    kafka = partial(sources.kafka, typed=True)
    turns = Turns(
        {
            "ours, valueFormat=json": partial(
                sources.rate, partial(sources.ours, valueFormat="json")
            ),
            "Kafka and from_json": partial(sources.rate, partial(kafka, {})),
            "Kafka and from_json, tuned": partial(sources.rate, partial(kafka, TUNED_SOURCE)),
            "JSON files": partial(sources.rate, partial(sources.files, "json")),
        }
    )
    turns.run(warm_up=WARM_UP)
    ours, *others = turns.rates
    yield from turns.rows("Spark source, JSON into columns", {ours: (2.0, tuple(others[:2]))})
    files = statistics.median(turns.rates["JSON files"])
    ratio = statistics.median(turns.rates[ours]) / files
    yield Row(
        "Spark source, JSON into columns: ours / JSON files", f"{ratio:.2f} x", ">= 1 x", ratio >= 1
    )
    shutil.rmtree(home)


def _sink_rows(spark: SparkSession, address: str) -> Iterator[Row]:
    event = json.dumps({"user": "user-%", "kind": "click", "url": "/products/1/details"})
    values = {
        "100-byte values": "rpad(CAST(value AS STRING), 100, 'x') AS value",
        "JSON": f"rpad(replace('{event}', '%', CAST(value AS STRING)), 263, ' ') AS value",
    }
    spark.dataSource.register(NullSink)
    for what, times in (("100-byte values", 2.5), ("JSON", 1.5)):
        frame = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", SINK_ROWS)
            .option("numPartitions", 2)
            .load()
            .selectExpr(values[what])
        )
        to_kafka = {"kafka.bootstrap.servers": address, "topic": f"sink-{what.split('-')[0]}"}
        fill(address, to_kafka["topic"], PARTITIONS, [], 0)
        turns = Turns(
            {
                "ours": partial(_sink_rate, frame, "opendata-buffer", {}),
                "Kafka": partial(_sink_rate, frame, "kafka", to_kafka),
                "Kafka, tuned": partial(_sink_rate, frame, "kafka", to_kafka | TUNED_SINK),
                THROWN_AWAY: partial(_sink_rate, frame, NullSink.name(), {}),
                NOOP: partial(_sink_rate, frame, "noop", {}),
            }
        )
        turns.run(warm_up=WARM_UP)
        kafka = ("Kafka", "Kafka, tuned")
        goals = {"ours": (times, kafka), THROWN_AWAY: (None, kafka), NOOP: (None, kafka)}
        yield from turns.rows(f"Spark sink, {what}", goals)


def _sink_rate(frame: DataFrame, sink: str, options: dict[str, str]) -> float:
    def query(attempt: int) -> float:
        del attempt
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            there = {"path": f"{home}/store"} if sink == "opendata-buffer" else options
            return _seconds(frame, sink, f"{home}/checkpoint", there, MICRO_BATCHES)

    return SINK_ROWS / started(query) / 1e6


def records_of_text(size: int, count: int) -> list[bytes]:
    """Random records that are text, too, and one line each."""
    return [record.hex().encode()[:size] for record in records_of((size + 1) // 2, count)]


def _seconds(
    frame: DataFrame, sink: str, checkpoint: str, options: dict[str, str], batches: int
) -> float:
    """Median seconds of the micro-batches after the first."""
    writer = frame.writeStream.format(sink).option("checkpointLocation", checkpoint)
    query = writer.options(**options).start()
    try:
        while (query.lastProgress or {"batchId": -1})["batchId"] < batches - 1:
            if query.awaitTermination(0.05):
                break
    finally:
        query.stop()
    times: list[float] = [
        each["durationMs"]["addBatch"] / 1000
        for each in query.recentProgress
        if 0 < each["batchId"] < batches
    ]
    return statistics.median(times)
