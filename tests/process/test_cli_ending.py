"""Commands end in time whatever the store does: it hangs, and signals arrive."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli import shell

COMMAND = [sys.executable, "-m", "opendata_buffer"]
READY_S = 60  # until something that never happens fails a test
END_S = 60  # five seconds from a signal are promised, and a slow machine takes its time

# Stands in for a store that hangs in one upload, in the process of the command.
HANGING = """
import sys, threading
from opendata_buffer.stores.local import LocalStore
put = LocalStore.put_pieces
def hanging(self, key, pieces):
    if b"hang" in b"".join(pieces):
        print("hanging", file=sys.stderr, flush=True)
        threading.Event().wait()
    put(self, key, pieces)
LocalStore.put_pieces = hanging
from opendata_buffer.cli import main
main()
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield server


@pytest.fixture
def silent(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of that server."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What it printed, once it has ended."""
    try:
        return process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


COMMANDS = [
    ("status", "s3://bucket"),
    ("fsck", "s3://bucket"),
    ("gc", "s3://bucket"),
    ("dump", "s3://bucket"),
    ("consume", "s3://bucket"),
    ("consume", "s3://bucket", "--follow"),
    ("produce", "s3://bucket"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_store_that_accepts_and_never_answers_is_given_up_in_time(
    silent: str, command: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [*COMMAND, *command, "--endpoint-url", silent, "--timeout-ms", "2000"],
        input=b"a\n",
        capture_output=True,
        timeout=END_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(b"error: "), done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("command", [("status",), ("produce",), ("consume", "--follow")])
def test_a_signal_ends_a_command_that_waits_for_a_silent_store(
    server: socket.socket, silent: str, command: tuple[str, ...], number: int, code: int
) -> None:
    process = subprocess.Popen(
        [*COMMAND, *command, "s3://bucket", "--endpoint-url", silent, "--timeout-ms", "600000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    server.settimeout(60)
    connection, _ = server.accept()
    connection.recv(1)  # the request is on its way
    process.send_signal(number)
    end(process)
    connection.close()
    assert process.returncode == code


def with_two_durable_lines(tmp_path: Path, *command: str) -> subprocess.Popen[bytes]:
    """A process that produces, and whose input goes on."""
    process = subprocess.Popen(
        [*command, "produce", str(tmp_path), "--flush-interval-ms", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    deadline = time.monotonic() + READY_S
    while not (tmp_path / "ingest" / "manifest").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_a_hanging_upload_reports_which_lines_are_durable(
    tmp_path: Path, number: int, code: int
) -> None:
    process = with_two_durable_lines(tmp_path, sys.executable, "-c", HANGING)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"hang\n")
    process.stdin.flush()
    assert process.stderr.readline() == b"hanging\n"
    process.send_signal(number)
    out, err = end(process)
    assert (process.returncode, out) == (code, b"")
    assert b"ended by a signal: of the input, lines 1 to 2 are durable\n" in err


def test_an_orderly_end_reports_that_all_lines_are_durable(tmp_path: Path) -> None:
    process = with_two_durable_lines(tmp_path, *COMMAND)
    process.terminate()
    _, err = end(process)
    assert process.returncode == 143
    assert err == b"ended by a signal: of the input, lines 1 to 2 are durable\n"
    assert json.loads(shell.ok("status", str(tmp_path), "--json").stdout)["queue_length"] == 1


# Each sends Ctrl-C to itself at a moment of its own.
LOADING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from opendata_buffer.cli import main
main()
"""
IN_EXEC = """
import os, signal
from opendata_buffer.cli import main
from opendata_buffer.stores.local import LocalStore
def get(*args, **options):
    exec("os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10_000): pass", globals())
LocalStore.get = get
main()
"""
IN_A_CLASS = """
import os, signal
from opendata_buffer.cli import main
from opendata_buffer.stores.local import LocalStore
class Field:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10_000): pass
def get(*args, **options):
    class Made:
        field = Field()
LocalStore.get = get
main()
"""
AT_EXIT = """
import atexit, os, signal
from opendata_buffer.cli import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
main()
"""
LAST_OF_ALL = """
import os, signal
from opendata_buffer.cli import main
class Last:
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, 2)
last = Last()
main()
"""


@pytest.mark.parametrize(
    ("script", "command", "code"),
    [
        (LOADING, "status", 130),
        (IN_EXEC, "status", 130),
        (IN_A_CLASS, "status", 130),
        (AT_EXIT, "produce", 0),
        (LAST_OF_ALL, "produce", 0),
    ],
    ids=["loading", "in exec", "in a class", "at exit", "last of all"],
)
def test_ctrl_c_at_any_moment_ends_with_a_code_and_not_by_the_signal(
    tmp_path: Path, script: str, command: str, code: int
) -> None:
    # As a module: only of one does Python end by the signal what was caught in an exec().
    (tmp_path / "interrupted.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "interrupted", command, str(tmp_path / "queue")],
        input=b"",
        capture_output=True,
        cwd=tmp_path,
        timeout=END_S,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith(b"{")]
    assert (done.returncode, errors) == (code, [])
