"""The benchmark suites that need Spark run at a tiny size, which measures no speed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.measuring import TINY
from benchmarks.suites import IN_SESSION, rows_in
from benchmarks.tables import Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
AT_NIGHT = bool(os.environ.get("OPENDATA_BUFFER_CLUSTER"))

Rows = Callable[["SparkSession", Path], Iterable[Row]]


def peers(spark: SparkSession, home: Path) -> Iterable[Row]:
    """Run our side of the comparison with Kafka."""
    from benchmarks.peers import spark_rows

    return spark_rows(spark, home, None)


def pipe(spark: SparkSession, home: Path) -> Iterable[Row]:
    """Run our side of SPARK-56543."""
    from benchmarks.workloads import pipe_rows

    return pipe_rows(spark, None)


def nexmark(spark: SparkSession, home: Path) -> Iterable[Row]:
    """Run our side of Nexmark."""
    from benchmarks import nexmark

    return nexmark.rows(spark, home, None)


OUR_SIDE: dict[str, Rows] = {"peers": peers, "pipe": pipe, "nexmark": nexmark}


@pytest.fixture
def tiny(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    """Return a session whose Python workers also run the benchmarks at a tiny size."""
    from pyspark_opendata_buffer import register

    monkeypatch.setenv(TINY, "1")
    environment = spark.sparkContext.environment
    environment[TINY] = "1"
    register(spark)
    yield spark
    del environment[TINY]


@pytest.mark.parametrize("suite", IN_SESSION)
def test_a_suite_runs_at_a_tiny_size(suite: str, tiny: SparkSession, tmp_path: Path) -> None:
    assert [*rows_in(tiny, tmp_path, suite)]


@pytest.mark.parametrize("workload", OUR_SIDE)
def test_our_side_of_a_comparison_runs_without_kafka(
    workload: str, tiny: SparkSession, tmp_path: Path
) -> None:
    assert [*OUR_SIDE[workload](tiny, tmp_path)]


@pytest.mark.skipif(not AT_NIGHT, reason="starts its own Spark; runs with --nightly")
@pytest.mark.parametrize("suite", ["spark_cores", "peers", "workloads"])
def test_a_suite_with_its_own_spark_runs_at_a_tiny_size(suite: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "--tiny", suite]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
