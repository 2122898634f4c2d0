"""What who is on call waits for: ``status`` and ``fsck`` of 50,000 batches, as processes.

Seconds of processor time of the whole command, its start included: on a machine with nothing else
to do a person waits about as long. The store is a directory in the page cache.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Row
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

BATCHES = 50_000
RECORDS = [b"%0100d" % n for n in range(10)]
TRIES = 3

BARS_S = {
    ("status",): 1.0,
    ("status", "--max-lag", "1e9"): 0.6,
    ("fsck",): 6.0,
}
"""The commands, and how long each may take."""


def written(url: str, batches: int) -> None:
    """A queue, written as files: a producer would take longer than all that is measured."""
    runtime, store = SystemRuntime(), open_store(url)
    claim_queue(store, QueueConfig(store=url), runtime=runtime)
    data = encode_batch(RECORDS)
    entries = []
    for _ in range(batches):
        location = batch_key("ingest", runtime.ulid())
        (Path(url) / location).write_bytes(data)
        entries.append(NewEntry(location, (Metadata(0, runtime.now_ms()),)))
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)


def took(*words: str) -> float:
    """Seconds of processor time of a command, the smallest of some tries.

    Raises:
        CalledProcessError: It failed.
    """
    found = []
    # The first start compiles modules, unless somebody has done so before.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    for _ in range(TRIES + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "opendata_buffer", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


def run() -> Iterator[Row]:
    """A row for each command."""
    with tempfile.TemporaryDirectory() as folder:
        written(folder, BATCHES)
        for (command, *options), bar_s in BARS_S.items():
            seconds = took(command, folder, *options)
            name = " ".join([command, *options, f"of {BATCHES:,} batches"])
            yield Row(name, f"{seconds:.2f} s CPU", f"<= {bar_s:g} s", seconds <= bar_s)
