"""Python workers are killed in the middle of tasks: Spark repeats the task with the same output."""

from __future__ import annotations

import random
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil

from tests.spark.chaos.processes import Driver, Drivers, Job, Stream, wait_for
from tests.spark.queues import filtered, manifest, produce, written
from tests.support.killed import PATIENCE_S, seeded

BATCHES = 48
RECORDS_EACH = 30
MAX_KILLS = 80
ENOUGH_KILLS, ENOUGH_LOST = 20, 8


def expected() -> list[str]:
    # Long enough to fill the pipe, so that a reading worker must wait for a slow one.
    return [f"{b}.{k} {'-' * 2000}" for b in range(BATCHES) for k in range(RECORDS_EACH)]


def test_every_record_once_after_kills_of_workers(java: str, tmp_path: Path) -> None:
    parquet = Stream.make(tmp_path, "files", "parquet", tmp_path / "in-1", pause=0.004)
    into = tmp_path / "in-2", tmp_path / "out"
    buffer = Stream.make(tmp_path, "buffer", "buffer", *into, pause=0.004)
    streams = [parquet, buffer]
    records = [value.encode() for value in expected()]
    for stream in streams:
        batches = (records[n : n + RECORDS_EACH] for n in range(0, len(records), RECORDS_EACH))
        produce(stream.store, batches)
    # A task may fail eight times. A query whose planning process dies is restarted.
    job = Job(streams, java, master="local[2,8]", restarts=40)
    with closing(Drivers(job, tmp_path, ahead=False)) as drivers, seeded("CHAOS_SEED") as rng:
        driver = drivers.go("drain")
        # Not while Spark searches for formats, which it does once: it would not find ours.
        wait_for(lambda: driver.ended() or parquet.planned() >= 0, "the first micro-batch")
        kills = kill_workers(driver, rng)
        assert driver.finish() == expected()
        lost = lost_tasks(driver)
        print(f"{kills} kills, {lost} lost tasks")
        copied = [each.decode() for each in filtered(written(buffer.out))]
        assert sorted(copied) == sorted(expected())
        assert [manifest(stream.store).entry_count for stream in streams] == [0, 0]
        assert kills >= ENOUGH_KILLS // 2
        assert lost >= ENOUGH_LOST // 2, "the kills did not hit tasks"


def kill_workers(driver: Driver, rng: random.Random) -> int:
    """Kill Python processes of the driver until enough of them ran a task.

    Returns:
        The number of kills. Many processes only wait for a task.
    """
    kills = 0
    until = time.monotonic() + PATIENCE_S
    while kills < MAX_KILLS and not driver.ended():
        if kills >= ENOUGH_KILLS and lost_tasks(driver) >= ENOUGH_LOST:
            break
        assert time.monotonic() < until, driver.errors()
        time.sleep(rng.uniform(0.1, 0.5))
        with suppress(psutil.NoSuchProcess):
            for victim in choose(arguments_below(driver.process.pid), rng):
                victim.kill()
                kills += 1
    return kills


def lost_tasks(driver: Driver) -> int:
    return driver.log.read_text().count("Lost task")


def arguments_below(pid: int) -> dict[psutil.Process, list[str]]:
    """Return the command lines of the living descendants of a process."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[child] = child.cmdline()
    return found


def choose(found: dict[psutil.Process, list[str]], rng: random.Random) -> list[psutil.Process]:
    """Choose mostly a worker with a task, sometimes another worker or the planning process."""
    serving = [process for process, words in found.items() if "pyspark.daemon" in words]
    daemons = {worker.pid for worker in serving}
    kind = rng.choices(("task", "any", "plan"), (18, 1, 1))[0]
    if kind == "plan":
        victims = [
            process for process, words in found.items() if "streaming_source_runner" in str(words)
        ]
    elif kind == "any":
        victims = serving
    else:  # forked by the process that waits for work
        workers = [worker for worker in serving if found[worker][-1] == "pyspark.worker"]
        victims = [worker for worker in workers if worker.ppid() in daemons]
    return rng.sample(victims, min(1, len(victims)))
