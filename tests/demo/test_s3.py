"""The server of ``./run demo --s3``: a real one if it is installed, which keeps its data."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from notebooks.demo import s3
from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from tools import servers
from tools.servers import VERSITYGW

LIMIT_S = 300

needs_versitygw = pytest.mark.skipif(not VERSITYGW.is_there, reason=VERSITYGW.why_not)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the demo's changes of its environment after the test."""
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
        monkeypatch.setenv(f"AWS_{name}", "")
    monkeypatch.setenv("NO_PROXY", "")


def produce(store: str, record: bytes) -> None:
    with Producer(ProducerConfig(store=store)) as producer:
        producer.produce([record]).result(LIMIT_S)


@needs_versitygw
def test_a_real_server_still_has_the_queue_when_the_demo_is_resumed(tmp_path: Path) -> None:
    for record in (b"first", b"second"):
        with s3.local_s3(tmp_path / "objects", tmp_path / "lock") as server:
            assert (server.name, server.keeps) == (f"versitygw {VERSITYGW.version}", True)
            produce(f"{server.store}/queue", record)
            found = []
            with Consumer(ConsumerConfig(store=f"{server.store}/queue")) as consumer:
                while batch := consumer.next_batch():
                    found += batch.entries
    assert found == [b"first", b"second"]


def test_without_a_real_server_a_simulator_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CACHE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the server's process looks there
    with s3.local_s3(tmp_path / "objects", tmp_path / "lock") as server:
        assert (server.name, server.keeps) == ("moto, a simulator", False)
        produce(f"{server.store}/queue", b"record")
    assert not (tmp_path / "objects").exists()


@needs_versitygw
def test_the_server_of_a_killed_demo_runs_until_its_producers_have_ended(tmp_path: Path) -> None:
    import urllib3

    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # like a producer that the demo has started
        command = [sys.executable, "-m", "notebooks.demo.s3", tmp_path / "o", tmp_path / "lock"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            process.stdin.close()
            assert urllib3.request("GET", endpoint, retries=False).status == 403
            assert process.poll() is None
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
            process.wait()
    with pytest.raises(urllib3.exceptions.HTTPError):
        urllib3.request("GET", endpoint, retries=False)
