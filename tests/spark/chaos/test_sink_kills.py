"""The sink's driver and workers killed at random, a consumer on the other end: all rows once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.spark.chaos.processes import KILLS
from tests.spark.written import Queued, drain, filtered

SCRIPT = """
import sys
from pyspark.sql import SparkSession

from tests.spark.jvm import starting

store, home, java = sys.argv[1:]
builder = (
    SparkSession.builder.master("local[2]")
    .config("spark.driver.extraJavaOptions", java)
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.sql.codegen.wholeStage", "false")
    .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
)
with starting():
    spark = builder.getOrCreate()
reader = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
query = (
    reader.text(home + "/in").repartition(2).writeStream.format("opendata-buffer")
    .option("checkpointLocation", home + "/checkpoint")
    .trigger(availableNow=True)
    .start(store)
)
query.awaitTermination()
"""
LINES = 40
LIVES = max(4, KILLS // 4)
FILES = 3 * LIVES + 2
PATIENCE_S = 240.0


@pytest.mark.slow
def test_every_row_once_after_kills(java: str, store: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("SINK_KILL_SEED", random.randrange(10**6)))
    print(f"SINK_KILL_SEED={seed}")
    rng = random.Random(seed)
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        path = tmp_path / "in" / f"{number:03}.txt"
        path.write_text("".join(f"{number}.{line}\n" for line in range(LINES)))
        os.utime(path, (1_700_000_000 + number,) * 2)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    taken: list[Queued] = []
    killed = 0
    for kill in range(LIVES + 1):
        # A session of its own: the JVM and the Python workers die with the driver.
        process = subprocess.Popen(
            [sys.executable, str(script), store, str(tmp_path), java],
            stdout=subprocess.DEVNULL,
            stderr=(tmp_path / f"log-{kill}").open("w"),
            start_new_session=True,
        )
        try:
            goal = offsets(tmp_path) + rng.randint(1, 3)
            until = time.monotonic() + PATIENCE_S
            while process.poll() is None and time.monotonic() < until:
                if rng.random() < 0.5:
                    taken += drain(store)
                if kill < LIVES and offsets(tmp_path) >= goal:
                    # Anywhere between the plan of this batch and the next one's.
                    time.sleep(rng.random() * 0.6)
                    killed += process.poll() is None
                    break
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, (tmp_path / f"log-{LIVES}").read_text()[-4000:]
    taken += drain(store)

    expected = {f"{number}.{line}".encode() for number in range(FILES) for line in range(LINES)}
    read = filtered(taken)
    assert set(read) == expected
    assert len(read) == len(expected)
    assert killed == LIVES


def offsets(home: Path) -> int:
    """Micro-batches planned so far."""
    planned = home / "checkpoint" / "offsets"
    return len(list(planned.glob("[0-9]*"))) if planned.exists() else 0
