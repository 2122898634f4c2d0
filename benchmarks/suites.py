"""All suites, by the names that ``./run bench`` accepts.

Modules are imported when their suite runs: loading Spark takes seconds, and a suite that starts
many processes would load it in each of them.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables import Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Call = tuple[str, ...]
"""The module and name of a function, and its arguments."""

PLAIN: dict[str, Call] = {
    "codec": ("codec.rows",),
    "producers": ("producer.rows",),
    "pace": ("producer.pace_rows",),
    "topics/processes": ("topics.process_rows",),
    "broker": ("broker.rows",),
    "consumer": ("consumer.rows",),
    "read": ("read.rows",),
    "log": ("log.rows",),
    "commands": ("commands.rows",),
    "s3": ("consumer.s3_rows",),
    "cost": ("costs.rows",),
    "idle": ("idle.rows",),
    "growth": ("growth.rows",),
    "spark_cores": ("spark_available_now.core_rows",),
    "peers": ("peers.rows",),
    "peers/python": ("peers.rows", "python"),
    "peers/spark": ("peers.rows", "spark"),
    "workloads": ("workloads.rows",),
    "workloads/opendata": ("workloads.rows", "opendata"),
    "workloads/openmessaging": ("workloads.rows", "openmessaging"),
    "workloads/pipe": ("workloads.rows", "pipe"),
    "workloads/nexmark": ("workloads.rows", "nexmark"),
}
"""Suites that start everything they need themselves."""

IN_SESSION: dict[str, Call] = {
    "topics/spark": ("topics.spark_rows",),
    "spark/source": ("spark_source.rows",),
    "spark/typed": ("spark_source.typed_rows",),
    "spark/once": ("spark_available_now.once_rows",),
    "spark/start": ("spark_available_now.start_rows",),
    "spark/drain": ("spark_source.drain_rows",),
    "spark/sink": ("spark_sink.rows",),
}
"""Suites that get a Spark session and a directory. Those of one ``./run`` name share a session."""

GROUPS = {
    "topics": ("topics/processes", "topics/spark"),
    "spark": ("spark/source", "spark/typed", "spark/once", "spark/start", "spark/drain",
              "spark/sink"),
}  # fmt: skip
"""Names that stand for several suites."""

OLD_NAMES = {"oncall": "commands"}
DEFAULT = (
    "codec", "producers", "pace", "topics", "broker", "consumer", "read", "log", "commands", "s3",
    "cost", "idle", "spark",
)  # fmt: skip
"""The suites of ``./run bench`` without arguments. The other ones take half an hour each, download
Kafka, or are parts of these."""

NAMES = tuple(dict.fromkeys([*DEFAULT, *GROUPS, *PLAIN, *IN_SESSION, *OLD_NAMES]))


def rows_of(name: str) -> Iterator[Row]:
    """Run a suite.

    Args:
        name: One of :data:`NAMES`.

    Yields:
        Its rows, as soon as they are measured.
    """
    name = OLD_NAMES.get(name, name)
    parts = GROUPS.get(name, (name,))
    for part in parts:
        if part in PLAIN:
            yield from _call(PLAIN[part])
    in_session = [part for part in parts if part in IN_SESSION]
    if in_session:
        yield from _rows_in_session(in_session)


def rows_in(spark: SparkSession, home: Path, name: str) -> Iterable[Row]:
    """Run a suite of :data:`IN_SESSION` in an existing Spark session.

    Args:
        spark: The session.
        home: An empty directory.
        name: Name of the suite.

    Returns:
        The rows of the suite.
    """
    return _call(IN_SESSION[name], spark, home)


def _rows_in_session(names: Iterable[str]) -> Iterator[Row]:
    from benchmarks.queries import session

    home = Path(tempfile.mkdtemp(prefix="buffer-bench-"))
    spark = session(home)
    try:
        for name in names:
            yield from rows_in(spark, home, name)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)


def _call(call: Call, *arguments: Any) -> Iterable[Row]:
    path, *more = call
    module, function = path.split(".")
    found = importlib.import_module(f"benchmarks.{module}")
    rows: Callable[..., Iterable[Row]] = getattr(found, function)
    return rows(*arguments, *more)
