"""An exclusive lock between threads and processes that kill -9 cannot leave behind."""

from __future__ import annotations

import fcntl
import os
import threading
import zlib
from types import TracebackType

from opendata_buffer.runtime import Runtime, remaining

__all__ = ["FileLock", "LockTimeout"]

_STRIPES = 64
_thread_locks: list[threading.Lock] = []


def _reset() -> None:
    # A child forked while another thread held a lock would wait for a thread it does not have.
    _thread_locks[:] = [threading.Lock() for _ in range(_STRIPES)]


_reset()
os.register_at_fork(after_in_child=_reset)


class LockTimeout(Exception):
    """Another thread or process kept the lock until the deadline."""


class FileLock:
    """``flock`` on a file that stays, as a context manager; also holds a small number.

    The kernel frees the lock when its holder dies. Threads of one process are kept apart by a
    lock of their own, because on NFS ``flock`` belongs to the process.

    Args:
        path: The lock file; its directory must exist. It is never deleted: a process that
            locks a deleted file and one that locks its successor would both hold the lock.
        runtime: Where waiting comes from.
        timeout_s: How long to wait before :class:`LockTimeout`; within a deadline at most half of
            what is left until then.
        create: Whether to make the file. Otherwise a missing file is no error and no lock.

    Raises:
        LockTimeout: On entering: the lock was not free until the deadline.
        OSError: On entering: the file cannot be opened, or its file system has no locks.
    """

    def __init__(
        self, path: str, runtime: Runtime, *, timeout_s: float = 30.0, create: bool = True
    ) -> None:
        self._path = path
        self._runtime = runtime
        left = remaining()
        # Half of what is left: whoever waits until then must still be told why.
        self._timeout_s = timeout_s if left is None else min(timeout_s, max(left / 2, 0.0))
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._thread_lock = _thread_locks[
            zlib.crc32(path.encode("utf-8", "surrogateescape")) % _STRIPES
        ]
        self._fd: int | None = None

    def __enter__(self) -> FileLock:
        deadline = self._runtime.monotonic() + self._timeout_s
        try:
            fd = os.open(self._path, self._flags, 0o666)
        except (FileNotFoundError, NotADirectoryError):
            if self._flags & os.O_CREAT:
                raise
            return self
        try:
            if not self._thread_lock.acquire(timeout=self._timeout_s):
                raise LockTimeout(self._path)
            try:
                self._lock_file(fd, deadline)
            except BaseException:
                self._thread_lock.release()
                raise
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        try:
            try:
                # Unlocked before close(): a child forked meanwhile has the descriptor, too, and
                # would keep the lock until it ends.
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)
        finally:
            self._thread_lock.release()

    def _lock_file(self, fd: int, deadline: float) -> None:
        # Polled and not blocked in the kernel: the holder may be stopped, and the wait must end.
        pause_s = 0.001
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._runtime.monotonic() >= deadline:
                    raise LockTimeout(self._path) from None
            self._runtime.sleep(pause_s * (0.5 + self._runtime.random()))
            pause_s = min(pause_s * 2, 0.02)

    def load(self) -> int:
        """The number last stored under this lock; 0 when there is none."""
        if self._fd is None:
            return 0
        raw = os.pread(self._fd, 24, 0).strip()
        return int(raw) if raw.isdigit() else 0

    def store(self, number: int) -> None:
        """Keep a number of up to 24 digits for the next holder. Not fsynced."""
        if self._fd is not None:
            os.pwrite(self._fd, b"%024d" % number, 0)
