"""Where the demo keeps things, and how far an earlier run came."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset

from notebooks.demo.flights import AIRPORTS
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.factory import open_store


@dataclass(frozen=True)
class Places:
    """The output directory and the buffer."""

    root: Path
    store: str

    @property
    def flights(self) -> Path:
        """Parquet: every record, a directory for each micro-batch."""
        return self.root / "flights"

    @property
    def delays(self) -> Path:
        """Parquet: count and sum of delays per carrier and hour, for each micro-batch."""
        return self.root / "delays"

    @property
    def checkpoint(self) -> Path:
        """Spark's."""
        return self.root / "checkpoint"

    @property
    def plot(self) -> Path:
        """The picture."""
        return self.root / "demo.png"

    def log(self, name: str) -> Path:
        """A log file."""
        return self.root / f"{name}.log"

    def start_over(self) -> None:
        """Delete what the demo made, and nothing else."""
        for path in (self.root / "buffer", self.flights, self.delays, self.checkpoint):
            shutil.rmtree(path, ignore_errors=True)

    def lock(self, wait_s: float = 15.0) -> int:
        """Make sure that nobody else works here; returns the lock's file descriptor.

        Producers inherit it, so one that outlived a killed demo keeps the next one waiting
        until it has ended: what is durable must not change any more once it is counted.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(int(wait_s * 10)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return lock
        raise SystemExit(f"error: another demo is running in {self.root}")

    def queued(self) -> tuple[int, dict[str, int]]:
        """Length of the queue, and the next chunk of each airport by what is queued."""
        config = QueueConfig(store=self.store)
        queue = Queue(open_store(self.store), config, runtime=SystemRuntime(), role="demo")
        manifest = queue.read()
        found = dict.fromkeys(AIRPORTS, 0)
        if manifest is None:
            return 0, found
        for entry in manifest.entries():
            location = parse_location(entry.location, config.data_path_prefix)
            if location is not None and location.txn is not None:
                txn = location.txn
                found[txn.app] = max(found[txn.app], txn.batch + 1)
        return manifest.entry_count, found

    def written(self, columns: list[str]) -> pa.Table:
        """Columns of all records that are in Parquet."""
        # What a task has not committed lies deeper, below _temporary.
        files = [str(each) for each in self.flights.glob("batch=*/*.parquet")]
        if not files:
            empty = pa.schema([("airport", pa.string()), ("chunk", pa.int32())])
            return empty.empty_table().select(columns)
        return pa.dataset.dataset(files, format="parquet").to_table(columns)

    def resume(self) -> tuple[dict[str, int], int]:
        """The first chunk of each airport that was never queued, and the rows in Parquet.

        A chunk leaves the queue only after its rows are in Parquet, so what was ever durable is
        in one of the two, and producers that nobody can ask any more need no log of their own.
        """
        _, chunks = self.queued()
        table = self.written(["airport", "chunk"])
        last = table.group_by("airport").aggregate([("chunk", "max")])
        for airport, chunk in zip(last["airport"], last["chunk_max"], strict=True):
            chunks[airport.as_py()] = max(chunks[airport.as_py()], chunk.as_py() + 1)
        return chunks, len(table)
