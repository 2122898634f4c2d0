"""The command line as processes: pipes, signals, and a hanging store."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from tests.unit.cli import shell

COMMAND = [sys.executable, "-m", "opendata_buffer"]
PATIENCE = 60  # seconds until a hanging process fails a test; the promise after a signal is five


def ok(*arguments: str, stdin: bytes = b"") -> bytes:
    """Run a command in this process, to prepare a test or to check its result."""
    return shell.ok(*arguments, stdin=stdin).stdout_bytes


def run(*arguments: str, stdin: bytes = b"") -> tuple[bytes, bytes]:
    """Run a command in its own process. Return its output and its messages."""
    done = subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    return done.stdout, done.stderr


def start(*arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=streams.get("stdin", subprocess.DEVNULL),
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
    )


def end(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert b"Traceback" not in err
    return process.returncode, out, err


def status(store: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ok("status", store, "--json"))
    return found


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "queue")


LINES = [b"record %d" % n for n in range(20_000)]
INPUT = b"\n".join(LINES) + b"\n"


def test_records_go_in_and_come_out_unchanged(store: str) -> None:
    out, _ = run("produce", store, "--flush-size-bytes", "10000", stdin=INPUT)
    found = json.loads(out.splitlines()[-1])
    assert found["records"] == len(LINES)
    assert found["batches"] == status(store)["queue_length"] > 1
    assert ok("consume", store) == INPUT
    assert ok("fsck", store)
    assert run("consume", store, "--ack")[0] == INPUT
    assert ok("consume", store, "--ack") == b""
    found = status(store)
    assert (found["queue_length"], found["orphans"]) == (0, found["next_sequence"])


def test_the_console_script_and_the_module_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("opendata-buffer")
    if not script.exists():
        pytest.skip("the package is not installed, only importable")
    by_script = subprocess.run([script, "--help"], capture_output=True, check=True).stdout
    assert by_script == run("--help")[0]


def test_f8_a_reader_that_stops_early_loses_nothing(store: str) -> None:
    ok("produce", store, "--flush-size-bytes", "10000", stdin=INPUT)
    consumer = start("consume", store, "--ack")
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == LINES[0] + b"\n"
    consumer.stdout.close()
    consumer.stdout = None
    code, _, err = end(consumer)
    assert (code, err) == (141, b"")
    # The batches that the reader did not take are still queued.
    assert ok("consume", store, "--ack") == INPUT


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_follower_after_acknowledging_what_it_wrote(
    store: str, number: int, code: int
) -> None:
    ok("produce", store, stdin=b"one\ntwo\n")
    consumer = start("consume", store, "--ack", "--follow")
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == b"one\n"
    assert consumer.stdout.readline() == b"two\n"
    ok("produce", store, stdin=b"three\n")
    assert consumer.stdout.readline() == b"three\n"
    wait_for(lambda: queued(store) == 0, "the follower's acknowledgement")
    consumer.send_signal(number)
    ended, out, err = end(consumer)
    assert (ended, out) == (code, b"")
    assert json.loads(err) == {"records": 3, "batches": 2, "bytes": 11, "last_sequence": 1}
    assert ok("consume", store, "--ack") == b""


def queued(store: str) -> int:
    """Return the number of batches in the queue, or 0 if it does not exist."""
    queue = Queue(open_store(store), QueueConfig(store=store), runtime=SystemRuntime(), role="test")
    manifest = queue.read()
    return 0 if manifest is None else manifest.entry_count


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen in {PATIENCE} s"
        time.sleep(0.002)


def test_sigterm_flushes_what_a_producer_has_read(tmp_path: Path) -> None:
    # If the signal hits between reading the lines and producing them, they are lost, and the exit
    # code says so. A producer that waits for input, the usual case, flushes.
    for attempt in range(8):
        store = str(tmp_path / str(attempt))
        producer = start("produce", store, "--flush-interval-ms", "3600000", stdin=subprocess.PIPE)
        assert producer.stdin is not None
        producer.stdin.write(b"one\ntwo\nhalf a li")
        producer.stdin.flush()
        wait_until_read(producer)
        # Nothing shows from outside that the lines were produced.
        time.sleep(0.05 * 2**attempt if attempt else 0)
        producer.terminate()
        code, out, _ = end(producer)
        assert (code, out) == (143, b"")
        done = shell.run("consume", store, "--ack")
        if done.stdout:
            assert done.stdout == "one\ntwo\n"
            return
    raise AssertionError("the lines were never flushed")


def wait_until_read(process: subprocess.Popen[bytes]) -> None:
    """Wait until the pipe to the process is empty or the process has ended."""
    assert process.stdin is not None
    pipe = process.stdin.fileno()

    def is_read() -> bool:
        waiting = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
        return struct.unpack("i", waiting)[0] == 0 or process.poll() is not None

    wait_for(is_read, "the reading of all input")


def test_a_full_disk_of_the_reader_is_reported_in_one_line_and_acknowledges_nothing(
    store: str,
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    ok("produce", store, stdin=b"one\n")
    with open("/dev/full", "wb") as full:
        consumer = start("consume", store, "--ack", stdout=full)
        code, _, err = end(consumer)
    assert code == 1
    assert err == b"error: standard input or output: No space left on device\n"
    assert ok("consume", store, "--ack") == b"one\n"


# ---- commands end in time, with any behavior of the store and a signal at any moment

# Imitates a store that hangs in one upload, in the process of the command.
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
    """Yield a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield server


@pytest.fixture
def silent(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of the silent server."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    return f"http://127.0.0.1:{server.getsockname()[1]}"


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
def test_a_command_gives_up_on_a_store_that_accepts_and_never_answers(
    silent: str, command: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [*COMMAND, *command, "--endpoint-url", silent, "--timeout-ms", "2000"],
        input=b"a\n",
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(b"error: "), done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("command", [("status",), ("produce",), ("consume", "--follow")])
def test_a_signal_ends_a_command_that_waits_for_a_silent_store(
    server: socket.socket, silent: str, command: tuple[str, ...], number: int, code: int
) -> None:
    where = ("s3://bucket", "--endpoint-url", silent, "--timeout-ms", "600000")
    process = start(*command, *where, stdin=subprocess.PIPE)
    server.settimeout(60)
    connection, _ = server.accept()
    connection.recv(1)  # the request is on its way
    process.send_signal(number)
    end(process)
    connection.close()
    assert process.returncode == code


def with_two_durable_lines(tmp_path: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start a process that has produced two lines and whose input is still open."""
    process = subprocess.Popen(
        [*command, "produce", str(tmp_path), "--flush-interval-ms", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    wait_for((tmp_path / "ingest" / "manifest").exists, "the first append")
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
    _, out, err = end(process)
    assert (process.returncode, out) == (code, b"")
    assert b"ended by a signal: of the input, lines 1 to 2 are durable\n" in err


# Each of these programs sends itself Ctrl-C at a certain moment.
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
AT_EXIT = """
import atexit, os, signal
from opendata_buffer.cli import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
main()
"""


@pytest.mark.parametrize(
    ("script", "command", "code"),
    [(LOADING, "status", 130), (IN_EXEC, "status", 130), (AT_EXIT, "produce", 0)],
    ids=["loading", "in exec", "at exit"],
)
def test_ctrl_c_at_any_moment_ends_with_a_code_and_not_by_the_signal(
    tmp_path: Path, script: str, command: str, code: int
) -> None:
    # As a module, because only then would Python end by a signal that was caught in an exec().
    (tmp_path / "interrupted.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "interrupted", command, str(tmp_path / "queue")],
        input=b"",
        capture_output=True,
        cwd=tmp_path,
        timeout=PATIENCE,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if not line.startswith(b"{")]
    assert (done.returncode, errors) == (code, [])
