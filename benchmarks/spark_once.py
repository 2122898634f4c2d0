"""A fresh query that reads what is there and ends (``availableNow``): its first micro-batch counts.

Beside it run two sources that decode nothing, in the same run and in turns: one hands over one
prebuilt Arrow batch, the other also reads the same files and copies their bytes once. Of each two
times are told: ``addBatch``, in which Spark runs the tasks, and the whole run with its start.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
ROUNDS = 11
SHARE = 0.92
START_S = 0.08
START_ROUNDS = 33
"""More, since one of these queries takes 0.2 s more or less than the next."""

Times = tuple[float, float]
"""Seconds of all ``addBatch``, and of the whole run."""

Rounds = tuple[Sequence[float], Sequence[float]]
"""The same, of each round."""


def once_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """A run over 320 MiB of small and of large records."""
    spark.dataSource.register(Ceiling)
    for size in (100, 1000):
        records = records_of(size, OBJECT_BYTES // (size + 4))
        ours, prebuilt, copied = _turns(spark, home / f"once-{size}", records, OBJECTS)
        what = f"availableNow over 320 MiB of {size:,}-byte records"
        for time_of, bar in (("addBatch", SHARE), ("the whole run", None)):
            number = int(time_of != "addBatch")
            mine = ours[number]
            for name, base in (
                ("the same files read and copied once", copied[number]),
                ("one prebuilt Arrow batch again and again", prebuilt[number]),
            ):
                counts = bar is not None and base is copied[number]
                yield share_row(f"{what}, {time_of} / {name}", mine, base, counts)


def start_row(spark: SparkSession, home: Path) -> Row:
    """A run over one record beside one of a source that hands over one row and does nothing else:
    what a query takes to start over ours, beyond what it takes over any Python source."""
    spark.dataSource.register(Ceiling)
    (_, mine), (_, base), _ = _turns(spark, home / "once-one", [b"x" * 100], 1, START_ROUNDS)
    low, more, high = statistics.quantiles(m - b for m, b in zip(mine, base, strict=True))
    return Row(
        "start of a query / of one over a Python source with one row",
        f"{more:+.3f} s",
        f"<= +{START_S:g} s",
        more <= START_S,
        f"{statistics.median(mine):.2f} against {statistics.median(base):.2f} s, availableNow; the "
        f"middle half of {START_ROUNDS} rounds {low:+.2f} to {high:+.2f} s",
    )


def _turns(
    spark: SparkSession, home: Path, records: list[bytes], objects: int, rounds: int = ROUNDS
) -> list[Rounds]:
    """Times of our runs, and of those of the two yardsticks."""
    store = str(home / "store")
    queued = fill(open_store(store), records, objects)
    os.sync()  # or the disk writes what was queued while we measure
    size, rows = len(records[0]), len(records) * objects
    ways: dict[str, Callable[[], DataFrame]] = {
        "ours": partial(our_query, spark, queued, store),
        "prebuilt": partial(ceiling_query, spark, size, rows),
        "copied": partial(ceiling_query, spark, size, rows, read=f"{store}/{queued.prefix}"),
    }
    found = rounds_of(ways, home, rounds)
    shutil.rmtree(home)
    return list(found.values())


def rounds_of(
    ways: Mapping[str, Callable[[], DataFrame]], home: Path, rounds: int = ROUNDS
) -> dict[str, Rounds]:
    """Times of each way, all of them in turns, in an order that changes."""
    found: dict[str, list[Times]] = {name: [] for name in ways}
    order = random.Random(7)
    for turn in range(WARM_UP + rounds):
        for name in order.sample(list(ways), len(ways)):
            found[name].append(started(partial(query_times, ways[name], home, f"{turn}-{name}")))
    return {name: tuple(zip(*times[WARM_UP:], strict=True)) for name, times in found.items()}


def share_row(
    name: str, mine: Sequence[float], base: Sequence[float], counts: bool, detail: str = ""
) -> Row:
    """A row of ours beside a yardstick, in seconds; held to the bar where it ``counts``."""
    ours, yardstick = statistics.median(mine), statistics.median(base)
    low, _, high = statistics.quantiles(b / m for b, m in zip(base, mine, strict=True))
    return Row(
        name,
        f"{yardstick / ours:.0%}",
        f">= {SHARE:.0%}" if counts else "",
        yardstick / ours >= SHARE if counts else None,
        f"{ours:.2f} against {yardstick:.2f} s, medians of {ROUNDS}; the middle half of the rounds "
        f"{low:.0%} to {high:.0%}{detail}",
    )


def our_query(spark: SparkSession, queued: Queued, store: str) -> DataFrame:
    queued.rewind()
    return spark.readStream.format("opendata-buffer").option("gcEnabled", "false").load(store)


def ceiling_query(spark: SparkSession, size: int, rows: int, **options: str) -> DataFrame:
    reader = spark.readStream.format("ceiling").option("size", size).options(**options)
    return reader.option("rows", rows).option("batches", 1).load()


def query_times(frame: Callable[[], DataFrame], home: Path, name: str, attempt: int) -> Times:
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
    whole = time.perf_counter() - began
    tasks_ms = sum(each["durationMs"].get("addBatch", 0) for each in query.recentProgress)
    return tasks_ms / 1000, whole
