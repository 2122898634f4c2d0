"""kill -9 of writers of the local store, at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from opendata_buffer import outcomes
from opendata_buffer.stores.base import Blob, read_bytes
from opendata_buffer.stores.local import RESERVED, LocalStore

KILLS = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16"))

# Writes number after number into one object by compare-and-swap, and each also as an object of
# its own. The bytes repeat the number, so that a torn write shows.
WRITER = """
import sys
from opendata_buffer import outcomes
from opendata_buffer.stores.local import LocalStore

store = LocalStore(sys.argv[1])
while True:
    found = store.get("m")
    number = int(found.data[:8]) + 1
    data = b"%08d" % number * 5_000
    outcome = store.put_if("m", data, found.version)
    assert isinstance(outcome, outcomes.Applied), outcome
    store.put(f"in/{number}", data)
    print(number, flush=True)
"""


def test_kill_9_leaves_old_or_new_bytes_and_no_stuck_lock(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert isinstance(store.put_if("m", b"%08d" % 0 * 5_000, None), outcomes.Applied)
    rng = random.Random(9)
    reported = 0
    everything: list[int] = []
    for _ in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        first = writer.stdout.readline()  # it is past its start
        time.sleep(rng.random() * 0.03)
        writer.send_signal(signal.SIGKILL)
        lines = [first, *writer.stdout.read().splitlines()]
        writer.wait()
        numbers = [int(line) for line in lines]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        # What the writer before was killed over is old or new, so this one went on from there.
        assert numbers[0] in (reported + 1, reported + 2)
        reported = numbers[-1]
        everything += numbers

        found = store.get("m")
        assert isinstance(found, Blob)
        number = int(found.data[:8])
        assert found.data == b"%08d" % number * 5_000
        assert number in (reported, reported + 1)
        # The lock is free, and the version is the one of these bytes.
        assert isinstance(store.put_if("m", found.data, found.version), outcomes.Applied)

    # What a writer had reported is there and whole.
    for number in everything:
        assert read_bytes(store, f"in/{number}") == b"%08d" % number * 5_000
    # What it had not reported is whole or not there.
    assert {info.size for info in store.list("in/").objects} == {40_000}
    # Half-written files are in a directory of their own, until they are deleted.
    assert len(os.listdir(tmp_path / RESERVED / "tmp")) <= KILLS
