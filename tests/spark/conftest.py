"""One quiet Spark session for all Spark tests in a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.jvm import LATE, prepare, starting, warm_up
from tests.spark.queues import Pipe, Query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

prepare()

_MANAGER = "FileSystemBasedCheckpointFileManager"
"""Spark's checkpoint manager for S3. The manager for local disks starts a process per request."""

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.spark)
            # Chaos tests check their drivers themselves, because killed drivers log errors on the
            # way.
            if "chaos" not in Path(item.path).parts:
                item.add_marker(pytest.mark.flaky(reruns=3, only_rerun=[LATE]))


def _checkpointing() -> str:
    """Return the subpackage of the checkpoint manager, which Spark 4.0 does not have."""
    import pyspark

    return "" if pyspark.__version__ < "4.1" else "checkpointing."


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    home = tmp_path_factory.mktemp("spark")
    log4j = home / "log4j2.properties"
    log4j.write_text(_LOG4J)
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("opendata-buffer tests")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={log4j}")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config(
            "spark.sql.streaming.checkpointFileManagerClass",
            f"org.apache.spark.sql.execution.streaming.{_checkpointing()}{_MANAGER}",
        )
    )
    with starting():
        session = builder.getOrCreate()
        warm_up(session, home)
    yield session
    session.stop()


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return a directory for a queue."""
    path = tmp_path / "store"
    path.mkdir()
    return str(path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


@pytest.fixture
def query(spark: SparkSession, store: str, checkpoint: str) -> Query:
    return Query(spark, store, checkpoint)


@pytest.fixture
def pipe(spark: SparkSession, store: str, tmp_path: Path) -> Pipe:
    return Pipe(spark, store, tmp_path)
