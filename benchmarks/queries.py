"""Spark sessions and queries of the suites, and the time of their micro-batches."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

ROOT = Path(__file__).resolve().parents[1]
TRIES = 3
FAILED_STARTS = (
    "Python worker failed to connect back",
    "PYTHON_WORKER_FAILED_TO_CONNECT_BACK",
)
POLL_S = 0.1

T = TypeVar("T")


def session(home: Path, master: str = "local[2]") -> SparkSession:
    """Start a session with Spark's defaults, on two cores of any machine.

    Args:
        home: A directory for the warehouse.
        master: Spark's master, if it is not two local cores.

    Returns:
        The session.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # An installed package is compiled. With this variable each process would compile our sources.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Python workers import the yardsticks from here.
    paths = [str(ROOT), str(ROOT / "core"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    builder: SparkSession.Builder = SparkSession.builder  # a property of the class
    return (
        builder.master(master)
        .appName("opendata-buffer benchmarks")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .config("spark.driver.memory", "2g")
        .config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .getOrCreate()
    )


def started(run: Callable[[int], T]) -> T:
    """Run a query, and run it again if Spark itself failed to start it.

    On a busy machine Spark sometimes cannot start a Python worker. That says nothing about the
    measurement, but without a second try all rows of the suite would be lost.

    Args:
        run: Runs the query. It gets the number of the try (0, 1, 2), because each try needs a
            checkpoint of its own.

    Returns:
        The result of the query.

    Raises:
        Exception: The error of the last try, or any other error at once.
    """
    for number in range(TRIES):
        try:
            return run(number)
        except Exception as error:
            if number == TRIES - 1 or not any(text in str(error) for text in FAILED_STARTS):
                raise
            print("Spark could not start a Python worker: trying again", file=sys.stderr)
    raise AssertionError("not reached")


def micro_batch_seconds(
    frame: DataFrame,
    checkpoint: Path | str,
    micro_batches: int,
    *,
    duration: str = "addBatch",
    sink: str = "noop",
    options: Mapping[str, str] | None = None,
) -> float:
    """Run a query, and measure its micro-batches.

    The first micro-batch does not count, because it starts Python workers.

    Args:
        frame: The stream.
        checkpoint: A directory that does not exist yet.
        micro_batches: Number of micro-batches, at least 2.
        duration: The phase that counts. ``addBatch`` runs the tasks and commits.
            ``triggerExecution`` is the whole trigger. It adds the same bookkeeping to every source,
            and so flatters the slower one.
        sink: Format of the sink.
        options: Options of the sink.

    Returns:
        The median seconds of a micro-batch.
    """
    writer = frame.writeStream.format(sink).options(**(options or {}))
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        while (query.lastProgress or {"batchId": -1})["batchId"] < micro_batches - 1:
            if ended_within(query, POLL_S):
                break
    finally:
        query.stop()
    times: list[float] = [
        progress["durationMs"][duration] / 1000
        for progress in query.recentProgress
        if 0 < progress["batchId"] < micro_batches
    ]
    return statistics.median(times)


def ended_within(query: StreamingQuery, seconds: float) -> bool:
    """Wait for the end of a query.

    Args:
        query: The query.
        seconds: The longest wait. Spark's annotation asks for whole seconds, but it takes
            fractions.

    Returns:
        Whether the query ended.
    """
    return bool(query.awaitTermination(seconds))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Drained:
    """A query that read everything and ended.

    Attributes:
        seconds: Seconds from its start to its end.
        add_batch_s: Seconds in which Spark ran the tasks of its micro-batches.
        rows: Number of rows that it read.
    """

    seconds: float
    add_batch_s: float
    rows: int


def drained(frame: DataFrame, checkpoint: Path | str) -> Drained:
    """Run a query with ``availableNow`` into ``noop``.

    Args:
        frame: The stream.
        checkpoint: A directory that does not exist yet.

    Returns:
        The times and the rows of the query.
    """
    began = time.perf_counter()
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    seconds = time.perf_counter() - began
    progress = query.recentProgress
    add_batch_ms = sum(batch["durationMs"].get("addBatch", 0) for batch in progress)
    rows = sum(int(batch["numInputRows"]) for batch in progress)
    return Drained(seconds, add_batch_ms / 1000, rows)
