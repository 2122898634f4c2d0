"""Sockets that a forked child gives up."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, socket, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from opendata_buffer.broker.server import close_in_children

class Owner:
    def __init__(self, *sockets):
        self.sockets = sockets

    def descriptors(self):
        return [each.fileno() for each in self.sockets]

mine, other = socket.socketpair()
closed = socket.socket()
closed.close()
owner = Owner(closed, mine)
if sys.argv[1] == "owned":
    close_in_children(owner)
say, told = socket.socketpair()
child = os.fork()
if child == 0:
    say.close()
    other.close()
    told.sendall(b"!")
    told.recv(1)  # until the parent says so
    mine.close()  # what closes it here closes nothing else
    os._exit(0 if told.fileno() >= 0 and os.fstat(told.fileno()) else 1)
say.recv(1)
mine.sendall(b"x")
mine.close()
other.settimeout(0.2 if sys.argv[1] != "owned" else 20)
seen = [other.recv(1)]
try:
    seen.append(other.recv(1))
except TimeoutError:
    seen.append("open")
say.sendall(b"!")
print(seen, os.waitpid(child, 0)[1])
"""


def run(how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, how], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_connection_ends_with_its_process_though_a_child_of_it_lives() -> None:
    assert run("owned") == "[b'x', b''] 0"


def test_a_connection_that_is_nobodys_lives_on_in_the_child() -> None:
    assert run("nobodys") == "[b'x', 'open'] 0"
