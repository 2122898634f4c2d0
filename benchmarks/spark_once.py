"""A fresh query that reads what is there and ends (``availableNow``), beside the same of a source
that hands over one prebuilt Arrow batch: its first micro-batch and its start are included.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ceiling import Ceiling
from benchmarks.queries import started
from benchmarks.queues import Queued, fill, records_of
from benchmarks.table import Row
from opendata_buffer.stores.open import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MIB = 1024 * 1024
OBJECT_BYTES = 8 * MIB
OBJECTS = 40
"""320 MiB."""

WARM_UP = 1  # rounds that do not count
ROUNDS = 5
START_ROUNDS = 11
SHARE = 0.9
START_S = 0.08


def once_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """A run over 320 MiB of small and of large records."""
    spark.dataSource.register(Ceiling)
    for size in (100, 1000):
        records = records_of(size, OBJECT_BYTES // (size + 4))
        ours, base = _turns(spark, home / f"once-{size}", records, OBJECTS)
        share = base / ours
        yield Row(
            f"availableNow over 320 MiB of {size:,}-byte records, start and first micro-batch "
            "included / one prebuilt Arrow batch again and again",
            f"{share:.0%}",
            f">= {SHARE:.0%}",
            share >= SHARE,
            f"{ours:.2f} against {base:.2f} s, medians of {ROUNDS}",
        )


def start_row(spark: SparkSession, home: Path) -> Row:
    """A run over one record beside one of a source that hands over one row and does nothing else:
    what a query takes to start over ours, beyond what it takes over any Python source."""
    spark.dataSource.register(Ceiling)
    ours, base = _turns(spark, home / "once-one", [b"x" * 100], 1, START_ROUNDS)
    return Row(
        "start of a query / of one over a Python source with one row",
        f"{ours - base:+.3f} s",
        f"<= +{START_S:g} s",
        ours - base <= START_S,
        f"{ours:.2f} against {base:.2f} s, availableNow, medians of {START_ROUNDS}",
    )


def _turns(
    spark: SparkSession, home: Path, records: list[bytes], objects: int, rounds: int = ROUNDS
) -> tuple[float, float]:
    """Median seconds of our runs and of the yardstick's."""
    store = str(home / "store")
    queued = fill(open_store(store), records, objects)
    os.sync()  # or the disk writes what was queued while we measure
    ways: list[tuple[list[float], Callable[[], DataFrame]]] = [
        ([], partial(_ours, spark, queued, store)),
        ([], partial(_ceiling, spark, len(records[0]), len(records) * objects)),
    ]
    order = random.Random(7)
    for turn in range(WARM_UP + rounds):
        for number, (seconds, frame) in enumerate(order.sample(ways, 2)):
            seconds.append(started(partial(_seconds, frame, home, f"{turn}-{number}")))
    shutil.rmtree(home)
    (ours, _), (base, _) = ways
    return statistics.median(ours[WARM_UP:]), statistics.median(base[WARM_UP:])


def _ours(spark: SparkSession, queued: Queued, store: str) -> DataFrame:
    queued.rewind()
    return spark.readStream.format("opendata-buffer").option("gcEnabled", "false").load(store)


def _ceiling(spark: SparkSession, size: int, rows: int) -> DataFrame:
    reader = spark.readStream.format("ceiling").option("size", size)
    return reader.option("rows", rows).option("batches", 1).load()


def _seconds(frame: Callable[[], DataFrame], home: Path, name: str, attempt: int) -> float:
    stream = frame()
    checkpoint = str(home / f"checkpoint-{name}-{attempt}")
    began = time.perf_counter()
    query = (
        stream.writeStream.format("noop")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return time.perf_counter() - began
