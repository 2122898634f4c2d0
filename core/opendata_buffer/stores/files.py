"""File system calls of the local store: durable writes, distinct times, errors in words."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Sequence

from opendata_buffer.errors import (
    InvalidInput,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)

__all__ = [
    "MISSING",
    "make_directories",
    "read_into",
    "read_range",
    "stamp_later",
    "stat_file",
    "storage_error",
    "sync_directory",
    "unlink_quietly",
    "version_of",
    "write_all",
    "write_pieces",
]

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
_stamp_lock = threading.Lock()
_last_stamp_ns = 0


def _reset_stamp_lock() -> None:
    global _stamp_lock
    _stamp_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_stamp_lock)


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


def stamp_later(fd: int, path: str, floor_ns: int) -> int:
    """Give an open new file a modification time later than ``floor_ns``; returns it.

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
        stamp_ns = max(_last_stamp_ns, floor_ns + 1)
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
