"""How fast is the library compared with Kafka and with Spark's own sources?

All run on the same machine with the same data. Each competitor runs with its defaults and tuned,
and the goal is against the better of the two. They take turns, each round begins with the next
one, and the median counts, with the least and the most next to it. Kafka's broker has no replicas
and does not wait for its disk, as its defaults are. Ours writes to a directory and waits for it.

A query reads the same rows in micro-batches of the same size into ``noop``, and the ``addBatch``
of the micro-batches after the first one counts. A sink writes the rows of Spark's source of rates.
Records that become columns are those of :func:`benchmarks.spark_source.typed_records`, as many in
as many files and micro-batches.

Without Java and Maven the suite measures our side alone. :mod:`benchmarks.latency` has the rows
about the time of a single record.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import kafka, latency
from benchmarks.kafka import TUNED_SOURCE
from benchmarks.measuring import MIB, in_turns, sized
from benchmarks.stores import NO_COLLECTOR, Queued, log_events, records_of
from benchmarks.stores import fill as fill_queue
from benchmarks.tables import Row, not_run
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig, fetch_many
from opendata_buffer.stores.local import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORDS = sized(500_000, tiny=200)
BATCHES = sized(10, tiny=2)
PARTITIONS = sized(8, tiny=1)
ROUNDS = sized(5, tiny=1)
WARM_UP = sized(1, tiny=0)
FIRST_WARM_UP = sized(2, tiny=0)
"""Rounds of the first Spark row that do not count: the JVM compiles code that all rows run."""

PRODUCERS: dict[str, dict[str, Any]] = {
    "confluent-kafka": {"queue.buffering.max.messages": 1_000_000},
    "confluent-kafka, tuned": {
        "queue.buffering.max.messages": 10_000_000,
        "queue.buffering.max.kbytes": 2_000_000,
        "linger.ms": 50,
        "batch.size": 1_000_000,
        "compression.type": "lz4",
    },
}
CONSUMERS: dict[str, dict[str, Any]] = {
    "confluent-kafka": {},
    "confluent-kafka, tuned": {
        "fetch.message.max.bytes": 16_000_000,
        "fetch.max.bytes": 64_000_000,
        "queued.min.messages": 1_000_000,
        "queued.max.messages.kbytes": 500_000,
        "check.crcs": False,
    },
}

OBJECTS = sized(16, tiny=2)  # of a micro-batch, and as many files
OBJECT_BYTES = sized(8 * MIB, tiny=MIB // 64)
MICRO_BATCHES = 2  # of a query over bytes; the second one counts
SINK_ROWS = sized(400_000, tiny=200)
TUNED_SINK = {
    "kafka.linger.ms": "50",
    "kafka.batch.size": "1000000",
    "kafka.buffer.memory": "134217728",
    "kafka.compression.type": "lz4",
}
THROWN_AWAY = "a writer in Python that throws the rows away, the limit of any sink in Python"
NOOP = "noop, the rows made and thrown away in the JVM"

Goals = Mapping[str, tuple[float | None, tuple[str, ...]]]
"""For each of our ways, the goal as a multiple of the best of other ways. The multiple is ``None``
for a way that only shows a limit."""


def rows(part: str = "") -> Iterator[Row]:
    """Measure this suite.

    Args:
        part: ``python`` or ``spark`` for one part only.

    Yields:
        Its rows.
    """
    with kafka.running_if_possible() as address:
        if address is None:
            yield not_run("Kafka", kafka.why_not())
        if part in ("", "python"):
            yield from _producer_rows(address)
            yield from _consumer_rows(address)
            yield from latency.rows(address)
        if part in ("", "spark"):
            with kafka.spark_session(address) as (spark, home):
                yield from spark_rows(spark, home, address)


def spark_rows(spark: SparkSession, home: Path, address: str | None) -> Iterator[Row]:
    """Measure the rows that need Spark.

    Args:
        spark: A session, with Kafka's connector if there is an address.
        home: An empty directory.
        address: Address of Kafka, or ``None`` to measure our side alone.

    Yields:
        The rows.
    """
    for size, goal in ((100, 2.5), (1000, 1.0)):
        yield from _bytes_rows(spark, address, home / f"bytes-{size}", size, goal)
    yield from _json_rows(spark, address, home / "json")
    yield from _sink_rows(spark, address)
    yield from latency.spark_rows(spark, address)


# ---- reports


def _report(what: str, rates: Mapping[str, list[float]], goals: Goals) -> Iterator[Row]:
    """Give a row for each way.

    Args:
        what: The thing that was measured.
        rates: Million records or rows per second of each round.
        goals: The goals. Ways that were not measured are ignored.
    """
    for name, own_rates in rates.items():
        times, others = goals.get(name, (None, ()))
        measured_others = [other for other in others if other in rates]
        if not measured_others:
            yield Row(f"{what}: {name}", _spread(own_rates))
            continue
        best = max(statistics.median(rates[other]) for other in measured_others)
        ratio = statistics.median(own_rates) / best
        yield Row(
            f"{what}: {name} / the best of {', '.join(measured_others)}",
            f"{ratio:.2f} x",
            "" if times is None else f">= {times:g} x",
            None if times is None else ratio >= times,
            _spread(own_rates),
        )


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.2f} M/s ({min(rates):.2f} to {max(rates):.2f})"


# ---- producers and consumers in Python


def _producer_rows(address: str | None) -> Iterator[Row]:
    records = records_of(100, RECORDS)
    measures: dict[str, Callable[[], float]] = {"send": partial(_send, records)}
    if address is not None:
        kafka.fill(address, "produced", PARTITIONS, [], 0)
        for name, settings in PRODUCERS.items():
            measures[name] = partial(_send_to_kafka, address, settings, records)
    rates = in_turns(measures, ROUNDS, WARM_UP)
    yield from _report("a record of 100 bytes a call", rates, {"send": (1.0, tuple(PRODUCERS))})


def _send(records: list[bytes]) -> float:
    """Return million records per second until all are durable."""
    with tempfile.TemporaryDirectory() as home:
        with Producer(ProducerConfig(store=home)) as producer:
            send = producer.send
            started = time.perf_counter()
            handles = [send(record) for record in records]
            producer.flush()
            taken = time.perf_counter() - started
        assert handles[-1].done()
    return len(records) / taken / 1e6


def _send_to_kafka(address: str, settings: dict[str, Any], records: list[bytes]) -> float:
    producer = kafka.client().Producer({"bootstrap.servers": address, **settings})
    produce, poll = producer.produce, producer.poll
    started = time.perf_counter()
    for record in records:
        try:
            produce("produced", record)
        except BufferError:
            poll(0.1)
            produce("produced", record)
    producer.flush()
    return len(records) / (time.perf_counter() - started) / 1e6


def _consumer_rows(address: str | None) -> Iterator[Row]:
    records = records_of(100, RECORDS // BATCHES)
    with tempfile.TemporaryDirectory() as directory:
        queued = fill_queue(LocalStore(directory), records, BATCHES)
        measures: dict[str, Callable[[], float]] = {
            "to Arrow": partial(_consume, queued, directory, to_arrow=True),
            "to bytes": partial(_consume, queued, directory, to_arrow=False),
        }
        if address is not None:
            kafka.fill(address, "consumed", PARTITIONS, records, BATCHES)
            for name, settings in CONSUMERS.items():
                measures[name] = partial(_consume_from_kafka, address, settings, RECORDS)
        rates = in_turns(measures, ROUNDS, WARM_UP)
    others = tuple(CONSUMERS)
    goals = {"to Arrow": (2.0, others), "to bytes": (2.0, others)}
    yield from _report("reading records of 100 bytes", rates, goals)


def _consume(queued: Queued, directory: str, *, to_arrow: bool) -> float:
    """Return million records per second."""
    queued.rewind()
    with Consumer(ConsumerConfig(store=directory, gc=NO_COLLECTOR)) as consumer:
        handle = consumer.fetch_handle()
        started = time.perf_counter()
        descriptors = consumer.next_descriptors(BATCHES)
        if to_arrow:
            count = sum(len(batch.values) for batch in fetch_many(handle.fetch_arrow, descriptors))
        else:
            count = sum(len(batch.values) for batch in fetch_many(handle.fetch, descriptors))
        taken = time.perf_counter() - started
    assert count == queued.records * BATCHES
    return count / taken / 1e6


def _consume_from_kafka(address: str, settings: dict[str, Any], count: int) -> float:
    consumer = kafka.client().Consumer(
        {
            "bootstrap.servers": address,
            "group.id": f"bench-{time.perf_counter_ns()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **settings,
        }
    )
    consumer.subscribe(["consumed"])
    # Joining a group is not part of the measurement: the clock starts with the first record.
    found = len(consumer.consume(1, timeout=30))
    started = time.perf_counter()
    while found < count:
        # Asking for more records than are left would wait until the timeout.
        wanted = min(10_000, count - found)
        values = [message.value() for message in consumer.consume(wanted, timeout=10)]
        if not values:
            raise RuntimeError(f"Kafka gave {found} of {count} records")
        found += len(values)
    taken = time.perf_counter() - started
    consumer.close()
    return count / taken / 1e6


# ---- Spark


class Sources:
    """The same records in a queue, in a topic of Kafka, and in files.

    Args:
        spark: A session, with Kafka's connector if there is an address.
        address: Address of Kafka, or ``None``.
        home: A directory that does not exist yet.
        records: The records of one object or file.
        forms: Formats of the files: ``text``, ``json``, ``parquet``.
        micro_batches: Micro-batches of a query. The first one does not count.
    """

    def __init__(
        self,
        spark: SparkSession,
        address: str | None,
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
        self._rows = len(records) * OBJECTS
        self._micro_batches = micro_batches
        batches = OBJECTS * micro_batches
        self._topic = f"topic-{home.name}"
        self._queued = fill_queue(LocalStore(home / "queue"), records, batches)
        if address is not None:
            kafka.fill(address, self._topic, PARTITIONS, records, batches)
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
        os.sync()  # so that the disk does not write the files during the measurement

    def ours(self, **options: str) -> DataFrame:
        """Return a stream from the queue."""
        from benchmarks.spark_source import SCHEMA

        self._queued.rewind()
        reader = self._spark.readStream.format("opendata-buffer").options(
            maxBatchesPerTrigger=OBJECTS, minPartitions=2, gcEnabled="false", **options
        )
        if "valueFormat" in options:
            reader = reader.schema(SCHEMA)
        return reader.load(str(self._home / "queue"))

    def kafka(self, options: Mapping[str, str], *, typed: bool = False) -> DataFrame:
        """Open a stream from the topic.

        Args:
            options: More options of the connector.
            typed: Whether ``from_json`` makes columns of the values.

        Returns:
            The stream.
        """
        from benchmarks.spark_source import SCHEMA

        assert self._address is not None
        frame = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self._address)
            .option("subscribe", self._topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self._rows)
            .options(**options)
            .load()
        )
        if not typed:
            return frame
        return frame.selectExpr(f"from_json(CAST(value AS STRING), '{SCHEMA}') AS r").select("r.*")

    def files(self, form: str) -> DataFrame:
        """Return a stream from the files of one format."""
        from benchmarks.spark_source import SCHEMA

        schema = SCHEMA if form == "json" else "value STRING"
        reader = self._spark.readStream.format(form).schema(schema)
        return reader.option("maxFilesPerTrigger", OBJECTS).load(str(self._home / form))

    def rate(self, stream: Callable[[], DataFrame]) -> float:
        """Run a query over a stream, and return its million rows per second."""
        from benchmarks.queries import micro_batch_seconds, started

        def query(attempt: int) -> float:
            del attempt
            self._turn += 1
            checkpoint = self._home / f"checkpoint-{self._turn}"
            return micro_batch_seconds(stream(), checkpoint, self._micro_batches)

        return self._rows / started(query) / 1e6


def _bytes_rows(
    spark: SparkSession, address: str | None, home: Path, size: int, goal: float
) -> Iterator[Row]:
    count = OBJECT_BYTES // (size + 4)
    if size <= 263:
        events = log_events(random.Random(7), 263)
        records = ([event[:size] for event in events] * 4)[:count]
    else:
        records = _text_records(size, count)
    sources = Sources(spark, address, home, records, forms=("text", "parquet"))
    streams: dict[str, Callable[[], DataFrame]] = {
        "ours": sources.ours,
        **_kafka_streams(sources, address, "Kafka", typed=False),
        "text files": partial(sources.files, "text"),
        "Parquet files": partial(sources.files, "parquet"),
    }
    measures = {name: partial(sources.rate, stream) for name, stream in streams.items()}
    rates = in_turns(measures, ROUNDS, FIRST_WARM_UP if size == 100 else WARM_UP)
    goals = {"ours": (goal, ("Kafka", "Kafka, tuned"))}
    yield from _report(f"Spark source, values of {size:,} bytes", rates, goals)
    shutil.rmtree(home)


def _kafka_streams(
    sources: Sources, address: str | None, name: str, *, typed: bool
) -> dict[str, Callable[[], DataFrame]]:
    """Return Kafka's streams with default and tuned options, or nothing without a broker."""
    if address is None:
        return {}
    return {
        name: partial(sources.kafka, {}, typed=typed),
        f"{name}, tuned": partial(sources.kafka, TUNED_SOURCE, typed=typed),
    }


def _json_rows(spark: SparkSession, address: str | None, home: Path) -> Iterator[Row]:
    from benchmarks.spark_source import TYPED_MICRO_BATCHES, typed_records

    sources = Sources(
        spark,
        address,
        home,
        typed_records(),
        forms=("json",),
        micro_batches=TYPED_MICRO_BATCHES,
    )
    ours, files, theirs = "ours, valueFormat=json", "JSON files", "Kafka and from_json"
    streams: dict[str, Callable[[], DataFrame]] = {
        ours: partial(sources.ours, valueFormat="json"),
        **_kafka_streams(sources, address, theirs, typed=True),
        files: partial(sources.files, "json"),
    }
    measures = {name: partial(sources.rate, stream) for name, stream in streams.items()}
    rates = in_turns(measures, ROUNDS, WARM_UP)
    goals = {ours: (2.0, (theirs, f"{theirs}, tuned"))}
    yield from _report("Spark source, JSON into columns", rates, goals)
    ratio = statistics.median(rates[ours]) / statistics.median(rates[files])
    yield Row(
        "Spark source, JSON into columns: ours / JSON files", f"{ratio:.2f} x", ">= 1 x", ratio >= 1
    )
    shutil.rmtree(home)


def _sink_rows(spark: SparkSession, address: str | None) -> Iterator[Row]:
    from benchmarks.spark_sink import NullSink

    event = json.dumps({"user": "user-%", "kind": "click", "url": "/products/1/details"})
    values = {
        "100-byte values": "rpad(CAST(value AS STRING), 100, 'x') AS value",
        "JSON": f"rpad(replace('{event}', '%', CAST(value AS STRING)), 263, ' ') AS value",
    }
    spark.dataSource.register(NullSink)
    for what, goal in (("100-byte values", 2.5), ("JSON", 1.5)):
        frame = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", SINK_ROWS)
            .option("numPartitions", 2)
            .load()
            .selectExpr(values[what])
        )
        measures: dict[str, Callable[[], float]] = {
            "ours": partial(_sink_rate, frame, "opendata-buffer", {}),
        }
        if address is not None:
            to_kafka = {"kafka.bootstrap.servers": address, "topic": f"sink-{what.split('-')[0]}"}
            kafka.fill(address, to_kafka["topic"], PARTITIONS, [], 0)
            measures["Kafka"] = partial(_sink_rate, frame, "kafka", to_kafka)
            measures["Kafka, tuned"] = partial(_sink_rate, frame, "kafka", to_kafka | TUNED_SINK)
        measures[THROWN_AWAY] = partial(_sink_rate, frame, NullSink.name(), {})
        measures[NOOP] = partial(_sink_rate, frame, "noop", {})
        rates = in_turns(measures, ROUNDS, WARM_UP)
        others = ("Kafka", "Kafka, tuned")
        goals: Goals = {
            "ours": (goal, others),
            THROWN_AWAY: (None, others),
            NOOP: (None, others),
        }
        yield from _report(f"Spark sink, {what}", rates, goals)


def _sink_rate(frame: DataFrame, sink: str, options: Mapping[str, str]) -> float:
    """Return million rows per second of a sink."""
    from benchmarks.queries import micro_batch_seconds, started

    def query(attempt: int) -> float:
        del attempt
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            own = {"path": f"{home}/store"} if sink == "opendata-buffer" else options
            return micro_batch_seconds(
                frame, f"{home}/checkpoint", MICRO_BATCHES, sink=sink, options=own
            )

    return SINK_ROWS / started(query) / 1e6


def _text_records(size: int, count: int) -> list[bytes]:
    """Return random records that are also one line of text each."""
    return [record.hex().encode()[:size] for record in records_of((size + 1) // 2, count)]
