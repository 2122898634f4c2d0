"""The lock between threads and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from opendata_buffer.runtime import SystemRuntime, deadline
from opendata_buffer.stores.local_files import FileLock, LockTimeout
from opendata_buffer.testing.runtime import ManualRuntime

HOLD = """
import sys
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.local_files import FileLock
with FileLock(sys.argv[1], SystemRuntime()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


def holder(path: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_lock_can_be_taken_again_and_again(path: str, runtime: ManualRuntime) -> None:
    for _ in range(3):
        with FileLock(path, runtime):
            pass
    assert runtime.slept == []
    assert os.path.exists(path)


def test_within_a_deadline_there_is_time_left_to_tell_who_has_it(
    path: str, runtime: ManualRuntime
) -> None:
    process = holder(path)
    with deadline(runtime, 8.0), pytest.raises(LockTimeout), FileLock(path, runtime):
        pass
    assert 4.0 <= runtime.monotonic() < 5.0
    process.communicate("")


def test_another_process_keeps_it_out_until_it_leaves(path: str, runtime: ManualRuntime) -> None:
    process = holder(path)
    with pytest.raises(LockTimeout), FileLock(path, runtime):
        pass
    assert runtime.monotonic() >= 30
    process.communicate("")
    with FileLock(path, runtime):
        pass


def test_kill_9_of_the_holder_frees_it(path: str, runtime: ManualRuntime) -> None:
    process = holder(path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with FileLock(path, runtime):
        pass
    assert runtime.slept == []


def test_threads_keep_each_other_out(path: str) -> None:
    inside = 0
    most = 0
    runtime = SystemRuntime()

    def work() -> None:
        nonlocal inside, most
        for _ in range(20):
            with FileLock(path, runtime):
                inside += 1
                most = max(most, inside)
                runtime.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_thread_that_holds_it_times_out_another(path: str, runtime: ManualRuntime) -> None:
    with (
        FileLock(path, runtime),
        pytest.raises(LockTimeout),
        FileLock(path, runtime, timeout_s=0.01),
    ):
        pass


def test_an_error_inside_frees_it(path: str, runtime: ManualRuntime) -> None:
    with pytest.raises(KeyError), FileLock(path, runtime):
        raise KeyError
    with FileLock(path, runtime):
        pass


def test_without_create_a_missing_file_is_no_lock(path: str, runtime: ManualRuntime) -> None:
    with FileLock(path, runtime, create=False) as lock:
        assert lock.load() == 0
        lock.store(7)
    assert not os.path.exists(path)


def test_a_missing_directory_is_an_error(tmp_path: Path, runtime: ManualRuntime) -> None:
    with pytest.raises(FileNotFoundError), FileLock(str(tmp_path / "no" / "lock"), runtime):
        pass


def test_it_remembers_a_number(path: str, runtime: ManualRuntime) -> None:
    with FileLock(path, runtime) as lock:
        assert lock.load() == 0
        lock.store(1_767_225_600_123_456_789)
    with FileLock(path, runtime) as lock:
        assert lock.load() == 1_767_225_600_123_456_789
        lock.store(3)
    with FileLock(path, runtime, create=False) as lock:
        assert lock.load() == 3


@pytest.mark.parametrize("raw", [b"", b"junk", b"-5", b"\xff" * 24])
def test_junk_in_the_file_is_no_number(path: str, runtime: ManualRuntime, raw: bytes) -> None:
    Path(path).write_bytes(raw)
    with FileLock(path, runtime) as lock:
        assert lock.load() == 0


def test_a_forked_child_does_not_keep_the_lock(path: str, runtime: ManualRuntime) -> None:
    read_end, write_end = os.pipe()
    with FileLock(path, runtime):
        child = os.fork()
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)  # lives, with a copy of the open lock file, until told
            os._exit(0)
    with FileLock(path, runtime):
        pass
    assert runtime.slept == []
    os.close(write_end)
    os.close(read_end)
    os.waitpid(child, 0)
