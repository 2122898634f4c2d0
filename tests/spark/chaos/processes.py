"""Driver processes that are killed, and the state of their queries as seen from outside."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.spark.jvm import SMALL_JVM
from tests.support.killed import PATIENCE_S, Writer, nobody_writes
from tests.support.worker_produce import values

HERE = Path(__file__).parent
GRACE_MS = 20_000
"""Grace period of producers and collectors; on a slow machine an append may be seconds late."""

SOON_S = 60.0
"""Seconds to wait for the moment of a kill before killing anyway."""


def writer(*stores: str) -> Writer:
    """Return a writer that pauses while the queues are long."""
    backlog = 40 * len(stores)
    return Writer("writer", *stores, grace_ms=GRACE_MS, pause_s=0.05, backlog=backlog)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen in {PATIENCE_S} s"
        time.sleep(0.002)


@dataclass(frozen=True)
class Stream:
    """A streaming query, including its restarts."""

    store: str  # The queue it reads, or the directory of text files.
    kind: str  # Its sink (parquet, sqlite, buffer, topic), or lines: text files into a buffer.
    out: str  # Directory, database or store it writes.
    checkpoint: str
    options: dict[str, str] = field(default_factory=dict, hash=False)  # Options of the source.
    pause: float = 0.0  # Seconds that a Python function spends on each row.

    @classmethod
    def make(
        cls,
        home: Path,
        name: str,
        kind: str,
        store: Path,
        out: Path | None = None,
        pause: float = 0,
    ) -> Stream:
        """Create a query in ``home``, with limits and a collector that runs often."""
        store.mkdir(parents=True, exist_ok=True)
        options = {
            "createIfMissing": "true",
            "maxBatchesPerTrigger": "8",
            "minPartitions": "2",
            "gcGracePeriodMs": str(GRACE_MS),
        }
        target, checkpoint = out or home / f"{name}.out", home / f"{name}.checkpoint"
        made = cls(str(store), kind, str(target), str(checkpoint), options, pause)
        if kind == "sqlite":
            with closing(sqlite3.connect(made.out)) as database:
                database.execute("pragma journal_mode = wal")
                database.execute("create table rows (value text, sequence int, idx int)")
                database.execute("create table batches (id int primary key)")
        return made

    def planned(self) -> int:
        """The last micro-batch in the offset log, or -1."""
        return _last(Path(self.checkpoint) / "offsets")

    def committed(self) -> int:
        """The last micro-batch in the commit log, or -1."""
        return _last(Path(self.checkpoint) / "commits")

    def sunk(self) -> int:
        """The last micro-batch that the sink has committed, or -1."""
        if self.kind == "parquet":
            return _last(Path(self.out) / "_spark_metadata")
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.out, timeout=120)) as database:
                (last,) = database.execute("select max(id) from batches").fetchone()
                return -1 if last is None else int(last)
        root = "_topic" if self.kind == "topic" else "ingest"
        records = Path(self.out).glob(f"{root}/app=*/_commit.json")
        return max((int(json.loads(record.read_text())["batch"]) for record in records), default=-1)

    def written(self) -> int:
        """A number that grows while the sink writes a micro-batch."""
        if self.kind == "parquet":
            return sum(1 for _ in Path(self.out).glob("part-*"))
        if self.kind == "sqlite":
            return self.sunk()
        batches = "p-*/app=*/batch=*/*/*" if self.kind == "topic" else "ingest/app=*/batch=*/*"
        return sum(1 for _ in Path(self.out).glob(f"{batches}.batch"))

    def rows(self) -> list[tuple[str, int, int]]:
        """Return the rows of a SQLite sink: value, sequence, index."""
        with closing(sqlite3.connect(self.out)) as database:
            return database.execute("select value, sequence, idx from rows").fetchall()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the locks of the queue's store and of the database.

        A driver that is suspended while it holds one of them would block its successor.
        """
        with nobody_writes(self.store):
            if self.kind != "sqlite":
                yield
                return
            with closing(sqlite3.connect(self.out, timeout=120, isolation_level=None)) as database:
                database.execute("begin immediate")
                yield
                database.execute("rollback")


def _last(directory: Path) -> int:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return -1
    numbers = (name.removesuffix(".compact") for name in names)
    return max((int(number) for number in numbers if number.isdigit()), default=-1)


@dataclass(frozen=True)
class Job:
    """The work of a driver process; see worker_drive.py."""

    queries: list[Stream]
    java: str = SMALL_JVM  # Options of its JVM.
    master: str = "local[2]"
    restarts: int = 0  # How often a query that fails while it drains is restarted.


class Driver:
    """One driver process."""

    def __init__(self, job: Job, log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "worker_drive.py"), json.dumps(asdict(job))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "SPARK_LAUNCHER_OPTS": SMALL_JVM},
                # Driver, JVM, and the planning process die together.
                start_new_session=True,
            )

    def go(self, word: str) -> None:
        """Let it ``run`` or ``drain`` once its session has started."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            self.kill()
            raise AssertionError(f"the driver did not start: {self.errors()}")
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill the whole process group. Python workers have their own group and notice the end."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()

    def stop(self) -> None:
        """Freeze it, like a host that is suspended."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen driver continue."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def finish(self) -> list[str]:
        """Wait until it has drained its queues. Return the rows of its Parquet sink, in order."""
        try:
            out, _ = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver hangs: {self.errors()}") from None
        assert self.process.returncode == 0, self.errors()
        # A JVM that archives its classes also prints lines such as "[0.1s][warning] ...".
        found = (line for line in out.splitlines() if line.startswith(('["', "[]")))
        lists = [json.loads(line) for line in found]
        return [value for found_values in lists for value in found_values]

    def errors(self) -> str:
        """Return its log without the stack traces of the JVM."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("\tat "))


class Drivers:
    """The drivers of a job, one after the other. The next one's session is created in advance."""

    driver: Driver

    def __init__(self, job: Job, home: Path, name: str = "driver", *, ahead: bool = True) -> None:
        self.job = job
        self._home = home
        self._name = name
        self._all: list[Driver] = []
        self._ahead = ahead
        self._next = self._start() if ahead else None

    def _start(self) -> Driver:
        made = Driver(self.job, self._home / f"{self._name}-{len(self._all)}.log")
        self._all.append(made)
        return made

    def go(self, word: str = "run") -> Driver:
        """Start the next driver."""
        self.driver = self._next or self._start()
        self._next = self._start() if self._ahead and word == "run" else None
        self.driver.go(word)
        return self.driver

    def close(self) -> None:
        """Kill all driver processes."""
        for driver in self._all:
            driver.kill()


def await_first_commits(driver: Driver, streams: list[Stream]) -> None:
    """Wait, because Spark cannot restart with a half-written first offset file."""

    def done() -> bool:
        return driver.ended() or all(stream.committed() >= 0 for stream in streams)

    wait_for(done, "the first micro-batch of each query")


@dataclass(frozen=True)
class Moment:
    """A moment to kill: up to ``late`` seconds after a number of the query has grown."""

    name: str
    sees: Callable[[Stream], int] | None
    late: float

    def await_in(self, driver: Driver, stream: Stream, rng: random.Random) -> None:
        if self.sees is not None:
            sees = self.sees
            goal = sees(stream) + rng.randint(1, 3)
            # If the machine is too busy to reach the moment, kill anyway.
            until = time.monotonic() + SOON_S
            while not driver.ended() and sees(stream) < goal and time.monotonic() < until:
                time.sleep(0.002)
        time.sleep(rng.random() * self.late)
        assert not driver.ended(), f"the driver ended before the kill: {driver.errors()}"


MOMENTS = (
    Moment("start", None, 3.0),
    Moment("plan", Stream.planned, 0.03),
    Moment("read", Stream.planned, 0.4),
    Moment("write", Stream.written, 0.0),
    Moment("sink commit", Stream.sunk, 0.0),
    Moment("commit log", Stream.committed, 0.02),
    Moment("acknowledgement", Stream.committed, 0.15),
    Moment("anywhere", None, 6.0),
)


def check_sinks(sqlite: Stream, parquet: list[str], end: int) -> None:
    """Check that both sinks have all transactions of the writer once and in order."""
    expected = values("writer", end)
    rows = sorted(sqlite.rows(), key=lambda row: row[1:])
    assert [value for value, *_ in rows] == expected
    assert parquet == expected
