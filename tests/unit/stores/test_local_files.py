"""File system calls of the local store, and the lock between threads and processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from opendata_buffer.errors import InvalidInput, PermanentStorageError, TransientStorageError
from opendata_buffer.runtime import SystemRuntime, deadline
from opendata_buffer.stores import local_files as files
from opendata_buffer.stores.local_files import FileLock, LockTimeout
from opendata_buffer.testing.runtime import ManualRuntime


def opened(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR)


def test_stamps_of_one_process_never_repeat(tmp_path: Path) -> None:
    fd = opened(tmp_path / "a")
    stamps = [files.stamp_later(fd, "a", 0) for _ in range(1_000)]
    os.close(fd)
    assert sorted(set(stamps)) == stamps


def test_a_stamp_is_later_than_the_floor_even_when_the_clock_went_back(tmp_path: Path) -> None:
    fd = opened(tmp_path / "a")
    future_ns = 4_102_444_800_000_000_000  # 2100-01-01
    assert files.stamp_later(fd, "a", future_ns) == future_ns + 1
    assert os.fstat(fd).st_mtime_ns == future_ns + 1
    os.close(fd)
    # One file of the far future does not carry all others there.
    fd = opened(tmp_path / "b")
    assert files.stamp_later(fd, "b", 0) < future_ns
    os.close(fd)


def test_a_clock_that_was_set_back_is_followed(tmp_path: Path) -> None:
    fd = opened(tmp_path / "a")
    os.utime(fd, ns=(4_102_444_800_000_000_000,) * 2)  # as if the kernel's clock said 2100
    files.stamp_later(fd, "a", 0)
    os.close(fd)
    fd = opened(tmp_path / "b")
    now_ns = os.fstat(fd).st_mtime_ns
    assert 0 <= files.stamp_later(fd, "b", 0) - now_ns < 10**9
    os.close(fd)


def test_coarse_times_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.utime

    def to_seconds(fd: int, *, ns: tuple[int, int]) -> None:
        seconds = ns[0] // 10**9 * 10**9
        real(fd, ns=(seconds, seconds))

    monkeypatch.setattr(os, "utime", to_seconds)
    fd = opened(tmp_path / "a")
    with pytest.raises(
        PermanentStorageError, match="'/x/a' keeps modification times only coarsely"
    ):
        files.stamp_later(fd, "/x/a", 0)
    os.close(fd)


def test_write_all_writes_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 3)
    fd = opened(tmp_path / "a")
    files.write_all(fd, b"0123456789")
    assert files.read_range(fd, 0, 10) == b"0123456789"
    assert files.read_range(fd, 2, 9) == b"2345678"
    assert files.read_range(fd, 8, 99) == b"89"
    assert files.read_range(fd, 4, 4) == b""
    os.close(fd)


@pytest.mark.parametrize("most", [None, 4])
def test_pieces_are_written_one_behind_the_other_also_when_a_call_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    monkeypatch.setattr(files, "_PIECES", 3)
    calls = []
    writev = os.writev

    def cut(fd: int, group: Sequence[bytes | memoryview]) -> int:
        calls.append(len(group))
        return writev(fd, group) if most is None else os.write(fd, b"".join(group)[:most])

    monkeypatch.setattr(os, "writev", cut)
    fd = opened(tmp_path / "a")
    pieces = [b"01", memoryview(b"234"), b"", b"5", b"678", b"9ab", b"c"]
    files.write_pieces(fd, pieces)
    assert files.read_range(fd, 0, 99) == b"0123456789abc"
    assert calls == [3, 3, 1]
    os.close(fd)


@pytest.mark.parametrize(
    ("code", "kind", "fix"),
    [
        (errno.ENOSPC, PermanentStorageError, "Free some space"),
        (errno.EXDEV, PermanentStorageError, "mount the store's whole directory"),
        (errno.EDQUOT, PermanentStorageError, "Free some space"),
        (errno.EACCES, PermanentStorageError, "right to write"),
        (errno.EROFS, PermanentStorageError, "right to write"),
        (errno.EISDIR, PermanentStorageError, "directory of another"),
        (errno.EIO, PermanentStorageError, "Input/output error"),
        (errno.EMFILE, TransientStorageError, "Try again"),
        (errno.ESTALE, TransientStorageError, "Try again"),
        (errno.ENAMETOOLONG, InvalidInput, "shorter"),
    ],
)
def test_errors_name_path_cause_and_fix(code: int, kind: type, fix: str) -> None:
    error = files.storage_error("write", "/data/x", OSError(code, os.strerror(code)))
    assert type(error) is kind
    assert str(error).startswith(f"cannot write '/data/x': {os.strerror(code)}")
    assert fix in str(error)


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
