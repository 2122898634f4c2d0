"""The streaming sink beside an Arrow writer that throws the rows away.

Both write the same micro-batches in turns, in one session; what counts is the time Spark takes
to run a micro-batch's tasks and the sink's commit (``addBatch``).

Columns become JSON in the task's Python process (``valueFormat=json``) or before, in the JVM, by
``to_json``: the two also take turns, into the same sink.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from benchmarks.queries import started
from benchmarks.table import Row
from buffer_sink.options import SinkOptions
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import Compression, seal_block
from opendata_buffer.topic.topic import Topic

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROWS = 800_000
TASKS = 2
WARM_UP = 1  # rounds that do not count: the JVM compiles what both of them run
ROUNDS = 5
BATCHES = 3  # of each query; the first one of a run starts workers and does not count

JSON_ROWS = 400_000
JSON_COLUMNS = (
    "1700000000000 + value * 7 AS ts",
    "concat('user-', lpad(CAST(value * 7919 % 100000 AS STRING), 5, '0')) AS user",
    "element_at(array('click', 'view', 'purchase', 'error'), CAST(value % 4 AS INT) + 1) AS kind",
    "concat('/products/', value * 31 % 10000, '/details') AS url",
    "concat_ws('.', value % 256, value * 3 % 256, value * 5 % 256, value * 7 % 256) AS ip",
    "'Mozilla/5.0 (X11; Linux x86_64)' AS agent",
    "sha1(CAST(value AS STRING)) AS session",
)
"""Events such as ``benchmarks.codec.logs`` makes."""


class NullWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class NullSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "throw-away"

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        return NullWriter()


def sink_rows(spark: SparkSession) -> Iterator[Row]:
    """One row for each size of records."""
    spark.dataSource.register(NullSink)
    yield from (_measure(spark, size) for size in (100, 1000))
    yield from _json(spark)


def _measure(spark: SparkSession, size: int) -> Row:
    rows = ROWS if size <= 100 else ROWS // 4
    frame = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows)
        .option("numPartitions", TASKS)
        .load()
        .selectExpr(f"rpad(CAST(value AS STRING), {size}, 'x') AS value")
    )
    ours: list[float] = []
    base: list[float] = []
    order = random.Random(7)
    turns = [("opendata-buffer", ours), ("throw-away", base)]
    for _ in range(WARM_UP + ROUNDS):
        for sink, seconds in order.sample(turns, 2):
            seconds.append(seconds_of(frame, sink))
    ours_s, base_s = (statistics.median(each[WARM_UP:]) for each in (ours, base))
    ratio = base_s / ours_s
    return Row(
        f"streaming sink, {size:,}-byte records, against throwing them away",
        f"{ratio:.0%}",
        ">= 92 %",
        ratio >= 0.92,
        f"{rows / ours_s / 1e3:,.0f} k rows/s of {rows / base_s / 1e3:,.0f} k rows/s",
    )


def _json(spark: SparkSession) -> Iterator[Row]:
    columns = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", JSON_ROWS)
        .option("numPartitions", TASKS)
        .load()
        .selectExpr(*JSON_COLUMNS)
    )
    text = columns.selectExpr("to_json(struct(*)) AS value")
    json: list[float] = []
    base: list[float] = []
    zstd: list[float] = []
    compressor: list[float] = []
    order = random.Random(7)
    ways: list[tuple[DataFrame, dict[str, str], list[float]]] = [
        (columns, {"valueFormat": "json"}, json),
        (text, {}, base),
        (text, {"compression": "zstd"}, zstd),
    ]
    rows = spark.range(JSON_ROWS).selectExpr("id AS value").selectExpr(*JSON_COLUMNS)
    records = rows.selectExpr("to_json(struct(*)) AS value").toArrow().column(0)
    part = records.slice(0, JSON_ROWS // TASKS)
    for _ in range(WARM_UP + ROUNDS):
        for frame, options, seconds in order.sample(ways, len(ways)):
            seconds.append(seconds_of(frame, "opendata-buffer", options=options))
        compressor.append(_compressed_s(part))
    json_s, base_s, zstd_s, compressor_s = (
        statistics.median(each[WARM_UP:]) for each in (json, base, zstd, compressor)
    )
    ratio, speed, base_speed = base_s / json_s, JSON_ROWS / json_s / 1e3, JSON_ROWS / base_s / 1e3
    yield Row(
        "streaming sink, 7 columns as JSON by valueFormat=json / by to_json(struct(*)) AS value",
        f"{ratio:.2f} x",
        detail=f"{speed:,.0f} k rows/s against {base_speed:,.0f} k rows/s",
    )
    more_s = zstd_s - base_s
    yield Row(
        "what zstd adds to a micro-batch of that JSON / the compressor's own time",
        f"{more_s / compressor_s:.2f} x",
        "<= 1.3 x",
        more_s / compressor_s <= 1.3,
        f"{zstd_s:.2f} against {base_s:.2f} s; a task's rows compress in {compressor_s:.2f} s",
    )


def _compressed_s(records: pa.ChunkedArray) -> float:
    """Seconds that zstd takes for these records, in blocks as large as the sink's."""
    block = memoryview(encode_arrow_block(records)[0])
    size = SinkOptions(queue=QueueConfig(store="memory://any")).target_batch_bytes
    started_at = time.perf_counter()
    for begin in range(0, len(block), size):
        seal_block((block[begin : begin + size],), 1, Compression.ZSTD)
    return time.perf_counter() - started_at


def seconds_of(
    frame: DataFrame,
    sink: str,
    *,
    partitions: int = 0,
    options: Mapping[str, str] | None = None,
) -> float:
    """Median seconds of a micro-batch; into a topic when there are partitions."""
    return started(lambda _: _seconds_of(frame, sink, partitions, options or {}))


def _seconds_of(frame: DataFrame, sink: str, partitions: int, options: Mapping[str, str]) -> float:
    home = Path(tempfile.mkdtemp(prefix="buffer-bench-"))
    try:
        if partitions:
            Topic.create(str(home / "store"), partitions)
        query = (
            frame.writeStream.format(sink)
            .options(**options)
            .option("checkpointLocation", str(home / "checkpoint"))
            .start(str(home / "store"))
        )
        try:
            while (query.lastProgress or {"batchId": -1})["batchId"] < BATCHES:
                if query.awaitTermination(0.05):
                    break
        finally:
            query.stop()
        times = [
            each["durationMs"]["addBatch"] / 1000
            for each in query.recentProgress
            if 0 < each["batchId"] <= BATCHES
        ]
        return statistics.median(times)
    finally:
        # Tasks of a stopped query may still be writing.
        shutil.rmtree(home, ignore_errors=True)
