"""Loading websockets from several threads at once."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, threading
sys.setswitchinterval(1e-6)
from opendata_buffer.broker.loading import load_websockets

failed = []
start = threading.Barrier(8)

def load(number):
    start.wait()
    try:
        load_websockets()
        if number % 2:
            from websockets.sync.client import connect
        else:
            from websockets.asyncio.server import serve
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=load, args=(n,)) for n in range(8)]
for each in threads: each.start()
for each in threads: each.join()
print(failed or "loaded")
"""


def test_threads_that_load_at_once_all_get_whole_modules() -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "loaded"
