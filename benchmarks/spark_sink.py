"""How fast does the streaming sink write?

The sink is compared with an Arrow writer in Python that throws the rows away, and with one that
only writes their bytes to a file, which is what any sink must do. All write the same micro-batches,
in random turns, in one session. The time that counts is ``addBatch``: Spark runs the tasks of a
micro-batch, and the sink commits.

Columns become JSON in the Python process of a task (``valueFormat=json``), or in the JVM by
``to_json``. These two also take turns, into the same sink.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StringType, StructField, StructType

from benchmarks.measuring import cpu_seconds, in_random_turns, in_turns, memory_folder, sized
from benchmarks.queries import micro_batch_seconds, started
from benchmarks.tables import Row
from buffer_sink.options import SinkOptions
from buffer_sink.writer import WritePlan
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import Compression, seal_block
from opendata_buffer.topic.topic import Topic

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

ROWS = sized(800_000, tiny=200)
TASKS = 2
WARM_UP = sized(1, tiny=0)  # rounds that do not count: the JVM compiles code that both run
ROUNDS = sized(9, tiny=1)
TASK_ROUNDS = sized(11, tiny=1)
ARROW_ROWS = 10_000  # of a record batch, Spark's default
MICRO_BATCHES = sized(4, tiny=2)  # of each query; the first one does not count

JSON_ROWS = sized(400_000, tiny=200)
JSON_COLUMNS = (
    "1700000000000 + value * 7 AS ts",
    "concat('user-', lpad(CAST(value * 7919 % 100000 AS STRING), 5, '0')) AS user",
    "element_at(array('click', 'view', 'purchase', 'error'), CAST(value % 4 AS INT) + 1) AS kind",
    "concat('/products/', value * 31 % 10000, '/details') AS url",
    "concat_ws('.', value % 256, value * 3 % 256, value * 5 % 256, value * 7 % 256) AS ip",
    "'Mozilla/5.0 (X11; Linux x86_64)' AS agent",
    "sha1(CAST(value AS STRING)) AS session",
)
"""Events like those of :func:`benchmarks.stores.log_events`."""


class NullWriter(DataSourceStreamArrowWriter):
    """Reads the rows of a task and does nothing with them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Read all record batches."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


class FileWriter(DataSourceStreamArrowWriter):
    """Writes the bytes of a task's rows to one file, and neither encodes nor syncs them.

    Args:
        folder: The directory of the file.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write all record batches."""
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False, buffering=0) as file:
            for batch in iterator:
                file.write(batch.column(0).buffers()[2])
        return WriterCommitMessage()


class FileSink(DataSource):
    """The data sink ``bytes-to-a-file``: the limit of a sink that writes to a directory."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "bytes-to-a-file"

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Return a writer."""
        folder = Path(self.options["path"])
        folder.mkdir(exist_ok=True)
        return FileWriter(str(folder))


class NullSink(DataSource):
    """The data sink ``throw-away``: the limit of any sink in Python."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "throw-away"

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Return a writer."""
        return NullWriter()


def rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """Give all rows of this suite."""
    del home
    spark.dataSource.register(NullSink)
    spark.dataSource.register(FileSink)
    for size in (100, 1000):
        yield from _bytes_rows(spark, size)
    yield _json_row(spark)
    yield _zstd_row(spark)


def sink_seconds(
    frame: DataFrame,
    sink: str,
    *,
    partitions: int = 0,
    options: Mapping[str, str] | None = None,
) -> float:
    """Write a stream, and measure its micro-batches.

    Args:
        frame: The stream.
        sink: Format of the sink.
        partitions: Partitions of the topic that is written, or 0 for a queue.
        options: Options of the sink.

    Returns:
        The median seconds of a micro-batch.
    """

    def query(attempt: int) -> float:
        del attempt
        home = Path(tempfile.mkdtemp(prefix="buffer-bench-"))
        try:
            store = str(home / "store")
            if partitions:
                Topic.create(store, partitions)
            return micro_batch_seconds(
                frame,
                home / "checkpoint",
                MICRO_BATCHES,
                sink=sink,
                options={"path": store, **(options or {})},
            )
        finally:
            # Tasks of a stopped query may still be writing.
            shutil.rmtree(home, ignore_errors=True)

    return started(query)


def _bytes_rows(spark: SparkSession, size: int) -> Iterator[Row]:
    count = ROWS if size <= 100 else ROWS // 4
    frame = _rates(spark, count).selectExpr(f"rpad(CAST(value AS STRING), {size}, 'x') AS value")
    ours = "opendata-buffer"
    yardsticks = {
        NullSink.name(): "throwing them away",
        FileSink.name(): "writing their bytes to a file",
    }
    measures: dict[str, Callable[[int], float]] = {
        name: lambda _, name=name: sink_seconds(frame, name)  # type: ignore[misc]
        for name in (ours, *yardsticks)
    }
    found = in_random_turns(measures, ROUNDS, WARM_UP)
    ours_s = statistics.median(found[ours])
    for name, what in yardsticks.items():
        base_s = statistics.median(found[name])
        ratio = base_s / ours_s
        yield Row(
            f"streaming sink, {size:,}-byte records, against {what}",
            f"{ratio:.0%}",
            ">= 92 %",
            ratio >= 0.92,
            f"{count / ours_s / 1e3:,.0f} k rows/s of {count / base_s / 1e3:,.0f} k rows/s",
        )


def _json_row(spark: SparkSession) -> Row:
    columns = _rates(spark, JSON_ROWS).selectExpr(*JSON_COLUMNS)
    text = columns.selectExpr("to_json(struct(*)) AS value")
    as_json = {"valueFormat": "json"}
    measures = {
        "json": lambda _: sink_seconds(columns, "opendata-buffer", options=as_json),
        "base": lambda _: sink_seconds(text, "opendata-buffer"),
    }
    found = in_random_turns(measures, ROUNDS, WARM_UP)
    json_s, base_s = (statistics.median(found[name]) for name in ("json", "base"))
    return Row(
        "streaming sink, 7 columns as JSON by valueFormat=json / by to_json(struct(*)) AS value",
        f"{base_s / json_s:.2f} x",
        detail=f"{JSON_ROWS / json_s / 1e3:,.0f} k rows/s against "
        f"{JSON_ROWS / base_s / 1e3:,.0f} k rows/s",
    )


def _rates(spark: SparkSession, count: int) -> DataFrame:
    """Return a stream of numbers, ``count`` in each micro-batch."""
    return (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", count)
        .option("numPartitions", TASKS)
        .load()
    )


def _zstd_row(spark: SparkSession) -> Row:
    """Compare the CPU time that zstd adds to the work of a task with the compressor alone.

    The task runs here, in this process and without Spark: the time of a micro-batch varies by
    more than the compression takes.
    """
    columns = spark.range(JSON_ROWS).selectExpr("id AS value").selectExpr(*JSON_COLUMNS)
    all_rows = columns.selectExpr("to_json(struct(*)) AS value").toArrow()
    rows = all_rows.slice(0, JSON_ROWS // TASKS)
    block = memoryview(encode_arrow_block(rows.column(0))[0])
    ways: dict[str, Callable[[], None]] = {
        "none": partial(_write, rows, Compression.NONE),
        "zstd": partial(_write, rows, Compression.ZSTD),
        "compressor": partial(_compress, block),
    }
    measures = {name: partial(cpu_seconds, way) for name, way in ways.items()}
    found = in_turns(measures, TASK_ROUNDS, WARM_UP)
    none_s, zstd_s, compressor_s = (statistics.median(seconds) for seconds in found.values())
    more = (zstd_s - none_s) / compressor_s
    return Row(
        "CPU time that zstd adds to a task's writing of that JSON / the compressor's own time",
        f"{more:.2f} x",
        "<= 1.3 x",
        more <= 1.3,
        f"{zstd_s:.3f} against {none_s:.3f} s of CPU for {len(rows):,} rows, which compress in "
        f"{compressor_s:.3f} s; medians of {TASK_ROUNDS}",
    )


def _write(rows: pa.Table, compression: Compression) -> None:
    """Do the work of a task."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as store:
        options = SinkOptions(queue=QueueConfig(store=store), compression=compression)
        plan = WritePlan.make(options, StructType([StructField("value", StringType())])).locate()
        batches = rows.to_batches(max_chunksize=ARROW_ROWS)
        assert plan.upload(iter(batches), None).uploads


def _compress(block: memoryview) -> None:
    """Compress in blocks of the size that the sink uses."""
    size = SinkOptions(queue=QueueConfig(store="memory://any")).target_batch_bytes
    for begin in range(0, len(block), size):
        seal_block((block[begin : begin + size],), 1, Compression.ZSTD)
