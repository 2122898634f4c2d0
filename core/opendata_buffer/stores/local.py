"""Objects as files below a directory, safe between processes on one machine (failure F13)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path

from opendata_buffer import outcomes
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.batch import BROKER_RECORD_NAME, check_key
from opendata_buffer.runtime import Runtime, SystemRuntime, remaining
from opendata_buffer.stores.base import (
    Allocate,
    Blob,
    DeleteFailure,
    Listing,
    ObjectInfo,
    PutOutcome,
    check_limit,
    check_range,
    check_size,
    cut,
)
from opendata_buffer.stores.probed import Probed

_TIMEOUT_S = 30.0
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


class LockTimeout(TransientStorageError):
    """Another thread or process kept the lock until the deadline."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"another process holds the lock {path!r}: it may be stopped (find it with lsof or "
            "fuser)"
        )


class FileLock:
    """``flock`` on a file, as a context manager, which also stores a small number.

    A separate lock keeps the threads of one process apart, because on NFS ``flock`` belongs to the
    process. The file is never deleted: a process that locks a deleted file and one that locks its
    successor would both hold the lock. Without ``create``, a missing file needs no lock.

    Args:
        path: The file to lock.
        runtime: Clock and sleep.
        create: Create the file if it is missing. Default true.

    Raises:
        LockTimeout: The lock is not free within 30 seconds, or within half of the time until the
            caller's deadline.
    """

    def __init__(self, path: str, runtime: Runtime, *, create: bool = True) -> None:
        self._path = path
        self._runtime = runtime
        left = remaining()
        # Use half of the time left, so that the caller has time to report why it failed.
        self._timeout_s = _TIMEOUT_S if left is None else min(_TIMEOUT_S, max(left / 2, 0.0))
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        number = zlib.crc32(path.encode("utf-8", "surrogateescape"))
        self._thread_lock = _thread_locks[number % _STRIPES]
        self._fd: int | None = None

    def __enter__(self) -> FileLock:
        deadline = self._runtime.monotonic() + self._timeout_s
        try:
            fd = os.open(self._path, self._flags, 0o666)
        except (FileNotFoundError, NotADirectoryError):
            if self._flags & os.O_CREAT:
                raise
            return self
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            if not self._thread_lock.acquire(timeout=self._timeout_s):
                raise LockTimeout(self._path)
            undo.callback(self._thread_lock.release)
            self._lock_file(fd, deadline)
            undo.pop_all()
        self._fd = fd
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with contextlib.ExitStack() as held:
            held.callback(self._thread_lock.release)
            held.callback(os.close, fd)
            # Unlocked before close(): a child forked meanwhile has the descriptor, too, and would
            # keep the lock until it ends.
            fcntl.flock(fd, fcntl.LOCK_UN)

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
        """Return the number last stored under this lock; 0 before the first one."""
        if self._fd is None:
            return 0
        raw = os.pread(self._fd, 24, 0).strip()
        return int(raw) if raw.isdigit() else 0

    def store(self, number: int) -> None:
        """Store a number of up to 24 digits for the next holder. It is not fsynced."""
        if self._fd is not None:
            os.pwrite(self._fd, b"%024d" % number, 0)


_CHUNK = 1 << 30
_PIECES = 512  # of one call; systems take 1,024 at most
MISSING = {errno.ENOENT, errno.ENOTDIR}  # errors that mean: no such file

_CANNOT_WRITE = MISSING | {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
"""Errors of creating a file that stay until someone changes the directory, the disk, or
permissions."""

_NO_FILE = MISSING | {errno.ELOOP}  # a link to itself leads to no file either
_BAD_NAME = {errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL}
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}

_LONGEST_STEP_NS = 10**9
_last_stamp_ns = 0


def version_of(status: os.stat_result) -> str:
    """Return the version of a file, from one ``fstat`` of it."""
    return f"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"


def stat_file(path: str) -> os.stat_result | None:
    """Return the status of a regular file; None if no such file has this name."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def is_directory(path: str) -> bool:
    """Look for a directory.

    Args:
        path: The name of the directory.

    Returns:
        Whether there is a directory of this name.

    Raises:
        OSError: This is not known. ``os.path.isdir`` would return False, and one ``ESTALE`` must
            not look like a missing directory (failure F4).
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def stamp_later(fd: int, path: str, previous_ns: int) -> int:
    """Give an open new file a modification time later than that of the file before.

    The kernel's time stamps advance in steps of milliseconds, and inodes are reused, so two
    versions that were written within one step could be equal.

    Args:
        fd: The new file.
        path: Its path, for the error.
        previous_ns: The modification time of the file before, in nanoseconds.

    Returns:
        The modification time, in nanoseconds.

    Raises:
        PermanentStorageError: The file system does not keep nanoseconds.
    """
    global _last_stamp_ns
    with _stamp_lock:
        kernel_ns = os.fstat(fd).st_mtime_ns
        # Within one step, the second file gets a later stamp. A previous stamp far ahead of the
        # kernel's clock dates from before that clock was set back, and is ignored.
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
    """Return bytes ``start`` to ``end`` of an open file; fewer if the file ends earlier."""
    parts = []
    while start < end:
        part = os.pread(fd, min(end - start, _CHUNK), start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)  # joining a single part makes no copy


def read_into(fd: int, start: int, memory: memoryview) -> bool:
    """Fill the memory with a file's bytes from ``start`` on; return False if it has fewer."""
    os.lseek(fd, start, os.SEEK_SET)
    while memory:
        count = os.readv(fd, [memory[:_CHUNK]])
        if not count:
            return False
        memory = memory[count:]
    return True


def write_pieces(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces one after another, without joining them first."""
    for start in range(0, len(pieces), _PIECES):
        group = pieces[start : start + _PIECES]
        written = os.writev(fd, group)
        if written < sum(memoryview(each).nbytes for each in group):
            rest = memoryview(b"".join(group))[written:]
            while rest:
                rest = rest[os.write(fd, rest[:_CHUNK]) :]


def sync_directory(path: str) -> None:
    """Make the names in a directory survive a power cut.

    The name of a batch is durable before a manifest that names it is written, and the manifest's
    name is durable before a record is reported as durable.
    """
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


def make_directories(path: str, attempts: int = 8) -> None:
    """Do the same as ``os.makedirs``, but a power cut does not lose a directory created here."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        # A delete may prune the parent again. But below a dangling link or in /proc, a parent
        # "exists" while mkdir fails forever.
        if not attempts:
            raise
        make_directories(os.path.dirname(path))
        make_directories(path, attempts - 1)
        return
    sync_directory(os.path.dirname(path))


def unlink_quietly(path: str) -> None:
    """Remove a file if possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def storage_error(verb: str, path: str, error: OSError) -> StorageError | InvalidInput:
    """Return the library's error for one of the operating system."""
    what = f"cannot {verb} {path!r}: {error.strerror or error}"
    if error.errno in _BAD_NAME:
        return InvalidInput(f"{what}. Use a shorter or simpler name.")
    if error.errno in _TRANSIENT:
        return TransientStorageError(f"{what}. Try again.")
    fix = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = " Free some space."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = f" Give this user the right to {verb} there."
    elif error.errno == errno.EXDEV:
        fix = (
            " A store lies on one file system, or its renames are not atomic: link or mount the "
            "store's whole directory and not a part of it."
        )
    elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
        fix = " A directory cannot hold one object named like the directory of another."
    return PermanentStorageError(f"{what}.{fix}")


_DAY_NS = 24 * 3600 * 10**9


class TemporaryFiles:
    """Files that are being written in one directory and have no name in the store yet.

    The directory is on the store's file system. Otherwise renames would not be atomic.
    """

    def __init__(self, directory: str, runtime: Runtime) -> None:
        self._directory = directory
        self._runtime = runtime
        self._swept = False

    def prepare(self) -> None:
        """Create the directory if it is missing, and once remove the files of killed writers."""
        if not is_directory(self._directory):
            make_directories(self._directory)
        if self._swept:
            return
        self._swept = True
        now_ns = self.now_ms() * 1_000_000
        with os.scandir(self._directory) as entries:
            for entry in entries:
                # Another process may clean up meanwhile, and some files may belong to other users.
                with contextlib.suppress(OSError):
                    if now_ns - entry.stat(follow_symlinks=False).st_mtime_ns > _DAY_NS:
                        os.unlink(entry.path)  # No writer needs a day for one.

    def open(self, mode: int = 0o666) -> tuple[int, str]:
        """Open a new empty file for writing."""
        path = f"{self._directory}/{self._runtime.ulid()}"
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode), path

    @contextlib.contextmanager
    def written(
        self, pieces: Sequence[bytes | memoryview], mode: int = 0o666
    ) -> Iterator[tuple[int, str]]:
        """Yield descriptor and path of a durable file of these bytes, and then remove it.

        The file stays if the caller has renamed it.
        """
        fd, path = self.open(mode)
        with contextlib.ExitStack() as undo:
            undo.callback(unlink_quietly, path)
            undo.callback(os.close, fd)
            write_pieces(fd, pieces)
            # Sync before the file gets its name. After a power cut, the name could otherwise
            # belong to an empty file that was never written out.
            os.fsync(fd)
            yield fd, path

    def now_ms(self) -> int:
        """Read the clock that stamps the files.

        On NFS it is the server's clock (failure F6). If nothing can be written, the runtime's clock
        is used.

        Returns:
            Milliseconds since the Unix epoch.

        Raises:
            OSError: Any other fault. A passing fault must not switch between two machines' clocks.
        """
        try:
            fd, path = self.open()
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise
            return self._runtime.now_ms()
        try:
            return os.fstat(fd).st_mtime_ns // 1_000_000
        finally:
            os.close(fd)
            os.unlink(path)


RESERVED = ".opendata-buffer"
"""Directories with lock files and, below the root, unfinished files; not part of the store."""

_LONGEST_NAME = 255


def directory_of(prefix: str) -> str | None:
    """Return the directory with all keys of a prefix; None if no key can start this way."""
    directory, _, _ = prefix.rpartition("/")
    parts = directory.split("/")
    outside = directory and any(part in ("", ".", "..") for part in parts)
    if outside or RESERVED in parts or "\0" in prefix or not _is_text(prefix):
        return None
    return directory


def files_below(
    root: str, directory: str, prefix: str, start_after: str = ""
) -> Iterator[ObjectInfo]:
    """Yield the files below a directory of the root whose keys fit, in the order of their keys."""
    above = f"{directory}/" if directory else ""
    rest = prefix.removeprefix(above) if prefix.startswith(above) else ""
    try:
        with os.scandir(f"{root}/{directory}") as entries:
            names = {}
            for entry in entries:
                # A directory may hold 100,000 batches when only one of them is asked for, so look
                # at the names before anything else.
                if not (entry.name.startswith(rest) or rest.startswith(f"{entry.name}/")):
                    continue
                if entry.name != RESERVED and _is_text(entry.name):
                    # The slash sorts a directory like the keys below it: a-b comes before a/b.
                    end = "/" if entry.is_dir(follow_symlinks=False) else ""
                    names[f"{above}{entry.name}{end}"] = entry
    except OSError as error:
        if error.errno in MISSING:
            return  # pruned meanwhile, or nothing written yet
        raise
    for name, entry in sorted(names.items(), key=itemgetter(0)):
        if name.endswith("/"):
            if name > start_after or start_after.startswith(name):
                yield from files_below(root, name[:-1], prefix, start_after)
        elif name.startswith(prefix) and name > start_after:
            try:
                status = entry.stat()
            except OSError as error:
                if error.errno in _NO_FILE:
                    continue  # deleted since it was listed, or a link that leads nowhere
                raise  # left out, an object that is there would look deleted
            if stat.S_ISREG(status.st_mode):
                yield ObjectInfo(name, status.st_size, status.st_mtime_ns // 1_000_000)


def _file_at(root: str, key: str) -> ObjectInfo | None:
    """Return the object with exactly this key; None if there is none."""
    try:
        # The system reads a//b like a/b, but no key starts with a slash.
        status = None if key.startswith("/") else stat_file(f"{root}/{key}")
    except OSError:
        return None  # such as a name that is too long: listing its directory says what is there
    if status is None:
        return None
    return ObjectInfo(key, status.st_size, status.st_mtime_ns // 1_000_000)


def _is_text(name: str) -> bool:
    """Return whether a name is UTF-8, as every key is."""
    return name.isascii() or name == name.encode(errors="ignore").decode()


class LocalStore:
    """A directory whose files are the objects, under their raw names.

    An object is written to a temporary file, fsynced, and renamed over its name, so ``kill -9`` at
    any moment leaves the old or the new bytes. Conditional writes rename under an exclusive lock on
    a file next to the object, so that stores with another root use the same lock. A process that is
    suspended while it holds the lock stops the others until it continues or dies. Readers take no
    lock. A version consists of modification time, inode, and size of the file whose bytes are read.
    Every conditional write makes the time strictly later, so a version never returns (failure F11).

    The first write creates the directory. ``.opendata-buffer`` in it and below belongs to the
    store.

    Args:
        root: The directory.
        runtime: Clock and sleep. Default: those of the system.

    Raises:
        InvalidInput: The directory is the root of the file system, or a Databricks mount.
    """

    def __init__(self, root: Path | str, *, runtime: Runtime | None = None) -> None:
        self.root = os.path.abspath(root)
        if self.root.strip("/") == "":
            raise InvalidInput(
                f"store {self.root!r} is the root of the file system: use a directory"
            )
        for path in (self.root, os.path.realpath(root)):
            top = path.split("/")[1]
            if top == "dbfs" or (top == "Volumes" and sys.platform != "darwin"):
                raise InvalidInput(
                    f"store {self.root!r} is a Databricks mount, which has no file locks and no "
                    "atomic rename: two writers would overwrite each other. Use the s3:// URL of "
                    "the volume's external location instead."
                )
        self._reserved = f"{self.root}/{RESERVED}"
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._temporary = TemporaryFiles(f"{self._reserved}/tmp", self._runtime)
        self._checked = False

    @property
    def url(self) -> str:
        """``file://`` and the directory."""
        return Path(self.root).as_uri()

    def file_of(self, key: str) -> str:
        """Return the path of an object's file.

        Args:
            key: The object's key.

        Returns:
            The path.

        Raises:
            InvalidInput: No file can have this name, or the store uses the name itself.
        """
        check_key("key", key)
        segments = key.split("/")
        if RESERVED in segments:
            raise InvalidInput(
                f"key {key!r} lies in {RESERVED!r}, where the store keeps its own files: "
                "use another name"
            )
        for segment in segments:
            if len(segment.encode()) > _LONGEST_NAME:
                raise InvalidInput(
                    f"key {key!r} has a part of {len(segment.encode())} bytes between slashes: "
                    f"file names have at most {_LONGEST_NAME}, use shorter parts"
                )
        return f"{self.root}/{key}"

    def lock_of(self, key: str) -> str:
        """Return an object's lock file, where stores with another root also find it."""
        # Hash the name, because it may already have the greatest length of a file name.
        directory, _, name = f"{self.root}/{key}".rpartition("/")
        return f"{directory}/{RESERVED}/{hashlib.sha256(name.encode()).hexdigest()[:32]}"

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | None:
        """See :meth:`opendata_buffer.stores.base.Get.get`."""
        if byte_range is not None:
            check_range(byte_range)
        with self._opened(key) as (fd, status):
            version = version_of(status)
            if version == if_changed:
                return None
            start, end = cut(byte_range, status.st_size)
            check_size(key, end - start, max_bytes)
            data = read_range(fd, start, end)
            if len(data) != end - start:
                raise self._was_cut(key)
        return Blob(data, version, status.st_mtime_ns // 1_000_000)

    def get_into(
        self, key: str, allocate: Allocate, start: int = 0, *, max_bytes: int | None = None
    ) -> None:
        """See :meth:`opendata_buffer.stores.base.ZeroCopy.get_into`."""
        with self._opened(key) as (fd, status):
            check_size(key, status.st_size, max_bytes)
            if not read_into(fd, start, allocate(status.st_size)):
                raise self._was_cut(key)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        """Open a regular file for reading."""
        path = self.file_of(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectNotFound(key, self.url)
                yield fd, status
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in MISSING:
                raise ObjectNotFound(key, self.url) from None
            raise storage_error("read", path, error) from error

    def _was_cut(self, key: str) -> TransientStorageError:
        return TransientStorageError(
            f"file {self.file_of(key)!r} was cut to fewer bytes while it was read: it is "
            "written by something else than this library"
        )

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.base.Put.put`."""
        self.put_pieces(key, (data,))

    def put_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See :meth:`opendata_buffer.stores.base.ZeroCopy.put_pieces`."""
        path = self.file_of(key)
        try:
            self._temporary.prepare()
            with self._temporary.written(pieces) as (fd, temporary):
                # A key that is also written by put_if has a lock file; batches have none.
                with FileLock(self.lock_of(key), self._runtime, create=False) as lock:
                    self._rename(fd, temporary, path, lock)
                sync_directory(os.path.dirname(path))
        except OSError as error:
            raise storage_error("write", path, error) from error

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.put_if`."""
        path = self.file_of(key)
        begun, new = False, ""
        try:
            if version is not None and not is_directory(os.path.dirname(path)):
                return outcomes.Vanished()
            self._temporary.prepare()
            lock_path = self.lock_of(key)
            if not is_directory(os.path.dirname(lock_path)):
                make_directories(os.path.dirname(lock_path))
            # A writer that has already lost its race writes nothing. Otherwise it writes everything
            # before it takes the lock, because a process suspended with the lock stops the others.
            if (refused := _refusal(path, version)) is not None:
                return refused
            with self._temporary.written((data,), self._mode(key)) as (fd, temporary):
                with FileLock(lock_path, self._runtime) as lock:
                    if (refused := _refusal(path, version)) is not None:
                        return refused
                    begun = True
                    new = self._rename(fd, temporary, path, lock)
                sync_directory(os.path.dirname(path))
            return outcomes.Applied(new)
        except OSError as error:
            mapped = storage_error("write", path, error)
            if new:
                return outcomes.Unknown(
                    f"file {path!r} was replaced, and it failed after that: {mapped}"
                )
            # Across a network, the answer to a rename may be lost.
            if begun and (isinstance(mapped, TransientStorageError) or error.errno == errno.EIO):
                return outcomes.Unknown(f"file {path!r} may have been replaced: {mapped}")
            raise mapped from error

    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        """Check that the file system has locks and keeps modification times to the nanosecond.

        See :meth:`opendata_buffer.stores.base.ConditionalPut.check_conditional_writes`.
        """
        check_key("near", near)
        if self._checked:
            return None
        try:
            self._temporary.prepare()
            try:
                with FileLock(f"{self._reserved}/check", self._runtime):
                    pass
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                    raise UnsafeStore(
                        f"the file system of {self.root!r} has no file locks "
                        f"({error.strerror}): two writers would overwrite each other. Use a "
                        "local disk or an s3:// URL."
                    ) from error
                raise
            with self._temporary.written(()) as (fd, temporary):
                stamp_later(fd, temporary, os.fstat(fd).st_mtime_ns)
        except OSError as error:
            raise storage_error("write", self.root, error) from error
        self._checked = True
        return None

    def check_refusal(self, near: str) -> None:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.check_refusal`.

        A conditional write is a comparison under a lock, which needs no test.
        """
        check_key("near", near)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.base.List.list`."""
        check_limit(limit)
        directory = directory_of(prefix)
        root = self.root
        try:
            now_ms = self._temporary.now_ms()
            if directory is None:
                return Listing((), now_ms)
            if limit == 1 and not start_after and (first := _file_at(root, prefix)) is not None:
                # A caller asks for one object. Looking through 50,000 names takes 30 ms.
                return Listing((first,), now_ms, truncated=True)
            found = files_below(root, directory, prefix, start_after)
            objects = tuple(islice(found, limit))
            return Listing(objects, now_ms, truncated=next(found, None) is not None)
        except OSError as error:
            raise storage_error("list", f"{root}/{directory or ''}", error) from error

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.base.Delete.delete_many`."""
        failures = []
        for key in keys:
            try:
                self._delete(self.file_of(key), self.lock_of(key))
            except (InvalidInput, StorageError) as error:
                failures.append(DeleteFailure(key, str(error)))
            except OSError as error:
                failures.append(DeleteFailure(key, str(storage_error("delete", key, error))))
        return tuple(failures)

    def _mode(self, key: str) -> int:
        """Return the permissions of a new file, before the umask.

        The broker's record is for the owner, and for a group that may write in the store as well.
        """
        if key.rpartition("/")[2] != BROKER_RECORD_NAME:
            return 0o666
        return 0o660 if os.stat(self.root).st_mode & 0o020 else 0o600

    def _rename(self, fd: int, temporary: str, path: str, lock: FileLock) -> str:
        """Give a file its name, under its key's lock if it has one, and return its version."""
        previous = stat_file(path)
        # The stamp is not fsynced: after a power cut no process remembers the version, and the
        # kernel's own stamp, which may return, was never a version. The lock file remembers the
        # time too: after a delete the file does not.
        previous_ns = max(previous.st_mtime_ns if previous else 0, lock.load())
        lock.store(stamp_later(fd, temporary, previous_ns))
        version = version_of(os.fstat(fd))
        for attempt in range(100):
            try:
                os.replace(temporary, path)
                return version
            except FileNotFoundError:
                # The directory is new, or a delete in another process just pruned it.
                make_directories(os.path.dirname(path))
            except IsADirectoryError:
                if attempt:
                    raise
                os.rmdir(path)  # left empty by a delete; else it raises ENOTEMPTY
        os.replace(temporary, path)
        return version

    def _delete(self, path: str, lock_path: str) -> None:
        with FileLock(lock_path, self._runtime, create=False):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return  # no object of this name
        parent = os.path.dirname(path)
        while parent != self.root:
            try:
                os.rmdir(parent)
            except OSError:
                return  # not empty
            parent = os.path.dirname(parent)


def _refusal(path: str, version: str | None) -> outcomes.Vanished | outcomes.LostRace | None:
    """Return why a conditional write cannot be made, by the file as it is now; None if it can."""
    found = stat_file(path)
    if found is None:
        return None if version is None else outcomes.Vanished()
    return None if version_of(found) == version else outcomes.LostRace()
