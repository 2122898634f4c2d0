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

# Writes one number after the other into one object by compare-and-swap, and each number also into
# its own object. The bytes repeat the number, so that a torn write is visible.
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
        first = writer.stdout.readline()  # it has started
        time.sleep(rng.random() * 0.03)
        writer.send_signal(signal.SIGKILL)
        lines = [first, *writer.stdout.read().splitlines()]
        writer.wait()
        numbers = [int(line) for line in lines]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        # The object has the previous writer's old or new bytes, so this writer continued from
        # there.
        assert numbers[0] in (reported + 1, reported + 2)
        reported = numbers[-1]
        everything += numbers

        found = store.get("m")
        assert isinstance(found, Blob)
        number = int(found.data[:8])
        assert found.data == b"%08d" % number * 5_000
        assert number in (reported, reported + 1)
        # The lock is free, and the version belongs to these bytes.
        assert isinstance(store.put_if("m", found.data, found.version), outcomes.Applied)

    # Every reported write exists and is whole.
    for number in everything:
        assert read_bytes(store, f"in/{number}") == b"%08d" % number * 5_000
    # An unreported write is whole or does not exist.
    assert {info.size for info in store.list("in/").objects} == {40_000}
    # Half-written files are in a separate directory until they are deleted.
    assert len(os.listdir(tmp_path / RESERVED / "tmp")) <= KILLS
