"""Brokers, producers, and workers as processes, which are killed and replaced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer import Producer, ProducerConfig
from tests.unit.broker.local import eventually
from tests.unit.cli import shell

COMMAND = [sys.executable, "-m", "opendata_buffer"]
BATCHES = 30


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def status(store: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shell.ok("status", str(store), "--json").stdout)
    return found


def fill(store: Path) -> None:
    with Producer(ProducerConfig(store=str(store), broker="off")) as producer:
        for number in range(BATCHES):
            producer.produce([b"%d" % number])
            producer.flush()


def test_workers_continue_when_their_broker_is_killed_and_finish_every_batch(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    store, out = tmp_path / "queue", tmp_path / "out"
    fill(store)
    first = start("broker", str(store))
    assert line_of(first).startswith("serving ")
    second = start("broker", str(store))
    assert line_of(second).startswith("standing by: ")
    out.mkdir()
    # One file for each run of the command, so a batch that is processed twice has two files.
    shell = f"cat > {out}/$OPENDATA_BUFFER_SEQUENCE.$$; sleep 0.05"
    workers = [
        start("work", str(store), "--broker", "auto", "--parallel", "2", "--", "sh", "-c", shell)
        for _ in range(2)
    ]
    eventually(lambda: len(list(out.iterdir())) >= 5)
    first.kill()
    assert line_of(second).startswith("serving ")
    # If the first broker handed a batch out just before its death and no worker heard of it, the
    # batch is handed out again when the claim lapses, a minute after the second one took over.
    eventually(lambda: status(store)["queue_length"] == 0, 150)
    found = status(store)
    assert (found["broker"]["term"], found["broker"]["alive"]) == (2, True)
    assert (found["claims"]["held"], found["claims"]["done"]) == (0, 0)
    ended = [workers[0], workers[1], second]
    for process in ended:
        process.send_signal(signal.SIGTERM)
    # Five seconds are promised, but a batch that waits for a claim to lapse takes a minute.
    codes = [process.wait(45) for process in ended]
    assert codes == [143] * 3
    assert status(store)["broker"]["address"] == ""
    runs = [path.name.partition(".")[0] for path in out.iterdir()]
    assert sorted(runs, key=int) == [str(number) for number in range(BATCHES)]
    assert all(path.read_text() == f"{path.name.partition('.')[0]}\n" for path in out.iterdir())
    printed = [process.stderr.read() for process in workers if process.stderr is not None]
    done = sum(int(line.split("ended by a signal: ")[1].split()[0]) for line in printed)
    assert done == BATCHES
