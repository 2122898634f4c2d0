"""All that needs Spark, in one session; ``spark/once`` and the like are parts of it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.spark_drain import drain_row
from benchmarks.spark_once import once_rows
from benchmarks.spark_sink import sink_rows
from benchmarks.spark_source import source_rows
from benchmarks.start import start_rows
from benchmarks.table import Row
from benchmarks.typed_source import typed_rows

ROOT = Path(__file__).resolve().parents[1]

PARTS: dict[str, Callable[[SparkSession, Path], Iterable[Row]]] = {
    "source": source_rows,
    "typed": typed_rows,
    "once": once_rows,
    "start": start_rows,
    "drain": lambda spark, home: [drain_row(spark, home)],
    "sink": lambda spark, home: sink_rows(spark),
}


def session(home: Path, master: str = "local[2]") -> SparkSession:
    """Two cores on any machine unless ``master`` says otherwise, and Spark's defaults."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # What pip installed is compiled; where this is set, each process would compile our sources.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Workers import the yardsticks from here.
    paths = [str(ROOT), str(ROOT / "core"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return (
        SparkSession.builder.master(master)
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


def run(part: str = "") -> Iterator[Row]:
    """All lines of this suite, in the order of the report; or those of one part."""
    home = Path(tempfile.mkdtemp(prefix="buffer-bench-"))
    spark = session(home)
    try:
        for name, rows in PARTS.items():
            if part in ("", name):
                yield from rows(spark, home)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
