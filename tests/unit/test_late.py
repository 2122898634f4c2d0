"""Imports made late, and forks meanwhile."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from opendata_buffer import late

late.FORK_WAITS_S = 0.05
loads, over = threading.Event(), threading.Event()

def load():
    with late.late_imports():
        loads.set()
        over.wait(20)

thread = threading.Thread(target=load)
thread.start()
loads.wait(20)
child = os.fork()
if child == 0:
    with late.late_imports():
        os._exit(0)
print("child ended with", os.waitpid(child, 0)[1])
over.set()
thread.join()
with late.late_imports():
    print("parent loads")
"""


def test_an_import_that_does_not_end_does_not_stop_a_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:2] == ["child ended with 0", "parent loads"]
