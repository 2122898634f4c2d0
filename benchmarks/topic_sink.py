"""The streaming sink into 16 partitions, beside the same rows into one queue.

Both write the same micro-batches in turns, in one session; what counts is the time Spark takes to
run a micro-batch's tasks and the sink's commit (``addBatch``), as in ``spark_sink``.
"""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING

from benchmarks.spark_sink import seconds_of
from benchmarks.table import Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 16
ROWS = 800_000
RECORD_BYTES = 100
KEYS = 10_000
WARM_UP = 1  # rounds that do not count
ROUNDS = 5


def sink_rows(spark: SparkSession) -> list[Row]:
    """By chance, and by key."""
    rows = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", ROWS)
        .option("numPartitions", 2)
        .load()
    )
    value = f"rpad(CAST(value AS STRING), {RECORD_BYTES}, 'x') AS value"
    plain = rows.selectExpr(value)
    keyed = rows.selectExpr(value, f"CAST(value % {KEYS} AS STRING) AS key")
    turns = {
        "one queue": (plain, 0, {}),
        "random": (plain, PARTITIONS, {}),
        "rendezvous": (keyed, PARTITIONS, {"partitioner": "rendezvous"}),
    }
    found: dict[str, list[float]] = {name: [] for name in turns}
    order = random.Random(7)
    for _ in range(WARM_UP + ROUNDS):
        for name in order.sample(sorted(turns), len(turns)):
            frame, partitions, options = turns[name]
            found[name].append(
                seconds_of(frame, "opendata-buffer", partitions=partitions, options=options)
            )
    seconds = {name: statistics.median(each[WARM_UP:]) for name, each in found.items()}
    one = seconds["one queue"]
    return [
        Row(
            f"streaming sink, {PARTITIONS} partitions ({name}) / one queue",
            f"{one / seconds[name]:.0%}",
            ">= 80 %",
            one / seconds[name] >= 0.8,
            f"{ROWS / seconds[name] / 1e3:,.0f} k rows/s of {ROWS / one / 1e3:,.0f} k rows/s",
        )
        for name in ("random", "rendezvous")
    ]
