"""The streaming source beside a Python source that does nothing but hand over Arrow batches.

The yardstick yields one prebuilt record batch again and again: the ceiling of Spark's Python
path. It has the same columns, rows of the same size in pieces of the same size, as many rows in
a micro-batch and as many tasks, and the same sink (``noop``). The two take turns, one query
each, in a random order, several times, after rounds that do not count: a query lives long, and
the JVM compiles for a minute what all of them run. Of each query the micro-batches after the
first count (the first one starts workers), by ``addBatch``, the time Spark takes to run a
micro-batch's tasks. The whole trigger would flatter the slower one: it adds the same
bookkeeping to both.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ceiling import TASKS, Ceiling
from benchmarks.codec import logs
from benchmarks.queries import started
from benchmarks.queues import Queued, fill, records_of
from benchmarks.table import Row
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX
from opendata_buffer.formats.batch import Compression
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MIB = 1024 * 1024
WARM_UP = 2  # rounds that do not count
ROUNDS = 11
MICRO_BATCHES = 4  # of each query; the first does not count
OBJECTS = 32  # of a micro-batch
OBJECT_BYTES = 8 * MIB


@dataclass(frozen=True)
class Load:
    """Records of one kind.

    Attributes:
        name: As the report calls them.
        records: Those of one batch object; all of one size.
        compression: Of our batch objects.
        bar: Least share of the yardstick's speed.
        copied_bar: The same where it also reads as many bytes as it hands over, and copies them.
    """

    name: str
    records: list[bytes]
    compression: Compression
    bar: float | None
    copied_bar: float | None = None


def source_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """All lines of the source, in the order of the report."""
    spark.dataSource.register(Ceiling)
    loads = [
        *(
            Load(
                f"{size:,}-byte records, uncompressed",
                records_of(size, OBJECT_BYTES // (size + 4)),
                Compression.NONE,
                *bars,
            )
            for size, bars in ((100, (0.9, None)), (1000, (None, 0.95)))
        ),
        Load(
            "263-byte JSON records, zstd",
            logs(random.Random(7))[: OBJECT_BYTES // 267],
            Compression.ZSTD,
            0.6,
        ),
    ]
    for number, load in enumerate(loads):
        yield from _speed(spark, home / f"load{number}", load)
    yield _idle(spark, home / "idle")


def _speed(spark: SparkSession, home: Path, load: Load) -> Iterator[Row]:
    rows = len(load.records) * OBJECTS
    queued = fill(
        open_store(str(home / "store")), load.records, OBJECTS * MICRO_BATCHES, load.compression
    )
    os.sync()  # or the disk writes what was queued while we measure
    size = len(load.records[0])
    frames = {
        "ours": _ours(spark, home, OBJECTS),
        "base": _ceiling(spark, size, rows, MICRO_BATCHES),
    }
    if load.compression is Compression.NONE:  # others have not as many bytes as they hand over
        read = str(home / "store" / DEFAULT_DATA_PATH_PREFIX)
        frames["copied"] = _ceiling(spark, size, rows, MICRO_BATCHES, read=read)
    seconds = _take_turns(frames, home, queued, MICRO_BATCHES, ROUNDS, "addBatch")
    shutil.rmtree(home)  # gigabytes
    ours_s = seconds.pop("ours")
    yardsticks = {
        "base": ("one prebuilt Arrow batch again and again", load.bar),
        "copied": ("the same with as many bytes read and copied once", load.copied_bar),
    }
    for name, base_s in seconds.items():
        what, bar = yardsticks[name]
        yield Row(
            f"streaming source, {load.name} / {what}",
            f"{base_s / ours_s:.0%}",
            "" if bar is None else f">= {bar:.0%}",
            None if bar is None else base_s / ours_s >= bar,
            f"{rows / ours_s / 1e3:,.0f} k rows/s of {rows / base_s / 1e3:,.0f} k rows/s; "
            f"{rows:,} rows in a micro-batch, medians of {ROUNDS}",
        )


def _idle(spark: SparkSession, home: Path) -> Row:
    """One record in each micro-batch: what is left is what the source costs at rest."""
    micro_batches = 16
    queued = fill(open_store(str(home / "store")), [b"x" * 100], micro_batches)
    frames = {"ours": _ours(spark, home, 1), "base": _ceiling(spark, 100, 1, micro_batches)}
    seconds = _take_turns(frames, home, queued, micro_batches, 5, "triggerExecution")
    more = (seconds["ours"] - seconds["base"]) * 1e3
    return Row(
        "micro-batch of one record / of a Python source with one row",
        f"{more:+.0f} ms",
        "<= 30 ms more",
        more <= 30,
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
    spark: SparkSession, size: int, rows: int, micro_batches: int, **options: str | int | bool
) -> DataFrame:
    source = spark.readStream.format("ceiling").option("size", size).option("rows", rows)
    return source.option("batches", micro_batches).options(**options).load()


def _take_turns(
    frames: Mapping[str, DataFrame],
    home: Path,
    queued: Queued,
    micro_batches: int,
    rounds: int,
    duration: str,
) -> Mapping[str, float]:
    """Median over the rounds of the median seconds of a micro-batch, for each."""
    seconds: dict[str, list[float]] = {name: [] for name in frames}
    order = random.Random(7)
    for turn in range(WARM_UP + rounds):
        for name in order.sample(list(frames), len(frames)):

            def query(attempt: int, name: str = name, turn: int = turn) -> float:
                queued.rewind()
                checkpoint = home / f"checkpoint-{turn}-{name}-{attempt}"
                return micro_batch_seconds(frames[name], checkpoint, micro_batches, duration)

            seconds[name].append(started(query))
    return {name: statistics.median(each[WARM_UP:]) for name, each in seconds.items()}


def micro_batch_seconds(
    frame: DataFrame, checkpoint: Path, micro_batches: int, duration: str
) -> float:
    """Median of the micro-batches after the first, which starts workers."""
    query = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        while (query.lastProgress or {"batchId": -1})["batchId"] < micro_batches - 1:
            if query.awaitTermination(0.1):
                break
    finally:
        query.stop()
    return statistics.median(
        each["durationMs"][duration] / 1000
        for each in query.recentProgress
        if 0 < each["batchId"] < micro_batches
    )
