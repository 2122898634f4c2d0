"""JSON records into typed columns: here, by ``from_json`` over bytes, and by Spark from files.

The first two also read records with structs and arrays, whose values differ in number. All three
read the same log events into the same columns, as many rows in a micro-batch, from as
many files of as many bytes, in as many tasks, into the same sink. So does a fourth, which hands
over one prebuilt record batch of these columns again and again: what it takes is Spark's, and the
limit of every decoder in Python. They take turns, one query each, in a random order, after rounds
that do not count; of each query the micro-batches after the first count, by ``addBatch``.

``benchmarks.peers_spark`` reads the same records in the same way, and beside them Kafka's.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from benchmarks.ceiling import Ceiling, CeilingReader
from benchmarks.codec import logs
from benchmarks.queries import started
from benchmarks.queues import fill
from benchmarks.spark_source import micro_batch_seconds
from benchmarks.table import Row
from buffer_source.task import RowBuilder
from opendata_buffer.consumer.fetch import Records
from opendata_buffer.formats.arrow import decode_arrow
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.stores.open import open_store
from opendata_buffer.values import ValueOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSourceStreamReader
    from pyspark.sql.streaming import DataStreamReader
    from pyspark.sql.types import StructType

MIB = 1024 * 1024
SCHEMA = "ts BIGINT, user STRING, kind STRING, url STRING, ip STRING, agent STRING, session STRING"
NESTED_SCHEMA = (
    "id BIGINT, user STRUCT<name: STRING, age: INT, score: DOUBLE>, tags ARRAY<STRING>, "
    "items ARRAY<STRUCT<sku: STRING, n: INT, price: DOUBLE>>, at TIMESTAMP, ok BOOLEAN"
)
TASKS = 2
WARM_UP = 1
ROUNDS = 5
MICRO_BATCHES = 3  # of each query; the first does not count
OBJECTS = 16  # of a micro-batch, and as many files
OBJECT_BYTES = 8 * MIB


def typed_records() -> list[bytes]:
    """Those of one object, or file: log events of some 240 bytes, each as long as it is."""
    records = [record.rstrip() for record in logs(random.Random(7))]
    return records[: OBJECT_BYTES // 267]


def nested_records() -> list[bytes]:
    """Those of one object: orders of some 250 bytes, with one to three items."""
    made = random.Random(7)
    return [
        json.dumps(
            {
                "id": number,
                "user": {
                    "name": f"user-{made.randrange(10**6)}",
                    "age": made.randrange(90),
                    "score": made.random(),
                },
                "tags": ["a", "bb", "ccc"][: made.randrange(4)],
                "items": [
                    {
                        "sku": f"sku-{made.randrange(1000)}",
                        "n": made.randrange(5),
                        "price": made.randrange(10_000) / 100,
                    }
                    for _ in range(made.randrange(1, 4))
                ],
                "at": f"2024-01-02T03:04:05.{made.randrange(10**6):06d}Z",
                "ok": True,
            }
        ).encode()
        for number in range(OBJECT_BYTES // 260)
    ]


def json_lines(directory: Path, records: list[bytes]) -> None:
    """Files of these records, as many as a query reads; each has its own bytes on the disk."""
    directory.mkdir()
    lines = b"\n".join(records) + b"\n"
    for number in range(OBJECTS * MICRO_BATCHES):
        (directory / f"{number:05d}").write_bytes(lines)


@functools.cache
def prebuilt(schema: StructType, rows: int) -> pa.RecordBatch:
    """The first piece that our source would make of such records; built once in a worker."""
    values = decode_arrow(encode_batch(typed_records()[:rows]))
    batch = Records(rows, iter([values]), 0, "ingest/any.batch", (Metadata(0, 0, b""),))
    return next(RowBuilder(schema, ValueOptions()).pieces(batch))


class TypedCeiling(Ceiling):
    """As the ceiling of the bytes source, with the columns of this module."""

    @classmethod
    def name(cls) -> str:
        return "typed-ceiling"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        size, rows, batches = (int(self.options[name]) for name in ("size", "rows", "batches"))
        return TypedCeilingReader(schema, size, rows, batches)


class TypedCeilingReader(CeilingReader):
    piece_bytes = 2 * MIB

    def piece(self, rows: int) -> pa.RecordBatch:
        return prebuilt(self._schema, rows)


def typed_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Ours against each of the others."""
    place = home / "typed"
    records = typed_records()
    store, files = str(place / "store"), place / "files"
    queued = fill(open_store(store), records, OBJECTS * MICRO_BATCHES)
    json_lines(files, records)
    nested, nested_store = nested_records(), str(place / "nested")
    nested_queued = fill(open_store(nested_store), nested, OBJECTS * MICRO_BATCHES)
    os.sync()  # or the disk writes what was queued while we measure

    def queue(store: str, schema: str) -> DataFrame:
        return typed_queue(spark, store, "json").schema(schema).load()

    def from_json(store: str, schema: str) -> DataFrame:
        parsed = sf.from_json(sf.col("value").cast("string"), schema).alias("row")
        values = typed_queue(spark, store, "bytes").schema("value BINARY").load()
        return values.select(parsed).select("row.*")

    spark.dataSource.register(TypedCeiling)
    rows = len(records) * OBJECTS

    def ceiling() -> DataFrame:
        source = spark.readStream.format("typed-ceiling").schema(SCHEMA)
        options = {"size": len(records[0]), "rows": rows, "batches": MICRO_BATCHES}
        return source.options(**options).load()

    turns = {
        "queue": lambda: queue(store, SCHEMA),
        "from_json": lambda: from_json(store, SCHEMA),
        "files": lambda: json_files(spark, files),
        "ceiling": ceiling,
        "nested queue": lambda: queue(nested_store, NESTED_SCHEMA),
        "nested from_json": lambda: from_json(nested_store, NESTED_SCHEMA),
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = random.Random(7)
    for turn in range(WARM_UP + ROUNDS):
        for name in order.sample(list(turns), len(turns)):

            def query(attempt: int, name: str = name, turn: int = turn) -> float:
                queued.rewind()
                nested_queued.rewind()
                checkpoint = place / f"checkpoint-{turn}-{name}-{attempt}"
                return micro_batch_seconds(turns[name](), checkpoint, MICRO_BATCHES, "addBatch")

            taken = started(query)
            if turn >= WARM_UP:
                seconds[name].append(taken)
    shutil.rmtree(place)  # half a gigabyte
    median = {name: statistics.median(each) for name, each in seconds.items()}
    speed = {name: f"{rows / each / 1e6:.2f}" for name, each in median.items()}
    size = sum(map(len, records)) / len(records)
    name = f"streaming source, JSON records of {size:.0f} bytes on average read into typed columns"
    detail = f"{rows:,} rows in a micro-batch"
    files_ratio = median["files"] / median["queue"]
    yield Row(
        f"{name} / Spark's JSON-lines files",
        f"{files_ratio:.2f} x",
        detail=f"{speed['queue']} M rows/s against {speed['files']}; {detail}",
    )
    from_json_ratio = median["from_json"] / median["queue"]
    yield Row(
        f"{name} / from_json over our bytes source",
        f"{from_json_ratio:.2f} x",
        ">= 1.2 x",
        from_json_ratio >= 1.2,
        detail=f"{speed['queue']} M rows/s against {speed['from_json']}; {detail}",
    )
    yield Row(
        f"{name} / the same columns prebuilt, nothing read or decoded",
        f"{median['ceiling'] / median['queue']:.0%}",
        detail=f"{speed['queue']} M rows/s of {speed['ceiling']}, which is "
        f"{median['from_json'] / median['ceiling']:.2f} x from_json and "
        f"{median['files'] / median['ceiling']:.2f} x files",
    )
    nested_ratio = median["nested from_json"] / median["nested queue"]
    per_second = {
        each: len(nested) * OBJECTS / median[f"nested {each}"] / 1e6
        for each in ("queue", "from_json")
    }
    size = sum(map(len, nested)) / len(nested)
    yield Row(
        f"the same, records of {size:.0f} bytes with structs and arrays / from_json",
        f"{nested_ratio:.2f} x",
        ">= 1.2 x",
        nested_ratio >= 1.2,
        f"{per_second['queue']:.2f} M rows/s against {per_second['from_json']:.2f}",
    )


def json_files(spark: SparkSession, directory: Path) -> DataFrame:
    """A stream from Spark's files of JSON lines, as many of a trigger as :func:`typed_queue`."""
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", OBJECTS)
    return reader.json(str(directory))


def typed_queue(spark: SparkSession, store: str, value_format: str) -> DataStreamReader:
    """A reader of the queue."""
    return (
        spark.readStream.format("opendata-buffer")
        .option("path", store)
        .option("valueFormat", value_format)
        .option("maxBatchesPerTrigger", OBJECTS)
        .option("minPartitions", TASKS)
        .option("gcEnabled", "false")
    )
