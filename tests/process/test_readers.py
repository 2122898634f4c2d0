"""Named readers of a log as real processes: kill -9 and SIGSTOP of readers and producers."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from opendata_buffer import ConsumerConfig, QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.ownership import read_manifest
from opendata_buffer.queue.readers import reset_reader
from opendata_buffer.runtime import SystemRuntime
from tests.process.test_kill9 import MOST_BETWEEN
from tests.support.killed import FOREVER, KILLS, Worker, Writer, nobody_writes
from tests.support.logs import make_log, open_view
from tests.support.worker_produce import RECORDS_EACH, values

pytestmark = pytest.mark.slow

READERS = ("billing", "audit")


def test_two_readers_get_everything_though_all_processes_are_killed_and_stopped(
    tmp_path: Path,
) -> None:
    kill_and_stop(str(tmp_path / "store"), tmp_path, max(4, KILLS // 2))


def test_two_readers_get_everything_on_a_real_s3_server(
    tmp_path: Path, real_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", real_server("versitygw"))
    kill_and_stop(f"s3://bucket/{tmp_path.name}", tmp_path, 6)


def kill_and_stop(store: str, tmp_path: Path, kills: int) -> None:
    """Each reader trusts its own position: at least once, and without a gap."""
    runtime, config = SystemRuntime(), QueueConfig(store=store)
    opened = make_log(config, grace_ms=10_000)
    view = open_view(opened, config, runtime, Manifest.empty())
    for name in READERS:
        reader = ConsumerConfig(store=store, reader=name)
        reset_reader(opened, reader, name, 0, view, runtime)

    rng = random.Random(7)
    with ExitStack() as stack:
        apps = [stack.enter_context(closing(Writer(app, store))) for app in ("a", "b")]

        def start(name: str) -> Worker:
            made = Worker("tests.process.worker_reader", store, name, tmp_path / name, FOREVER)
            return stack.enter_context(closing(made))

        readers = {name: start(name) for name in READERS}
        stopped = 0
        for number in range(kills):
            app, name = rng.choice(apps), rng.choice(READERS)
            app.await_printed(rng.randint(0, MOST_BETWEEN))
            app.kill_again()
            readers[name].await_printed(rng.randint(0, 2))
            if number == 2 or rng.random() < 0.3:
                # A second process of this name fences the one that stands still: that has begun,
                # for what is stopped before its claim becomes the owner when it goes on.
                readers[name].await_printed(1)
                zombie = readers[name].process
                with nobody_writes(store):
                    os.kill(zombie.pid, signal.SIGSTOP)
                readers[name] = start(name)
                readers[name].await_printed(1)
                os.kill(zombie.pid, signal.SIGCONT)
                assert zombie.wait(180) != 0, "the fenced reader went on"
                stopped += 1
            else:
                readers[name].kill(store, name, tmp_path / name, FOREVER)
        ends = {app: writer.kill_last(MOST_BETWEEN) for app, writer in zip("ab", apps, strict=True)}
        wanted = sum(ends.values()) * RECORDS_EACH
        for name in READERS:
            readers[name].kill(store, name, tmp_path / name, wanted)
        for worker in (*apps, *readers.values()):
            worker.wait()

    expected = {value for app, end in ends.items() for value in values(app, end)}
    for name in READERS:
        assert {*(tmp_path / name).read_text().split("\n")} - {""} == expected, name
    index = Log(opened, config, runtime).read()
    manifest = read_manifest(opened, config, runtime)
    assert index is not None
    assert index.end > 0, "nothing was moved into a segment"
    assert manifest is not None
    assert manifest.entry_count < 2_000
    assert stopped, "no process was stopped"
