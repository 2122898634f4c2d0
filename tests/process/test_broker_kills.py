"""Brokers, producers and workers as real processes: kill -9, a zombie, a port that says nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from opendata_buffer.broker.client import ChannelClosed, DiscoveryRecord, Lease
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.broker.protocol import ProtocolError
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.open import open_store
from tests.unit.broker.local import eventually

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "broker_member.py"
NIGHT = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16")) >= 100
PRODUCERS = 16 if NIGHT else 6
ROUND_S = 2.0
ROUNDS = 30 if NIGHT else 7
PAUSE_S = 3.0
"""Promised: commits pause no longer when a broker dies."""
MARGIN_S = 0.0 if NIGHT else 27.0
"""For a machine that runs other tests at the same time, and may be slow. The promise is kept at
night; by day a pause is one that nothing but a time limit of the producers ended."""


class Member:
    """A process, and what it printed."""

    def __init__(self, role: str, store: str, name: str) -> None:
        self.role, self.name = role, name
        self.at = int(name.partition("@")[2])
        self.lines: list[list[str]] = []
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), role, store, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # kill -9 may cut the last line short.
            if line.endswith("\n"):
                self.lines.append(line.split())

    def await_line(self) -> None:
        eventually(lambda: self.lines or self._process.poll() is not None)
        assert self.lines, f"{self.name} ended"

    def printed(self, word: str) -> list[str]:
        return [line[-1] for line in self.lines if line[0] == word]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def suspend(self) -> None:
        """Stop it, but not in the instant in which it holds the lock of a file in a directory.

        That would stop all the others as long; on object storage there is no lock.
        """
        self.signal(signal.SIGSTOP)
        while self._holds_a_lock():
            self.signal(signal.SIGCONT)
            time.sleep(0.005)
            self.signal(signal.SIGSTOP)

    def _holds_a_lock(self) -> bool:
        process = Path("/proc") / str(self._process.pid)
        if not process.exists():
            return False  # not Linux
        while process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)  # It is still on its way out of the kernel.
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return any(each[1] == "FLOCK" and each[4] == process.name for each in locks)

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def stop(self) -> None:
        """Let it end by itself: its input ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._end()

    def _end(self) -> None:
        self._process.wait(120)
        self._reader.join(60)
        assert not self._reader.is_alive()


class Deployment:
    """All processes of one test; those that live, and those that ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = open_store(url)
        self.config = ProducerConfig(store=url)
        # Brokers give up on a slow store after five seconds and try again; a test waits for it.
        self.lease = Lease(self.store, self.config, SystemRuntime(), deadline_ms=60_000)
        self.living: list[Member] = []
        self.all: list[Member] = []

    def start(self, role: str, at: int = 0) -> Member:
        member = Member(role, self.url, f"{role}{len(self.all)}@{at}")
        self.living.append(member)
        self.all.append(member)
        return member

    def replace(self, member: Member) -> Member:
        self.living.remove(member)
        member.kill()
        committed = [int(batch) for batch in member.printed("committed")]
        return self.start(member.role, max(committed, default=member.at - 1) + 1)

    def of(self, role: str) -> list[Member]:
        return [each for each in self.living if each.role == role]

    def serving(self) -> Member | None:
        announced = self.lease.read()
        for each in self.of("host"):
            if announced is not None and each.printed("id") == [announced.id]:
                return each
        return None

    def await_serving(self) -> Member:
        return eventually(self.serving, 120)

    def pauses(self) -> tuple[str, int]:
        """Which broker serves, and how often it has paused for another writer."""
        announced = self.lease.read()
        if announced is None or not announced.serves:
            return "", 0
        try:
            connection = WebSocketNetwork(SystemRuntime()).connect(announced)
        except (ChannelClosed, ProtocolError):
            return announced.id, 0
        stats = connection.stats(10)
        connection.close()
        return announced.id, 0 if stats is None else int(stats["pauses"])

    def await_pauses(self) -> None:
        """Until whoever serves has paused for the sink three times more."""
        end, first = time.monotonic() + 120, dict[str, int]()
        while True:
            name, count = self.pauses()
            if count >= first.setdefault(name, count) + 3:
                return
            assert time.monotonic() < end, "no broker pauses for the sink"
            time.sleep(0.1)

    def printed(self, word: str) -> list[str]:
        """By all members together, also those that ended."""
        return [found for each in self.all for found in each.printed(word)]

    def times(self) -> list[float]:
        """When records became durable, by the machine's monotonic clock."""
        lines = [line for each in self.all for line in each.lines if line[0] == "durable"]
        return sorted(float(line[1]) for line in lines)

    def queued(self) -> list[str]:
        queue = Queue(self.store, self.config, runtime=SystemRuntime(), role="test")
        records = []
        for entry in (queue.read() or Manifest.empty()).entries():
            blob = read_bytes(self.store, entry.location)
            records += [record.decode() for record in decode_batch(blob)]
        return records

    def end(self) -> None:
        for each in self.living:
            each.signal(signal.SIGCONT)
            each.kill()


@pytest.fixture(
    params=["directory", pytest.param("s3", marks=pytest.mark.skipif(not NIGHT, reason="at night"))]
)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an empty store: a directory, or a bucket of a real S3 server."""
    if request.param == "directory":
        return str(tmp_path / "store")
    real_server = request.getfixturevalue("real_server")
    monkeypatch.setenv("AWS_ENDPOINT_URL", real_server("versitygw"))
    return f"s3://bucket/{tmp_path.name}"


def mute() -> socket.socket:
    """A port that accepts and never says a word."""
    return socket.create_server(("127.0.0.1", 0))


def test_whatever_happens_to_brokers_each_record_is_queued_once(url: str) -> None:
    deployment = Deployment(url)
    dice = random.Random(9)
    kills = 0
    port = mute()
    try:
        for _ in range(2):
            deployment.start("host")
        for _ in range(PRODUCERS):
            deployment.start("produce")
        for each in deployment.living:
            each.await_line()
        began = time.monotonic()
        stopped: Member | None = None
        for number in range(ROUNDS):
            deed = number % 7
            if deed == 3:
                # Longer than its time-outs: another broker takes over, and then it wakes up.
                stopped = deployment.await_serving()
                stopped.suspend()
            elif deed == 4:
                deployment.store.delete_many(["ingest/_broker.json"])
            elif deed == 6:
                address = f"127.0.0.1:{port.getsockname()[1]}"
                silent = DiscoveryRecord(0, "silent", address, b"s" * 32)
                deployment.lease.take(silent, deployment.lease.read())
            else:
                victim = deployment.await_serving()
                kills += 1
                deployment.replace(victim)
            if deed in (1, 5):
                deployment.replace(dice.choice(deployment.of("produce")))
            time.sleep(ROUND_S)
            if stopped is not None and deed == 6:
                stopped.signal(signal.SIGCONT)
                stopped = None
        ended = time.monotonic()
        for each in deployment.of("produce"):
            deployment.living.remove(each)
            each.stop()
        queued = Counter(deployment.queued())
    finally:
        deployment.end()
        port.close()

    durable = deployment.printed("durable")
    assert len(durable) > PRODUCERS * ROUNDS
    assert [record for record, count in queued.items() if count > 1] == []
    assert [record for record in durable if record not in queued] == []
    assert [record for record in deployment.printed("failed") if record in queued] == []
    # No consumer took anything, so every append without an answer can be found.
    assert deployment.printed("unknown") == []
    assert kills >= 3

    times = [at for at in deployment.times() if began <= at <= ended]
    longest, at = max((after - before, before) for before, after in pairwise(times))
    print(
        f"{len(durable)} records in {ended - began:.0f} s with {kills} kills, longest pause "
        f"{longest:.2f} s at {at - began:.1f} s"
    )
    assert longest < PAUSE_S + MARGIN_S


def test_a_sink_beside_brokers_that_are_killed_and_stopped_commits_each_batch_once(
    url: str,
) -> None:
    deployment = Deployment(url)
    try:
        for role in ("host", "host", "produce", "produce", "produce", "sink"):
            deployment.start(role)
        for each in deployment.living:
            each.await_line()
        for deed in ("kill host", "stop sink", "kill sink", "stop host") * (4 if NIGHT else 1):
            # Not before this sink and this broker know each other.
            deployment.await_serving()
            deployment.await_pauses()
            how, role = deed.split()
            (sink,) = deployment.of("sink")
            victim = sink if role == "sink" else deployment.await_serving()
            if how == "kill":
                deployment.replace(victim)
            else:
                victim.suspend()
                time.sleep(PAUSE_S)
                victim.signal(signal.SIGCONT)
        deployment.await_pauses()
        for word in ("committed", "durable"):
            eventually(lambda word=word: len(deployment.printed(word)) > 20, 180)  # type: ignore[misc]
        for each in [*deployment.of("sink"), *deployment.of("produce")]:
            deployment.living.remove(each)
            each.stop()
        queued = deployment.queued()
    finally:
        deployment.end()

    counted = Counter(queued)
    assert [record for record, count in counted.items() if count > 1] == []
    durable = deployment.printed("durable")
    assert len(durable) > 20
    assert [record for record in durable if record not in counted] == []
    batches = [int(record.partition(":")[2]) for record in queued if record.startswith("job:")]
    committed = {int(batch) for batch in deployment.printed("committed")}
    assert batches == list(range(len(batches)))
    assert committed <= set(batches)
    assert len(committed) > 10
    longest = max(after - before for before, after in pairwise(deployment.times()))
    print(f"{len(batches)} batches beside {len(durable)} records, longest pause {longest:.2f} s")


def test_workers_that_are_killed_leave_nothing_undone(url: str) -> None:
    deployment = Deployment(url)
    dice = random.Random(3)
    killed: list[Member] = []
    try:
        producer = deployment.start("produce")
        for _ in range(3):
            deployment.start("work")
        for each in deployment.living:
            each.await_line()
        for _ in range(20 if NIGHT else 4):
            time.sleep(1.5)
            # They are hosts: in one of three cases this is the broker, too.
            victim = dice.choice(deployment.of("work"))
            killed.append(victim)
            deployment.replace(victim)
        deployment.living.remove(producer)
        producer.stop()
        eventually(lambda: not deployment.queued(), 180)
    finally:
        deployment.end()
    produced = producer.printed("durable")
    got, done = Counter(deployment.printed("got")), Counter(deployment.printed("done"))
    assert len(produced) > 20
    assert set(produced) <= set(got)
    assert [record for record, count in done.items() if count > 1] == []
    # Handed out again: what a killed one held.
    again = {record for record, count in got.items() if count > 1}
    assert again <= {record for each in killed for record in each.printed("got")}
