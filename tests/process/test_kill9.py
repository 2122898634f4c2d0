"""kill -9 of real processes, on a local directory and on a real S3 server."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.killed import FOREVER, KILLS, Worker, Writer
from tests.support.worker_produce import RECORDS_EACH, values

MOST_BETWEEN = 20
"""Transactions to wait for before the next kill, at most."""


@pytest.mark.parametrize("seed", [1, 2])
def test_kill9_of_producers_and_consumer_loses_and_repeats_nothing(
    tmp_path: Path, seed: int
) -> None:
    check_kills_lose_and_repeat_nothing(str(tmp_path / "store"), tmp_path, seed, max(4, KILLS // 2))


def test_kill9_loses_and_repeats_nothing_on_a_real_s3_server(
    tmp_path: Path, real_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", real_server("versitygw"))
    kills = 4 if KILLS < 100 else 18
    check_kills_lose_and_repeat_nothing(f"s3://bucket/{tmp_path.name}", tmp_path, 3, kills)


def check_kills_lose_and_repeat_nothing(store: str, home: Path, seed: int, kills: int) -> None:
    """Kill two producers and a consumer at any time, and check that each record arrives once.

    No process ends before the last kill, even if this process gets no processor for a long time.
    """
    rng = random.Random(seed)
    database = str(home / "sink.db")
    with ExitStack() as stack:
        apps = {app: stack.enter_context(closing(Writer(app, store))) for app in ("a", "b")}
        module = "tests.process.worker_consume"
        consumer = stack.enter_context(closing(Worker(module, store, database, FOREVER)))
        for _ in range(kills):
            app = rng.choice(list(apps))
            apps[app].await_printed(rng.randint(0, MOST_BETWEEN))
            apps[app].kill_again()
            if rng.random() < 0.5:
                consumer.await_printed(rng.randint(0, 2))
                consumer.kill(store, database, FOREVER)
        ends = {app: writer.kill_last(MOST_BETWEEN) for app, writer in apps.items()}
        wanted = sum(ends.values()) * RECORDS_EACH
        consumer.kill(store, database, wanted)
        for worker in (*apps.values(), consumer):
            worker.wait()

    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select record from records order by rowid").fetchall()
    records = [record for (record,) in rows]
    for app, end in ends.items():
        assert [record for record in records if record.startswith(app)] == values(app, end)
    assert len(records) == wanted
