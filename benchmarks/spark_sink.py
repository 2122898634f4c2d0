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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StringType, StructField, StructType

from benchmarks.latency import MEMORY, in_turns
from benchmarks.queries import started
from benchmarks.table import Row
from buffer_sink.options import SinkOptions
from buffer_sink.writer import WritePlan
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import Compression, seal_block
from opendata_buffer.topic.topic import Topic

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ROWS = 800_000
TASKS = 2
WARM_UP = 1  # rounds that do not count: the JVM compiles what both of them run
ROUNDS = 9
TASK_ROUNDS = 12
ARROW_ROWS = 10_000  # of a record batch, Spark's default
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
    order = random.Random(7)
    ways: list[tuple[DataFrame, dict[str, str], list[float]]] = [
        (columns, {"valueFormat": "json"}, json),
        (text, {}, base),
    ]
    for _ in range(WARM_UP + ROUNDS):
        for frame, options, seconds in order.sample(ways, len(ways)):
            seconds.append(seconds_of(frame, "opendata-buffer", options=options))
    json_s, base_s = (statistics.median(each[WARM_UP:]) for each in (json, base))
    speed, base_speed = JSON_ROWS / json_s / 1e3, JSON_ROWS / base_s / 1e3
    yield Row(
        "streaming sink, 7 columns as JSON by valueFormat=json / by to_json(struct(*)) AS value",
        f"{base_s / json_s:.2f} x",
        detail=f"{speed:,.0f} k rows/s against {base_speed:,.0f} k rows/s",
    )
    rows = spark.range(JSON_ROWS).selectExpr("id AS value").selectExpr(*JSON_COLUMNS)
    records = rows.selectExpr("to_json(struct(*)) AS value").toArrow()
    yield _zstd(records.slice(0, JSON_ROWS // TASKS))


def _zstd(rows: pa.Table) -> Row:
    """A task's work without Spark, in this process, by the processor's time: a micro-batch's
    spreads by more than compressing takes."""
    block = memoryview(encode_arrow_block(rows.column(0))[0])
    ways = {
        "none": lambda: _write(rows, Compression.NONE),
        "zstd": lambda: _write(rows, Compression.ZSTD),
        "compressor": lambda: _compress(block),
    }
    found = in_turns({name: partial(_cpu_s, way) for name, way in ways.items()}, TASK_ROUNDS)
    none_s, zstd_s, compressor_s = (statistics.median(each[WARM_UP:]) for each in found.values())
    more = (zstd_s - none_s) / compressor_s
    return Row(
        "what zstd adds to a task's writing of that JSON / the compressor's own time",
        f"{more:.2f} x",
        "<= 1.3 x",
        more <= 1.3,
        f"{zstd_s:.3f} against {none_s:.3f} s of CPU for {len(rows):,} rows, which compress in "
        f"{compressor_s:.3f} s; medians of {TASK_ROUNDS - WARM_UP}",
    )


def _cpu_s(work: Callable[[], None]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _write(rows: pa.Table, compression: Compression) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as store:
        options = SinkOptions(queue=QueueConfig(store=store), compression=compression)
        plan = WritePlan.make(options, StructType([StructField("value", StringType())])).locate()
        batches = rows.to_batches(max_chunksize=ARROW_ROWS)
        assert plan.upload(iter(batches), None).uploads


def _compress(block: memoryview) -> None:
    """In blocks as large as the sink's."""
    size = SinkOptions(queue=QueueConfig(store="memory://any")).target_batch_bytes
    for begin in range(0, len(block), size):
        seal_block((block[begin : begin + size],), 1, Compression.ZSTD)


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
