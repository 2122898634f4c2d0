"""The places where the demo keeps its files, and the progress of an earlier run."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from notebooks.demo.flights import AIRPORTS
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import is_topic
from opendata_buffer.topic.partitioner import modulo
from opendata_buffer.topic.topic import Topic, partition_config

PARTITIONS = 4


@dataclass(frozen=True)
class Places:
    """The output directory and the buffer."""

    root: Path
    store: str
    topic: bool = False
    """Whether the buffer is a topic, with records that have the carrier as key."""

    @property
    def flights(self) -> Path:
        """Parquet: every record, with a directory for each micro-batch."""
        return self.root / "flights"

    @property
    def delays(self) -> Path:
        """Parquet: count and sum of delays per carrier and hour, for each micro-batch."""
        return self.root / "delays"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint."""
        return self.root / "checkpoint"

    @property
    def objects(self) -> Path:
        """The objects of a local S3 server."""
        return self.root / "objects"

    @property
    def plot(self) -> Path:
        """The picture."""
        return self.root / "demo.png"

    @property
    def page(self) -> Path:
        """The report. It is made last, so its existence means that a run is complete."""
        return self.root / "report.html"

    @property
    def lock_file(self) -> Path:
        """A file that a running demo and its producers hold a lock on."""
        return self.root / ".lock"

    def log(self, name: str) -> Path:
        """Return the path of a log file."""
        return self.root / f"{name}.log"

    def start_over(self) -> None:
        """Delete the files that the demo made, and nothing else."""
        buffers = (self.root / "buffer", self.objects)
        for path in (*buffers, self.flights, self.delays, self.checkpoint):
            shutil.rmtree(path, ignore_errors=True)
        self.page.unlink(missing_ok=True)

    def lock(self, wait_s: float = 15.0) -> int:
        """Lock the output directory, so that no other demo uses it.

        Producers inherit the lock. So a producer that outlived a killed demo keeps the next demo
        waiting until it has ended: the durable records must not change after they are counted.

        Args:
            wait_s: Seconds to wait for another demo.

        Returns:
            The lock's file descriptor.

        Raises:
            SystemExit: Another demo is still running.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(int(wait_s * 10)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return lock
        raise SystemExit(f"error: another demo is running in {self.root}")

    def make(self) -> None:
        """Create the topic if the buffer should be one and does not exist yet."""
        if self.topic and not is_topic(open_store(self.store)):
            Topic.create(self.store, PARTITIONS)

    def queues(self) -> list[QueueConfig]:
        """Return the queue, or the topic's partitions."""
        config = QueueConfig(store=self.store)
        if not self.topic:
            return [config]
        topic = Topic.open(config)
        return [partition_config(name, config) for name in topic.description.names]

    def queued(self) -> tuple[int, list[dict[str, int]]]:
        """Return how many batches wait, and which chunk each airport has to queue next.

        Returns:
            The number of batches; and for each queue the next chunk of each airport, according to
            the batches that wait.
        """
        length, chunks = 0, []
        for config in self.queues():
            queue = Queue(open_store(self.store), config, runtime=SystemRuntime(), role="demo")
            manifest = queue.read()
            found = dict.fromkeys(AIRPORTS, 0)
            chunks.append(found)
            if manifest is None:
                continue
            length += manifest.entry_count
            for entry in manifest.entries():
                location = parse_location(entry.location, config.data_path_prefix)
                if location is not None and location.txn is not None:
                    txn = location.txn
                    found[txn.app] = max(found[txn.app], txn.batch + 1)
        return length, chunks

    def written(self, columns: list[str]) -> pa.Table:
        """Return columns of all records that are in Parquet."""
        # Uncommitted files of a task are deeper, below _temporary.
        files = [str(each) for each in self.flights.glob("batch=*/*.parquet")]
        if not files:
            texts = [("airport", pa.string()), ("carrier", pa.string())]
            return pa.schema([*texts, ("chunk", pa.int32())]).empty_table().select(columns)
        return pa.dataset.dataset(files, format="parquet").to_table(columns)

    def rows_of(self, batch: int) -> int:
        """Return the number of rows in Parquet of a micro-batch, from the footers of its files."""
        files = (self.flights / f"batch={batch}").glob("*.parquet")
        return sum(pq.read_metadata(each).num_rows for each in files)

    def batches(self) -> dict[int, int]:
        """Return the number of rows of each micro-batch in Parquet."""
        folders = self.flights.glob("batch=*")
        ids = [int(each.name.removeprefix("batch=")) for each in folders]
        return {batch: self.rows_of(batch) for batch in ids}

    def resume(self) -> dict[str, int]:
        """Return the first chunk of each airport that is not completely queued.

        A chunk leaves a queue only after its rows are in Parquet. So every durable chunk is in one
        of the two, and producers that have ended do not need a log of their own.

        In a topic, a chunk has a part for each partition, and a killed producer may have written
        only some of them. The chunk is then produced again, and readers drop the parts that they
        already have.
        """
        _, chunks = self.queued()
        table = self.written(["airport", "carrier", "chunk"])
        last = table.group_by(["airport", "carrier"]).aggregate([("chunk", "max")])
        names = [config.data_path_prefix for config in self.queues()]
        indices = modulo(last["carrier"], names) if self.topic and len(last) else [0] * len(last)
        for airport, chunk, index in zip(last["airport"], last["chunk_max"], indices, strict=True):
            found = chunks[index]
            found[airport.as_py()] = max(found[airport.as_py()], chunk.as_py() + 1)
        return {each: min(found[each] for found in chunks) for each in AIRPORTS}
