"""A Spark task's memory: its budget in flight and a few batches, however much it reads.

Measured on a fresh process by its peak RSS, which has all that Arrow and zstd allocate, and what
the allocators keep of it after it was freed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Compression, batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

MIB = 1 << 20
BATCHES = 24
DECODED = 16 * MIB
RECORD = 1024
BUDGET = 32 * MIB

# Reads everything as a task does, and looks at each record batch as Spark does: one at a time.
PROBE = """
import json, re, sys
from functools import partial
import pyarrow as pa
from opendata_buffer.consumer import fetch as pace
from buffer_source.batch_reader import BufferBatchReader
from buffer_source.options import SourceOptions
from buffer_source.schema import default_schema
from buffer_source import task
from buffer_source.planner import TaskBatches
from buffer_source.task import read_partition
task.IN_FLIGHT_BYTES = int(sys.argv[3])
task.fetch_many = partial(task.fetch_many, concurrency=8)

def peak():
    # Not ru_maxrss, which begins with the peak of the process that started this one.
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) * 1024

def read(store):
    options = SourceOptions.from_spark({"path": store})
    tasks = BufferBatchReader(options, default_schema()).partitions()
    descriptors = tuple(each for task in tasks for each in task.batches)
    rows = size = 0
    for piece in read_partition(options, default_schema(), TaskBatches(descriptors)):
        rows += piece.num_rows
        size += piece.nbytes
        assert piece.nbytes < 5 << 20
        del piece
    return rows, size

if sys.argv[4] == "far":
    class Far(pace.AdaptiveConcurrency):  # whatever it sees: threads read ahead as far as they may
        near = property(lambda self: False, lambda self, value: None)

    pace.AdaptiveConcurrency.of = lambda store: Far()
read(sys.argv[1])
before = peak()
rows, size = read(sys.argv[2])
pool = pa.default_memory_pool().max_memory()
print(json.dumps({"rows": rows, "bytes": size, "grown": peak() - before, "pool": pool}))
"""


def queue_of(path: Path, batches: int, records: int, compression: Compression) -> str:
    """A queue of equal batches: noise that is encoded once weighs as much as new one each time."""
    # Half of it compresses, so that stored batches weigh, too.
    noise = random.Random(records).randbytes(RECORD // 2 * records)
    halves = (noise[at : at + RECORD // 2] for at in range(0, len(noise), RECORD // 2))
    data = encode_batch([half + bytes(RECORD // 2) for half in halves], compression)
    store, runtime = open_store(str(path)), SystemRuntime()
    locations = [batch_key("ingest", runtime.ulid()) for _ in range(batches)]
    for location in locations:
        store.put(location, data)
    queue = Queue(store, QueueConfig(store=str(path)), runtime=runtime, role="producer")
    queue.append([NewEntry(location, (Metadata(0, 0, b""),)) for location in locations])
    return str(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("distance", ["near", "far"])
@pytest.mark.parametrize("compression", list(Compression))
def test_a_task_holds_its_budget_and_two_batches(
    tmp_path: Path, compression: Compression, distance: str
) -> None:
    records = DECODED // RECORD
    small = queue_of(tmp_path / "small", 2, 10, compression)
    large = queue_of(tmp_path / "large", BATCHES, records, compression)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, small, large, str(BUDGET), distance],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rows"] == BATCHES * records
    assert result["bytes"] > BATCHES * DECODED  # 384 MiB went through
    # In flight; of the batch that is decoded the object and, if it was compressed, the block,
    # and pieces of its rows. Arrow reserves the size of the block for a piece and gives it back.
    assert DECODED < result["pool"] < BUDGET + 2 * DECODED + 4 * MIB
    # Of the process, with what allocators keep: most where several threads read on a busy
    # machine. Without a bound it would be all that is read.
    assert DECODED < result["grown"] < BUDGET + 8 * DECODED
