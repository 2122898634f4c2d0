"""What somebody waits for who starts the library, a command, or a query that finds no work.

Seconds by the clock, medians of processes that take turns. What Python takes to start is part of a
command's time and not of an import's. A query is compared with one over a Python source that does
nothing (:func:`benchmarks.spark_once.start_row`).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.latency import in_turns
from benchmarks.spark_once import start_row
from benchmarks.table import Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS = 15
WARM_UP = 1  # the first start compiles modules, unless somebody has done so before
IMPORT, IMPORT_S = "import opendata_buffer", 0.15
HELP, HELP_S = "opendata-buffer --help", 0.3
CLASSES = "from opendata_buffer import Consumer, Producer"
"""The package loads what is asked for, so this is what a program waits for."""
TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def output_of(*words: str) -> str:
    """What a Python process prints.

    Raises:
        CalledProcessError: It failed.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        [sys.executable, *words], check=True, capture_output=True, text=True, env=environment
    ).stdout


def imported(statement: str) -> float:
    """Seconds of an import in a new process."""
    return float(output_of("-c", TIMED.format(statement)))


def clock(*words: str) -> float:
    """Seconds of a whole process."""
    began = time.perf_counter()
    assert output_of(*words) or words[-1] == "pass"
    return time.perf_counter() - began


def process_rows(rounds: int = ROUNDS) -> Iterator[Row]:
    """The import and a command."""
    measures: dict[str, Callable[[], float]] = {
        IMPORT: lambda: imported(IMPORT),
        HELP: lambda: clock("-m", "opendata_buffer", "--help"),
        CLASSES: lambda: imported(CLASSES),
        "a process of Python that does nothing": lambda: clock("-c", "pass"),
    }
    bars = {IMPORT: IMPORT_S, HELP: HELP_S}
    for name, taken in in_turns(measures, WARM_UP + rounds).items():
        counted = taken[WARM_UP:]
        median, bar = statistics.median(counted), bars.get(name)
        yield Row(
            name,
            f"{median:.3f} s",
            "" if bar is None else f"<= {bar:g} s",
            None if bar is None else median <= bar,
            f"{min(counted):.3f} to {max(counted):.3f} in {rounds} runs",
        )


def start_rows(spark: SparkSession, home: Path) -> Iterator[Row]:
    """All lines about starting."""
    yield from process_rows()
    yield start_row(spark, home)
