"""File system calls of the local store: durable writes, distinct times, errors in words."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import zlib
from collections.abc import Sequence
from types import TracebackType

from opendata_buffer.errors import (
    InvalidInput,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.runtime import Runtime, remaining

_STRIPES = 64
_thread_locks: list[threading.Lock] = []


def _reset_locks() -> None:
    # A child forked while another thread held a lock would wait for a thread it does not have.
    global _stamp_lock
    _thread_locks[:] = [threading.Lock() for _ in range(_STRIPES)]
    _stamp_lock = threading.Lock()


_stamp_lock = threading.Lock()
_reset_locks()
os.register_at_fork(after_in_child=_reset_locks)


class LockTimeout(Exception):
    """Another thread or process kept the lock until the deadline."""


class FileLock:
    """``flock`` on a file that stays, as a context manager; also holds a small number.

    The kernel frees the lock when its holder dies, so ``kill -9`` cannot leave it behind. Threads
    of one process are kept apart by a lock of their own, because on NFS ``flock`` belongs to the
    process.

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
        # Half of what is left: the caller must have time to report why it failed.
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


_CHUNK = 64 * 1024 * 1024
_PIECES = 512  # of one call; systems take 1,024 at most
MISSING = {errno.ENOENT, errno.ENOTDIR}
"""Errors that mean: no such file."""

_BAD_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL}
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}

_LONGEST_STEP_NS = 10**9
_last_stamp_ns = 0


def version_of(status: os.stat_result) -> str:
    """The version of a file, of one ``fstat`` of it."""
    return f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"


def stat_file(path: str) -> os.stat_result | None:
    """The status of a regular file; None when there is none of this name."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def stamp_later(fd: int, path: str, previous_ns: int) -> int:
    """Give an open new file a modification time later than ``previous_ns``; returns it.

    The kernel's own stamps advance in steps of some milliseconds and inodes are used again, so
    without this two versions written within one step could get the same token.
    """
    global _last_stamp_ns
    with _stamp_lock:
        kernel_ns = os.fstat(fd).st_mtime_ns
        # Of two files of one step the second is the later one. A last stamp much ahead of the
        # kernel's is from before its clock was set back, and no longer followed.
        within_step = _last_stamp_ns - kernel_ns < _LONGEST_STEP_NS
        _last_stamp_ns = max(kernel_ns, _last_stamp_ns + 1) if within_step else kernel_ns
        stamp_ns = max(_last_stamp_ns, previous_ns + 1)
    os.utime(fd, ns=(stamp_ns, stamp_ns))
    kept_ns = os.fstat(fd).st_mtime_ns
    if kept_ns != stamp_ns:
        raise PermanentStorageError(
            f"the file system of {path!r} keeps modification times only coarsely (asked for "
            f"{stamp_ns} ns, kept {kept_ns} ns), so versions could repeat: use another file "
            "system (ext4, XFS, Btrfs, APFS, tmpfs) or an s3:// URL"
        )
    return stamp_ns


def read_range(fd: int, start: int, end: int) -> bytes:
    """Bytes ``start`` to ``end`` of an open file; fewer when it ends before."""
    parts = []
    while start < end:
        part = os.pread(fd, min(end - start, _CHUNK), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(fd: int, memory: memoryview) -> bool:
    """Fill the memory with the first bytes of an open file; false when it ends before."""
    while memory:
        count = os.readv(fd, [memory[:_CHUNK]])
        if not count:
            return False
        memory = memory[count:]
    return True


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write bytes of any size."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(fd, rest[:_CHUNK]) :]


def write_pieces(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write them one behind the other, without joining them first."""
    for start in range(0, len(pieces), _PIECES):
        group = pieces[start : start + _PIECES]
        written = os.writev(fd, group)
        if written < sum(map(len, group)):
            write_all(fd, memoryview(b"".join(group))[written:])


def sync_directory(path: str) -> None:
    """Make the names in a directory survive a power cut."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # the object was deleted meanwhile, and its directory with it
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # cannot sync directories at all
            raise
    finally:
        os.close(fd)


def make_directories(path: str) -> None:
    """Like ``os.makedirs``, but a power cut does not lose a directory made here."""
    for attempt in range(8):
        try:
            os.mkdir(path)
            break
        except FileExistsError:
            return
        except FileNotFoundError:
            # A delete may prune the parent again; but below a dangling link or in /proc a
            # parent "exists" and mkdir fails for ever.
            if attempt == 7:
                raise
            make_directories(os.path.dirname(path))
    sync_directory(os.path.dirname(path))


def unlink_quietly(path: str) -> None:
    """Remove a file if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def storage_error(verb: str, path: str, error: OSError) -> StorageError | InvalidInput:
    """The error of this library for one of the operating system."""
    what = f"cannot {verb} {path!r}: {error.strerror or error}"
    if error.errno in _BAD_NAME:
        return InvalidInput(f"{what}. Use a shorter or simpler name.")
    if error.errno in _TRANSIENT:
        return TransientStorageError(f"{what}. Try again.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PermanentStorageError(f"{what}. Free some space.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermanentStorageError(f"{what}. Give this user the right to {verb} there.")
    if error.errno == errno.EXDEV:
        return PermanentStorageError(
            f"{what}. A store lies on one file system, or its renames are not atomic: link or "
            "mount the store's whole directory and not a part of it."
        )
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
        return PermanentStorageError(
            f"{what}. A directory cannot hold one object named like the directory of another."
        )
    return PermanentStorageError(f"{what}.")
