"""Named readers of a log as real processes: kill -9 and SIGSTOP of readers and producers."""

from __future__ import annotations

import fcntl
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from opendata_buffer import ConsumerConfig, QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.ownership import read_manifest
from opendata_buffer.queue.readers import reset_reader
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local import RESERVED
from tests.process.test_kill9 import KILLS, MOST_BETWEEN, RECORDS_EACH, Worker
from tests.support.logs import make_log, open_view

pytestmark = pytest.mark.slow

READERS = ("billing", "audit")


@contextmanager
def nobody_writes(store: str) -> Iterator[None]:
    """No process holds a lock of this directory meanwhile: one that is stopped with a lock keeps
    it, and all others out. A server has no locks."""
    with ExitStack() as held:
        if "://" in store:
            yield
            return
        locks = [path for path in Path(store).glob(f"**/{RESERVED}/*") if path.is_file()]
        assert locks
        for path in locks:
            fcntl.flock(held.enter_context(path.open()), fcntl.LOCK_EX)
        yield


def test_two_readers_get_everything_though_all_processes_are_killed_and_stopped(
    tmp_path: Path,
) -> None:
    kill_and_stop(str(tmp_path / "store"), tmp_path, KILLS)


def test_two_readers_get_everything_on_a_real_s3_server(
    tmp_path: Path, real_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", real_server("versitygw"))
    kill_and_stop(f"s3://bucket/{tmp_path.name}", tmp_path, 6)


def kill_and_stop(store: str, tmp_path: Path, kills: int) -> None:
    """Each reader trusts its own position: at least once, and without a gap."""
    runtime, config = SystemRuntime(), QueueConfig(store=store, gc_grace_period_ms=10_000)
    opened = make_log(config)
    view = open_view(opened, config, runtime, Manifest.empty())
    for name in READERS:
        reader = ConsumerConfig(store=store, reader=name)
        reset_reader(opened, reader, name, 0, view, runtime)

    rng = random.Random(7)
    files = {name: tmp_path / name for name in READERS}
    apps = {app: Worker("worker_produce.py", store, app, "0", "1000000") for app in ("a", "b")}
    readers = {
        name: Worker("worker_reader.py", store, name, str(files[name]), "1000000")
        for name in READERS
    }
    ends: dict[str, int] = {}

    def kill_producer(app: str, more: int | None = None) -> None:
        worker = apps[app]
        worker.kill()
        first = worker.printed[-1] + 1 if worker.printed else 0
        ends[app] = 1_000_000 if more is None else first + more
        worker.restart("worker_produce.py", store, app, str(first), str(ends[app]))

    stopped = 0
    for number in range(kills):
        app, name = rng.choice([*apps]), rng.choice(READERS)
        apps[app].await_printed(rng.randint(0, MOST_BETWEEN))
        kill_producer(app)
        readers[name].await_printed(rng.randint(0, 2))
        if number == 2 or rng.random() < 0.3:
            # A second process of this name fences the one that stands still: that has begun, for
            # what is stopped before its claim becomes the owner when it goes on.
            readers[name].await_printed(1)
            zombie = readers[name]._process
            pid = zombie.pid
            with nobody_writes(store):
                os.kill(pid, signal.SIGSTOP)
            readers[name] = Worker("worker_reader.py", store, name, str(files[name]), "1000000")
            readers[name].await_printed(1)
            os.kill(pid, signal.SIGCONT)
            assert zombie.wait(180) != 0, "the fenced reader went on"
            stopped += 1
        else:
            readers[name].kill()
            readers[name].restart("worker_reader.py", store, name, str(files[name]), "1000000")
    for app in apps:
        kill_producer(app, MOST_BETWEEN)
    wanted = sum(ends.values()) * RECORDS_EACH
    for name in READERS:
        readers[name].kill()
        readers[name].restart("worker_reader.py", store, name, str(files[name]), str(wanted))
    for worker in (*apps.values(), *readers.values()):
        worker.wait()

    expected = {f"{app} {n} {k}" for app, end in ends.items() for n in range(end) for k in range(5)}
    for name in READERS:
        assert {*files[name].read_text().split("\n")} - {""} == expected, name
    index = Log(opened, config, runtime).read()
    manifest = read_manifest(opened, config, runtime)
    assert index is not None
    assert index.end > 0, "nothing was moved into a segment"
    assert manifest is not None
    assert manifest.entry_count < 2_000
    assert stopped, "no process was stopped"
