"""Loading websockets from several threads at once, and in a process that forks meanwhile."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, threading
sys.setswitchinterval(1e-6)
from opendata_buffer.broker.ws_client import load_websockets

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


FORK = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from opendata_buffer.broker.ws_client import load_websockets

importing, forking = threading.Event(), threading.Event()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "websockets.asyncio.server":
            importing.set()
            forking.wait(20)

sys.meta_path.insert(0, Finder())
# Hooks run in reverse order: this one before the library's.
os.register_at_fork(before=forking.set)
thread = threading.Thread(target=load_websockets)
thread.start()
importing.wait(20)
child = os.fork()
if child == 0:
    signal.alarm(20)
    load_websockets()
    from websockets.asyncio.server import serve
    os._exit(0)
thread.join()
print("child ended with", os.waitpid(child, 0)[1])
"""


def test_a_child_forked_while_a_thread_loads_can_load_itself() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.strip()) == ("", "child ended with 0")
