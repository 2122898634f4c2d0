"""``copy`` is killed with SIGKILL again and again: every batch arrives once and in order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.open import open_store

BATCHES = 900
KILLS = 3
PATIENCE_S = 120


def written(url: str) -> list[bytes]:
    """A queue of many small batches, written without a producer to save time."""
    runtime, store = SystemRuntime(), open_store(url)
    claim_queue(store, QueueConfig(store=url), runtime=runtime)
    values = [b"%d" % n for n in range(BATCHES)]
    entries = []
    folder = Path(url) / "ingest"
    for value in values:
        location = batch_key("ingest", runtime.ulid())
        (folder / location.rpartition("/")[2]).write_bytes(encode_batch([value]))
        entries.append(NewEntry(location))
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)
    return values


def entries_of(url: str) -> Manifest:
    store = open_store(url)
    assert isinstance(store, LocalStore)
    if not (Path(url) / "ingest" / "manifest").exists():
        return Manifest.empty()
    got = store.get("ingest/manifest")
    assert isinstance(got, Blob)
    return Manifest.parse(got.data)


def killed_in_the_middle(command: list[str], target: str) -> int:
    """How often a copy was killed before its end."""
    in_the_middle = 0
    for _ in range(KILLS):
        before = entries_of(target).entry_count
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while entries_of(target).entry_count <= before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        in_the_middle += process.wait() == -signal.SIGKILL
    return in_the_middle


def test_killed_again_and_again_it_copies_each_batch_once(tmp_path: Path) -> None:
    source = str(tmp_path / "from")
    values = written(source)
    # A test that has no processor for a while may find the copy complete: then another one.
    for attempt in range(5):
        target = str(tmp_path / f"to{attempt}")
        command = [sys.executable, "-m", "opendata_buffer", "copy", source, target]
        if killed_in_the_middle(command, target):
            break
    else:
        raise AssertionError("each copy was complete before it was killed")
    assert entries_of(target).entry_count
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
    store = open_store(target)
    found = []
    for entry in entries_of(target).entries():
        got = store.get(entry.location)
        assert isinstance(got, Blob)
        found += decode_batch(got.data)
    assert found == values
    assert json.loads(done.stdout)["next"] == {"ingest": BATCHES}
    again = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
    assert json.loads(again.stdout)["batches"] == 0
