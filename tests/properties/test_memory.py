"""Limits on memory, measured in fresh processes."""

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

CAP_MIB = 32

# Decodes hostile objects and prints the process's peak memory after each, in MiB. The peak RSS
# includes allocations of Arrow and zstd, which tracemalloc does not see. VmHWM is used because
# getrusage starts with the peak of the parent process.
PROBE = f"""
import json, struct
import pyarrow as pa, zstandard
from opendata_buffer.errors import CorruptBatch, CorruptManifest
from opendata_buffer.formats.arrow import decode_arrow, decode_records
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest

CAP = {CAP_MIB} << 20

def peak():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

def footer(kind, count):
    return struct.pack("<BIH", kind, count, 1)

def streamed(mebibytes, **declared):
    # A frame without content size, made without holding its content.
    encoder = zstandard.ZstdCompressor(level=3).compressobj(**declared)
    parts = [encoder.compress(bytes(1 << 20)) for _ in range(mebibytes)]
    return b"".join(parts) + encoder.flush()

def sized(mebibytes):
    return streamed(mebibytes, size=mebibytes << 20)

def rle(blocks):
    block = (128 * 1024) << 3 | 1 << 1
    body = [(block | (n == blocks - 1)).to_bytes(3, "little") + b"\\0" for n in range(blocks)]
    return b"\\x28\\xb5\\x2f\\xfd\\x00\\x38" + b"".join(body)

def manifest(count):
    body = struct.pack("<QH", 0, 1) + b"x" + struct.pack("<I", count)
    return struct.pack("<I", len(body)) + body + struct.pack("<IQQH", 1, 1, 0, 1)

MANY = 1 << 20
hostile = {{
    # First, because they are decoded without Arrow, whose pool keeps its memory.
    "streamed bomb of few records": lambda: streamed(256) + footer(1, 1),
    "many bombs of few records": lambda: rle(64) * 32 + footer(1, 1),
    "streamed bomb": lambda: streamed(256) + footer(1, MANY),
    "sized bomb": lambda: sized(256) + footer(1, MANY),
    "rle bomb": lambda: rle(2048) + footer(1, MANY),
    "just under the cap, damaged": lambda: streamed({CAP_MIB}) + footer(1, MANY),
    "many bombs": lambda: rle(64) * 32 + footer(1, MANY),
    "huge count": lambda: footer(0, 2**32 - 1),
    "huge count, zstd": lambda: sized(1) + footer(1, 2**32 - 1),
    "huge window": lambda: b"\\x28\\xb5\\x2f\\xfd\\x00\\xf8\\x01\\x00\\x00" + footer(1, 2**32 - 1),
    "huge metadata count": lambda: manifest(2**32 - 1),
}}
warm = encode_batch([b"x" * 100] * 2000, 1)
assert decode_arrow(warm).to_pylist() == decode_records(warm)
made = {{name: make() for name, make in hostile.items()}}
peaks = {{"before": peak()}}
for name, data in made.items():
    for decode, refusal in (
        (lambda: decode_arrow(data, CAP), CorruptBatch),
        (lambda: decode_records(data, CAP), CorruptBatch),
        (lambda: Manifest.parse(data), CorruptManifest),
    ):
        try:
            decode()
        except refusal:
            continue
        raise SystemExit(f"accepted: {{name}}")
    peaks[name] = peak()
print(json.dumps(peaks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status")
def test_f17_f18_f21_f22_hostile_bytes_stay_below_twice_the_cap() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    before = peaks.pop("before")
    assert len(peaks) == 11
    # A peak never falls, so the first one above the limit shows the cause.
    assert {name: peak for name, peak in peaks.items() if peak - before >= 2 * CAP_MIB} == {}


# A producer waits a simulated hour at a full manifest of 64 MiB, with 1,440 retries.
FULL = """
import logging, os, sys
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import QueueFull
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.producer import sender
from opendata_buffer import Producer
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

def peak():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

class Watched(MemoryStore):
    def get(self, *arguments, **options):
        if peak() > 1_000:
            os._exit(9)  # otherwise it would use all memory
        return super().get(*arguments, **options)

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("opendata_buffer.producer").addHandler(handler)
sender.RETRY_PAUSE_S = 2.5
store, runtime = Watched(), ManualRuntime()
entry = NewEntry("ingest/01HZZZZZZZZZZZZZZZZZZZZZZZ.batch", (Metadata(0, 0, bytes(1_048_502)),))
store.put("ingest/manifest", Manifest.empty().append([entry] * 64).raw)
config = ProducerConfig(
    store="memory://unused", broker="off", flush_size_bytes=1,
    delivery_timeout_ms=3_600_000,
)
claim_queue(store, config, runtime=runtime, grace_ms=14_400_000)
handle = Producer(config, store=store, runtime=runtime).produce([b"x"])
try:
    handle.result()
except QueueFull as error:
    print(round(peak()), len(runtime.slept), sum("trying again" in line for line in lines))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status")
def test_f35_a_producer_that_waits_at_a_full_manifest_stays_below_300_mb() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, retries, warnings = map(int, done.stdout.split())
    assert retries == 1_440
    assert warnings == 360, "one warning every ten seconds"
    assert peak < 300


# ---- a Spark task's memory: its budget in flight and a few batches, whatever amount it reads


MIB = 1 << 20
BATCHES = 32
DECODED = 12 * MIB
RECORD = 1024
BUDGET = 32 * MIB

# Reads everything as a task does, one record batch at a time as Spark does.
TASK_PROBE = """
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
    # Not ru_maxrss, which starts with the peak of the parent process.
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) * 1024

def read(store):
    options = SourceOptions.from_spark({"path": store})
    tasks = BufferBatchReader(options, default_schema()).partitions()
    descriptors = tuple(batch for task in tasks for batch in task.batches)
    rows = size = 0
    for piece in read_partition(options, default_schema(), TaskBatches(descriptors)):
        rows += piece.num_rows
        size += piece.nbytes
        assert piece.nbytes < 5 << 20
        del piece
    return rows, size

if sys.argv[4] == "far":
    class Far(pace.AdaptiveConcurrency):  # threads always read ahead as far as allowed
        near = property(lambda self: False, lambda self, value: None)

    pace.AdaptiveConcurrency.of = lambda store: Far()
read(sys.argv[1])
before = peak()
rows, size = read(sys.argv[2])
pool = pa.default_memory_pool().max_memory()
print(json.dumps({"rows": rows, "bytes": size, "grown": peak() - before, "pool": pool}))
"""


def queue_of(path: Path, batches: int, records: int, compression: Compression) -> str:
    """Create a queue of equal batches of noise, which has the same size as new noise each time."""
    # Half of it compresses, so that stored batches also have a size.
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
        [sys.executable, "-c", TASK_PROBE, small, large, str(BUDGET), distance],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rows"] == BATCHES * records
    assert result["bytes"] > BATCHES * DECODED  # 384 MiB were read
    # The budget in flight, the object of the batch that is being decoded, its decompressed block,
    # and pieces of its rows. Arrow reserves the size of the block for a piece and returns the rest.
    assert DECODED < result["pool"] < BUDGET + 2 * DECODED + 4 * MIB
    # The whole process, including memory that allocators keep, which is largest with several
    # threads on a busy machine. Without a limit it would be the size of everything it reads.
    assert DECODED < result["grown"] < BUDGET + 8 * DECODED


def test_a_task_holds_parts_of_a_large_file(tmp_path: Path) -> None:
    small = queue_of(tmp_path / "small", 2, 10, Compression.NONE)
    large = queue_of(tmp_path / "large", 2, 128 * MIB // RECORD, Compression.NONE)
    probe = [sys.executable, "-c", TASK_PROBE, small, large, str(BUDGET), "near"]
    result = json.loads(subprocess.run(probe, check=True, stdout=subprocess.PIPE).stdout)
    assert result["bytes"] > 256 * MIB
    assert 4 * MIB < result["pool"] < 16 * MIB
