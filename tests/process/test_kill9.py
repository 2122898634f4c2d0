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

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
MOST_BETWEEN = 20
"""Transactions that are waited for before the next kill."""
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
        self._reader.join(DEADLINE_S)
        assert not self._reader.is_alive()
        assert self._process.stderr is not None
        self.errors = self._process.stderr.read()
        return code

    def wait(self) -> None:
        assert self._finish() == 0, self.errors


@pytest.mark.parametrize("seed", [1, 2])
def test_kill9_of_producers_and_consumer_loses_and_repeats_nothing(
    tmp_path: Path, seed: int
) -> None:
    kill_and_count(str(tmp_path / "store"), tmp_path, seed, KILLS)


def test_kill9_loses_and_repeats_nothing_on_a_real_s3_server(
    tmp_path: Path, real_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", real_server("versitygw"))
    kills = 4 if KILLS < 50 else 18
    kill_and_count(f"s3://bucket/{tmp_path.name}", tmp_path, 3, kills)


def kill_and_count(store: str, home: Path, seed: int, kills: int) -> None:
    """Two producers and a consumer are killed at any time; each record is in the end once.

    No process ends before the last kill, however long this one has no processor.
    """
    rng = random.Random(seed)
    database = str(home / "sink.db")
    endless = str(10**6)
    apps = {app: Worker("worker_produce.py", store, app, "0", endless) for app in ("a", "b")}
    consumer = Worker("worker_consume.py", store, database, endless)
    ends: dict[str, int] = {}

    def kill_producer(app: str, more: int | None = None) -> None:
        """And start it again, for so many transactions more."""
        worker = apps[app]
        worker.kill()
        # What was not printed may be in the queue all the same: produce it again.
        first = worker.printed[-1] + 1 if worker.printed else 0
        ends[app] = int(endless) if more is None else first + more
        worker.restart("worker_produce.py", store, app, str(first), str(ends[app]))

    for _ in range(kills):
        app = rng.choice(list(apps))
        apps[app].await_printed(rng.randint(0, MOST_BETWEEN))
        kill_producer(app)
        if rng.random() < 0.5:
            consumer.await_printed(rng.randint(0, 2))
            consumer.kill()
            consumer.restart("worker_consume.py", store, database, endless)
    for app in apps:
        kill_producer(app, MOST_BETWEEN)
    consumer.kill()
    wanted = sum(ends.values()) * RECORDS_EACH
    consumer.restart("worker_consume.py", store, database, str(wanted))
    for worker in apps.values():
        worker.wait()
    consumer.wait()

    rows = sqlite3.connect(database).execute("select record from records order by rowid").fetchall()
    records = [record for (record,) in rows]
    for app, end in ends.items():
        expected = [f"{app} {n} {k}" for n in range(end) for k in range(RECORDS_EACH)]
        assert [record for record in records if record.startswith(app)] == expected
    assert len(records) == wanted
