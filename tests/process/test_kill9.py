"""kill -9 with real processes, on a local directory and on a real S3 server: produce, kill,
restart, count."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_buffer import Producer, ProducerConfig
from tests.unit.cli import shell

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TRANSACTIONS = 120
RECORDS_EACH = 5
DEADLINE_S = 120
KILLS = max(4, int(os.environ.get("OPENDATA_BUFFER_KILLS", "16")) // 2)


class Worker:
    """A worker process that is killed and started again; its printed numbers are kept."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.printed: list[int] = []
        self.errors = ""
        self.restart(script, *arguments)

    def restart(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # kill -9 may cut the last line short.
            if line.endswith("\n"):
                self.printed.append(int(line))

    def await_printed(self, count: int) -> None:
        """Wait until this process has printed so many numbers more, or has ended."""
        enough = len(self.printed) + count
        deadline = time.monotonic() + DEADLINE_S
        while len(self.printed) < enough and not self.ended():
            assert time.monotonic() < deadline, f"{len(self.printed)} of {enough} numbers came"
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._finish()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def _finish(self) -> int:
        code = self._process.wait(DEADLINE_S)
        self._reader.join(30)
        assert self._process.stderr is not None
        self.errors = self._process.stderr.read()
        return code

    def wait(self) -> None:
        assert self._finish() == 0, self.errors


@pytest.mark.parametrize("seed", [1, 2])
def test_kill9_of_producers_and_consumer_loses_and_repeats_nothing(
    tmp_path: Path, seed: int
) -> None:
    kill_and_count(str(tmp_path / "store"), tmp_path, seed, TRANSACTIONS, KILLS)


def test_kill9_loses_and_repeats_nothing_on_a_real_s3_server(
    tmp_path: Path, real_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", real_server("versitygw"))
    size = 1 if KILLS < 50 else 3
    kill_and_count(f"s3://bucket/{tmp_path.name}", tmp_path, 3, 40 * size, 6 * size)


def kill_and_count(store: str, home: Path, seed: int, transactions: int, most_kills: int) -> None:
    """Two producers and a consumer are killed at any time; each record is in the end once."""
    rng = random.Random(seed)
    database = str(home / "sink.db")
    end = str(transactions)
    apps = {app: Worker("worker_produce.py", store, app, "0", end) for app in ("a", "b")}
    wanted = len(apps) * transactions * RECORDS_EACH
    consumer = Worker("worker_consume.py", store, database, str(wanted))
    # A part of the transactions between two kills, so that the last kill comes before the end.
    most = transactions * len(apps) // most_kills
    kills = {"producer": 0, "consumer": 0}
    for _ in range(most_kills):
        app = rng.choice([name for name, worker in apps.items() if not worker.ended()] or ["a"])
        worker = apps[app]
        worker.await_printed(rng.randint(0, most))
        if not worker.ended():
            worker.kill()
            kills["producer"] += 1
            # What was not printed may be in the queue all the same: produce it again.
            first = worker.printed[-1] + 1 if worker.printed else 0
            worker.restart("worker_produce.py", store, app, str(first), end)
        if rng.random() < 0.5 and not consumer.ended():
            consumer.await_printed(rng.randint(0, 2))
            if not consumer.ended():
                consumer.kill()
                kills["consumer"] += 1
                consumer.restart("worker_consume.py", store, database, str(wanted))
    for worker in apps.values():
        worker.wait()
    consumer.wait()
    assert kills["producer"] >= 3, kills
    assert kills["consumer"] >= 1, kills

    rows = sqlite3.connect(database).execute("select record from records order by rowid").fetchall()
    records = [record for (record,) in rows]
    for app in apps:
        expected = [f"{app} {n} {k}" for n in range(transactions) for k in range(RECORDS_EACH)]
        assert [record for record in records if record.startswith(app)] == expected
    assert len(records) == wanted


def test_kill9_keeps_everything_that_was_reported_durable(tmp_path: Path) -> None:
    """What a producer printed, because it was durable, is in the queue, whole and readable."""
    store = str(tmp_path / "store")
    rng = random.Random(3)
    printed: list[int] = []
    for _ in range(4):
        worker = Worker("worker_produce.py", store, "plain", str(len(printed)), "1000000")
        worker.await_printed(rng.randint(1, 100))
        worker.kill()
        printed += worker.printed
    with Producer(ProducerConfig(store=store)) as producer:
        producer.produce([b"end"]).watcher.await_durable(30)
    shell.ok("fsck", store)
    consumed = shell.ok("consume", store).stdout.splitlines()
    assert consumed[-1] == "end"
    seen = set(consumed)
    assert printed
    for number in printed:
        assert f"plain {number} 0" in seen
