"""How long does a person wait for a command, or for an import?

* :func:`rows`: ``status`` and ``fsck`` over 50,000 batches, as processes, in seconds of CPU
  time of the whole command. On an idle machine a person waits about as long. The store is a
  directory in the page cache.
* :func:`start_rows`: an import and ``--help``, in seconds by the clock, medians of processes that
  run in turns. The time that Python takes to start is part of a command, but not of an import.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measuring import clock_seconds, in_turns, sized
from benchmarks.tables import Row
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

BATCHES = sized(50_000, tiny=10)
RECORDS = [b"%0100d" % number for number in range(10)]
TRIES = sized(4, tiny=1)  # the first start may compile modules
GOALS_S = {
    ("status",): 1.0,
    ("status", "--max-lag", "1e9"): 0.6,
    ("fsck",): 6.0,
}
"""CPU seconds that each command may take."""

ROUNDS = sized(15, tiny=1)
WARM_UP = sized(1, tiny=0)  # the first start may compile modules
IMPORT, IMPORT_S = "import opendata_buffer", 0.15
HELP, HELP_S = "opendata-buffer --help", 0.3
CLASSES = "from opendata_buffer import Consumer, Producer"
"""The package loads a class when it is first used, so this is the wait of a real program."""

TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def rows() -> Iterator[Row]:
    """Give a row for each command."""
    with tempfile.TemporaryDirectory() as folder:
        write_queue(folder, BATCHES)
        for (command, *options), goal_s in GOALS_S.items():
            seconds = command_cpu_seconds(command, folder, *options)
            name = " ".join([command, *options, f"of {BATCHES:,} batches"])
            yield Row(name, f"{seconds:.2f} s CPU", f"<= {goal_s:g} s", seconds <= goal_s)


def write_queue(directory: str, batches: int) -> None:
    """Write a queue as files. A producer would take longer than all commands together."""
    runtime, store = SystemRuntime(), open_store(directory)
    claim_queue(store, QueueConfig(store=directory), runtime=runtime)
    data = encode_batch(RECORDS)
    entries = []
    for _ in range(batches):
        location = batch_key("ingest", runtime.ulid())
        (Path(directory) / location).write_bytes(data)
        entries.append(NewEntry(location, (Metadata(0, runtime.now_ms()),)))
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)


def command_cpu_seconds(*words: str) -> float:
    """Measure a command.

    Args:
        *words: The arguments of ``opendata-buffer``.

    Returns:
        CPU seconds, the least of some tries.

    Raises:
        CalledProcessError: The command failed.
    """
    found = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _run("-m", "opendata_buffer", *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


def start_rows() -> Iterator[Row]:
    """Give rows for the import and for the shortest command. They belong to ``spark/start``."""
    measures: dict[str, Callable[[], float]] = {
        IMPORT: lambda: _import_seconds(IMPORT),
        HELP: lambda: clock_seconds(lambda: _run("-m", "opendata_buffer", "--help")),
        CLASSES: lambda: _import_seconds(CLASSES),
        "a process of Python that does nothing": lambda: clock_seconds(lambda: _run("-c", "pass")),
    }
    goals = {IMPORT: IMPORT_S, HELP: HELP_S}
    for name, taken in in_turns(measures, ROUNDS, WARM_UP).items():
        median, goal = statistics.median(taken), goals.get(name)
        yield Row(
            name,
            f"{median:.3f} s",
            "" if goal is None else f"<= {goal:g} s",
            None if goal is None else median <= goal,
            f"{min(taken):.3f} to {max(taken):.3f} in {ROUNDS} runs",
        )


def _import_seconds(statement: str) -> float:
    return float(_run("-c", TIMED.format(statement)))


def _run(*words: str) -> str:
    """Run Python with these arguments, and return its output."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # as an installed package
    return subprocess.run(
        [sys.executable, *words], check=True, capture_output=True, text=True, env=environment
    ).stdout
