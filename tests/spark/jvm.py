"""Start JVMs one after the other, and run a query of each kind before the first test.

Spark gives a Python process ten seconds to connect back and otherwise fails the query; no setting
changes that. Ten seconds are not enough if two JVMs start at the same time on a busy machine, or if
a process is the first to load pyspark, Arrow, and this library from a cold disk.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The optimising compiler does not pay off in a process that runs for a minute."""

PLAIN_FILES = (
    "-Dspark.hadoop.fs.file.impl=org.apache.hadoop.fs.RawLocalFileSystem"
    " -Dspark.hadoop.fs.AbstractFileSystem.file.impl=org.apache.hadoop.fs.local.RawLocalFs"
)
"""Without Hadoop's native library, each local file costs three processes, ``readlink`` twice and
``chmod``: 35 of them per micro-batch. So this file system writes no checksum files."""

CLASSES = "OPENDATA_BUFFER_CLASSES"
"""Names the archive that ``python -m tests.spark.classes`` made, if any."""

LATE = "Python worker failed to connect back"
"""Spark's error in that case. It is the only failure of Spark after which a test tries again."""

ROOT = Path(__file__).resolve().parents[2]
PATHS = (Path(__file__).with_name("site"), ROOT / "core", ROOT)


def prepare() -> None:
    """Let workers run this interpreter and find this tree. Call it before pyspark starts a JVM."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PATHS), *before])
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", SMALL_JVM)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{java_options()} {PLAIN_FILES}")


def java_options() -> str:
    """Return the options of every JVM that a test starts."""
    archive = os.environ.get(CLASSES, "")
    return SMALL_JVM + (sharing(Path(archive)) if archive and Path(archive).exists() else "")


def sharing(archive: Path) -> str:
    """Return options to use a class archive. An archive of another Java or Spark is ignored."""
    return f" -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"


@contextmanager
def starting() -> Iterator[None]:
    """Wait until no other JVM of this user's tests starts.

    The kernel holds the lock, so a process that is killed while it starts a JVM releases it.
    """
    path = Path(tempfile.gettempdir()) / f"opendata-buffer-jvm-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def patiently(call: Callable[[], object]) -> None:
    """Call up to five times, until it does not fail with LATE. Other errors are raised."""
    for left in reversed(range(5)):
        try:
            call()
            return
        except Exception as error:
            if LATE not in str(error) or left == 0:
                raise


def warm_up(spark: SparkSession, home: Path) -> None:
    """Let Spark start each kind of Python process once: planner, reader, source, writer, sink."""
    from pyspark.sql import datasource

    from tests.spark.queues import produce

    store = home / "warm"
    store.mkdir()
    produce(str(store), [[b"warm"]])

    def read() -> None:
        assert spark.read.format("opendata-buffer").load(str(store)).count() == 1

    def copy() -> None:
        frame = spark.readStream.format("opendata-buffer").option("gcEnabled", "false")
        sink = "opendata-buffer" if hasattr(datasource, "DataSourceStreamArrowWriter") else "noop"
        writer = frame.load(str(store)).select("value").writeStream.format(sink)
        writer = writer.option("checkpointLocation", str(home / "warm-checkpoint"))
        writer.trigger(availableNow=True).start(str(home / "warm-copy")).awaitTermination()

    patiently(read)
    patiently(copy)
