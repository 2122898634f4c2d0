"""How fast does the streaming source read?

* :func:`rows`: bytes, compared with a Python source that only hands over Arrow batches
  (:mod:`benchmarks.ceiling`), and an idle trigger.
* :func:`typed_rows`: JSON records into columns, compared with ``from_json`` and with Spark's own
  reading of files.
* :func:`drain_rows`: many small batches, from a store with the latency of object storage.

A source and its yardsticks read the same number of rows of the same size, in as many tasks and
micro-batches, into ``noop``. They take turns, one query each, in random order, after rounds that
do not count: for a minute the JVM compiles code that all of them run. The time that counts is
``addBatch`` of the micro-batches after the first one.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

import buffer_source.stream_reader
import opendata_buffer.consumer.fetch
from benchmarks.ceiling import TASKS, Ceiling, CeilingReader
from benchmarks.consumer import BATCHES, LATENCY_MS, SERIAL_BATCHES, SLOW, serial_seconds
from benchmarks.measuring import MIB, in_random_turns, sized
from benchmarks.queries import drained, micro_batch_seconds, started
from benchmarks.stores import NO_COLLECTOR, as_slow_as_s3, fill, log_events, records_of
from benchmarks.tables import Row
from buffer_source.options import SourceOptions
from buffer_source.stream_reader import BufferStreamReader
from buffer_source.task import RowBuilder
from opendata_buffer import Consumer
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, ConsumerConfig, StoreOptions
from opendata_buffer.consumer.fetch import Records
from opendata_buffer.formats.arrow import decode_arrow
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.internal_parts import internals
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.values import ValueOptions
from pyspark_opendata_buffer import DefaultSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.readwriter import DataStreamReader
    from pyspark.sql.types import StructType

OBJECT_BYTES = sized(8 * MIB, tiny=MIB // 64)
WARM_UP = sized(2, tiny=0)  # rounds that do not count
ROUNDS = sized(11, tiny=1)
MICRO_BATCHES = sized(4, tiny=2)  # of each query; the first one does not count
OBJECTS = sized(32, tiny=2)  # of a micro-batch
IDLE_MICRO_BATCHES = sized(16, tiny=2)
IDLE_ROUNDS = sized(5, tiny=1)

SCHEMA = "ts BIGINT, user STRING, kind STRING, url STRING, ip STRING, agent STRING, session STRING"
NESTED_SCHEMA = (
    "id BIGINT, user STRUCT<name: STRING, age: INT, score: DOUBLE>, tags ARRAY<STRING>, "
    "items ARRAY<STRUCT<sku: STRING, n: INT, price: DOUBLE>>, at TIMESTAMP, ok BOOLEAN"
)
TYPED_WARM_UP = sized(1, tiny=0)
TYPED_ROUNDS = sized(5, tiny=1)
TYPED_MICRO_BATCHES = sized(3, tiny=2)
TYPED_OBJECTS = sized(16, tiny=2)  # of a micro-batch, and as many files

SLOW_DIRECTORY = "slow-store"


# ---- bytes


@dataclass(frozen=True)
class Load:
    """Records of one kind.

    Attributes:
        name: The name in the report.
        records: The records of one batch object, all of the same size.
        compression: Compression of our batch objects.
        goal: The least share of the yardstick's speed.
        copied_goal: The same for the yardstick that also reads and copies as many bytes.
    """

    name: str
    records: list[bytes]
    compression: Compression
    goal: float | None
    copied_goal: float | None = None


def rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Give the rows about bytes and about idle triggers."""
    spark.dataSource.register(Ceiling)
    plain = {size: records_of(size, OBJECT_BYTES // (size + 4)) for size in (100, 1000)}
    events = log_events(random.Random(7))[: OBJECT_BYTES // 267]
    loads = (
        Load("100-byte records, uncompressed", plain[100], Compression.NONE, 0.9),
        Load("1,000-byte records, uncompressed", plain[1000], Compression.NONE, None, 0.95),
        Load("263-byte JSON records, zstd", events, Compression.ZSTD, 0.6),
    )
    for number, load in enumerate(loads):
        yield from _speed_rows(spark, home / f"load{number}", load)
    yield _idle_row(spark, home / "idle")


def _speed_rows(spark: SparkSession, home: Path, load: Load) -> Iterator[Row]:
    count = len(load.records) * OBJECTS
    batches = OBJECTS * MICRO_BATCHES
    queued = fill(open_store(str(home / "store")), load.records, batches, load.compression)
    os.sync()  # so that the disk does not write the queue during the measurement
    size = len(load.records[0])
    frames = {
        "ours": _ours(spark, home, OBJECTS),
        "base": _ceiling(spark, size, count, MICRO_BATCHES),
    }
    if load.compression is Compression.NONE:  # a compressed file has fewer bytes than its rows
        read = str(home / "store" / DEFAULT_DATA_PATH_PREFIX)
        frames["copied"] = _ceiling(spark, size, count, MICRO_BATCHES, read=read)
    measures = _measures(frames, home, queued.rewind, MICRO_BATCHES, "addBatch")
    seconds = _medians(in_random_turns(measures, ROUNDS, WARM_UP))
    shutil.rmtree(home)  # gigabytes
    ours_s = seconds.pop("ours")
    yardsticks = {
        "base": ("one prebuilt Arrow batch again and again", load.goal),
        "copied": ("the same with as many bytes read and copied once", load.copied_goal),
    }
    for name, base_s in seconds.items():
        yardstick, goal = yardsticks[name]
        yield Row(
            f"streaming source, {load.name} / {yardstick}",
            f"{base_s / ours_s:.0%}",
            "" if goal is None else f">= {goal:.0%}",
            None if goal is None else base_s / ours_s >= goal,
            f"{count / ours_s / 1e3:,.0f} k rows/s of {count / base_s / 1e3:,.0f} k rows/s; "
            f"{count:,} rows in a micro-batch, medians of {ROUNDS}",
        )


def _idle_row(spark: SparkSession, home: Path) -> Row:
    """Read one record in each micro-batch. The rest is the cost of the source at rest."""
    queued = fill(open_store(str(home / "store")), [b"x" * 100], IDLE_MICRO_BATCHES)
    frames = {
        "ours": _ours(spark, home, 1),
        "base": _ceiling(spark, 100, 1, IDLE_MICRO_BATCHES),
    }
    measures = _measures(frames, home, queued.rewind, IDLE_MICRO_BATCHES, "triggerExecution")
    seconds = _medians(in_random_turns(measures, IDLE_ROUNDS, WARM_UP))
    more_ms = (seconds["ours"] - seconds["base"]) * 1e3
    return Row(
        "micro-batch of one record / of a Python source with one row",
        f"{more_ms:+.0f} ms",
        "<= 30 ms more",
        more_ms <= 30,
        f"{seconds['ours'] * 1e3:.0f} against {seconds['base'] * 1e3:.0f} ms",
    )


def _ours(spark: SparkSession, home: Path, objects: int) -> DataFrame:
    source = (
        spark.readStream.format("opendata-buffer")
        .option("maxBatchesPerTrigger", objects)
        .option("gcEnabled", "false")
    )
    if objects > 1:
        source = source.option("minPartitions", TASKS)
    return source.load(str(home / "store"))


def _ceiling(
    spark: SparkSession, size: int, count: int, micro_batches: int, **options: str
) -> DataFrame:
    source = spark.readStream.format("ceiling").option("size", size).option("rows", count)
    return source.option("batches", micro_batches).options(**options).load()


def _measures(
    frames: Mapping[str, DataFrame],
    home: Path,
    rewind: Callable[[], None],
    micro_batches: int,
    duration: str,
) -> dict[str, Callable[[int], float]]:
    """Return a measure for each stream: it gets the number of its round, and returns seconds."""

    def measure(name: str, turn: int) -> float:
        def query(attempt: int) -> float:
            rewind()
            checkpoint = home / f"checkpoint-{turn}-{name}-{attempt}"
            return micro_batch_seconds(frames[name], checkpoint, micro_batches, duration=duration)

        return started(query)

    return {name: partial(measure, name) for name in frames}


def _medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


# ---- columns


def typed_records() -> list[bytes]:
    """Return the log events of one object or file, of about 240 bytes, without padding."""
    records = [record.rstrip() for record in log_events(random.Random(7))]
    return records[: OBJECT_BYTES // 267]


def nested_records() -> list[bytes]:
    """Return the orders of one object, of about 250 bytes, with one to three items each."""
    rng = random.Random(7)
    return [
        json.dumps(
            {
                "id": number,
                "user": {
                    "name": f"user-{rng.randrange(10**6)}",
                    "age": rng.randrange(90),
                    "score": rng.random(),
                },
                "tags": ["a", "bb", "ccc"][: rng.randrange(4)],
                "items": [
                    {
                        "sku": f"sku-{rng.randrange(1000)}",
                        "n": rng.randrange(5),
                        "price": rng.randrange(10_000) / 100,
                    }
                    for _ in range(rng.randrange(1, 4))
                ],
                "at": f"2024-01-02T03:04:05.{rng.randrange(10**6):06d}Z",
                "ok": True,
            }
        ).encode()
        for number in range(OBJECT_BYTES // 260)
    ]


@functools.cache
def prebuilt(schema: StructType, rows: int) -> pa.RecordBatch:
    """Build the first record batch that our source would make of typed records.

    A worker builds it once.

    Args:
        schema: The columns.
        rows: Number of records.

    Returns:
        The record batch.
    """
    values = decode_arrow(encode_batch(typed_records()[:rows]))
    batch = Records(rows, iter([values]), 0, "ingest/any.batch", (Metadata(0, 0, b""),))
    return next(RowBuilder(schema, ValueOptions()).pieces(batch))


class TypedCeiling(Ceiling):
    """The data source ``typed-ceiling``: the yardstick with the columns of typed records.

    Its speed is the limit of every decoder in Python.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "typed-ceiling"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader."""
        size, rows, batches = (int(self.options[name]) for name in ("size", "rows", "batches"))
        return TypedCeilingReader(schema, size, rows, batches)


class TypedCeilingReader(CeilingReader):
    """Reads the data source ``typed-ceiling``."""

    piece_bytes = 2 * MIB

    def piece(self, rows: int) -> pa.RecordBatch:
        """Return the record batch that is handed over again and again."""
        return prebuilt(self._schema, rows)


def typed_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Compare JSON into columns with ``from_json``, Spark's files, and the yardstick.

    :mod:`benchmarks.peers` reads the same records in the same way, and also from Kafka.
    """
    place = home / "typed"
    records, nested = typed_records(), nested_records()
    store, nested_store, files = str(place / "store"), str(place / "nested"), place / "files"
    batches = TYPED_OBJECTS * TYPED_MICRO_BATCHES
    queues = [
        fill(open_store(store), records, batches),
        fill(open_store(nested_store), nested, batches),
    ]
    _write_json_lines(files, records)
    os.sync()  # so that the disk does not write the files during the measurement
    spark.dataSource.register(TypedCeiling)
    count = len(records) * TYPED_OBJECTS

    def queue(store: str, schema: str) -> DataFrame:
        return _typed_reader(spark, store, "json").schema(schema).load()

    def from_json(store: str, schema: str) -> DataFrame:
        parsed = sf.from_json(sf.col("value").cast("string"), schema).alias("row")
        values = _typed_reader(spark, store, "bytes").schema("value BINARY").load()
        return values.select(parsed).select("row.*")

    def json_files() -> DataFrame:
        reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", TYPED_OBJECTS)
        return reader.json(str(files))

    def ceiling() -> DataFrame:
        source = spark.readStream.format("typed-ceiling").schema(SCHEMA)
        options = {"size": len(records[0]), "rows": count, "batches": TYPED_MICRO_BATCHES}
        return source.options(**options).load()

    ways: dict[str, Callable[[], DataFrame]] = {
        "queue": partial(queue, store, SCHEMA),
        "from_json": partial(from_json, store, SCHEMA),
        "files": json_files,
        "ceiling": ceiling,
        "nested queue": partial(queue, nested_store, NESTED_SCHEMA),
        "nested from_json": partial(from_json, nested_store, NESTED_SCHEMA),
    }

    def measure(name: str, turn: int) -> float:
        def query(attempt: int) -> float:
            for queued in queues:
                queued.rewind()
            checkpoint = place / f"checkpoint-{turn}-{name}-{attempt}"
            return micro_batch_seconds(ways[name](), checkpoint, TYPED_MICRO_BATCHES)

        return started(query)

    measures = {name: partial(measure, name) for name in ways}
    median = _medians(in_random_turns(measures, TYPED_ROUNDS, TYPED_WARM_UP))
    shutil.rmtree(place)  # half a gigabyte
    yield from _typed_results(records, nested, median)


def _typed_results(
    records: list[bytes], nested: list[bytes], median: Mapping[str, float]
) -> Iterator[Row]:
    count = len(records) * TYPED_OBJECTS
    speed = {name: f"{count / seconds / 1e6:.2f}" for name, seconds in median.items()}
    size = sum(map(len, records)) / len(records)
    name = f"streaming source, JSON records of {size:.0f} bytes on average read into typed columns"
    detail = f"{count:,} rows in a micro-batch"
    yield Row(
        f"{name} / Spark's JSON-lines files",
        f"{median['files'] / median['queue']:.2f} x",
        detail=f"{speed['queue']} M rows/s against {speed['files']}; {detail}",
    )
    from_json_ratio = median["from_json"] / median["queue"]
    yield Row(
        f"{name} / from_json over our bytes source",
        f"{from_json_ratio:.2f} x",
        ">= 1.2 x",
        from_json_ratio >= 1.2,
        f"{speed['queue']} M rows/s against {speed['from_json']}; {detail}",
    )
    yield Row(
        f"{name} / the same columns prebuilt, nothing read or decoded",
        f"{median['ceiling'] / median['queue']:.0%}",
        detail=f"{speed['queue']} M rows/s of {speed['ceiling']}, which is "
        f"{median['from_json'] / median['ceiling']:.2f} x from_json and "
        f"{median['files'] / median['ceiling']:.2f} x files",
    )
    nested_ratio = median["nested from_json"] / median["nested queue"]
    nested_speed = {
        way: len(nested) * TYPED_OBJECTS / median[f"nested {way}"] / 1e6
        for way in ("queue", "from_json")
    }
    nested_size = sum(map(len, nested)) / len(nested)
    yield Row(
        f"the same, records of {nested_size:.0f} bytes with structs and arrays / from_json",
        f"{nested_ratio:.2f} x",
        ">= 1.2 x",
        nested_ratio >= 1.2,
        f"{nested_speed['queue']:.2f} M rows/s against {nested_speed['from_json']:.2f}",
    )


def _write_json_lines(directory: Path, records: list[bytes]) -> None:
    """Write the files of a query. Each file has bytes of its own on the disk."""
    directory.mkdir()
    lines = b"\n".join(records) + b"\n"
    for number in range(TYPED_OBJECTS * TYPED_MICRO_BATCHES):
        (directory / f"{number:05d}").write_bytes(lines)


def _typed_reader(spark: SparkSession, store: str, value_format: str) -> DataStreamReader:
    return (
        spark.readStream.format("opendata-buffer")
        .option("path", store)
        .option("valueFormat", value_format)
        .option("maxBatchesPerTrigger", TYPED_OBJECTS)
        .option("minPartitions", TASKS)
        .option("gcEnabled", "false")
    )


# ---- many small batches


def open_slow_store(url: str, options: StoreOptions | None = None) -> Store:
    """Open a store. The one in the directory of :func:`drain_rows` has latency."""
    store = open_store(url, options)
    return as_slow_as_s3(store, SLOW) if url.endswith(SLOW_DIRECTORY) else store


def slow_down() -> None:
    """Make the source open stores by :func:`open_slow_store`, in this process."""
    for module in (buffer_source.stream_reader, opendata_buffer.consumer.fetch):
        module.open_store = open_slow_store  # type: ignore[attr-defined]


class SlowSource(DefaultSource):
    """The data source ``slow-buffer``: our source over a store with latency.

    The product has no option to slow a store down, so this source changes the store in whichever
    process it runs.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "slow-buffer"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader."""
        return SlowReader(SourceOptions.from_spark(self.options), schema)


class SlowReader(BufferStreamReader):
    """Reads the data source ``slow-buffer``."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the batches of one task."""
        slow_down()
        return super().read(partition)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Prepare. Spark makes this call before any other call of the driver."""
        slow_down()
        super().prepareForTriggerAvailableNow()


def drain_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Drain many small batches with ``availableNow``.

    The time is from the first look at the queue to the last acknowledgement.
    """
    spark.dataSource.register(SlowSource)
    directory = str(home / SLOW_DIRECTORY)
    queued = fill(open_store(directory), records_of(100, 10), BATCHES)
    config = ConsumerConfig(store=directory, gc=NO_COLLECTOR)
    with Consumer(config, **internals(store=open_slow_store(directory))) as consumer:
        serial = serial_seconds(consumer, SERIAL_BATCHES) / SERIAL_BATCHES
    frame = spark.readStream.format("slow-buffer").option("gcEnabled", "false").load(directory)

    def drain(attempt: int) -> float:
        queued.rewind()
        found = drained(frame, home / f"drained-{attempt}")
        assert found.rows == BATCHES * queued.records, found.rows
        return found.seconds

    taken = started(drain)
    speedup = serial * BATCHES / taken
    yield Row(
        f"{BATCHES:,} batches of 10 records through Spark, {LATENCY_MS} ms storage / next_batch "
        "and ack",
        f"{speedup:.0f} x",
        ">= 20 x",
        speedup >= 20,
        f"{taken:.1f} s, the query's start included; one by one {serial * 1e3:.0f} ms a batch, "
        f"measured on {SERIAL_BATCHES}",
    )
