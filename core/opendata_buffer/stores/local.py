"""Objects as files below a directory, safe between processes on one machine (failure F13)."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path

from opendata_buffer import outcomes
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.keys import check_key
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    DeleteFailure,
    IfVersion,
    Listing,
    NotModified,
    ObjectInfo,
    PutOutcome,
    check_limit,
    check_range,
    check_size,
    cut,
)
from opendata_buffer.stores.local_files import (
    MISSING,
    FileLock,
    LockTimeout,
    make_directories,
    read_into,
    read_range,
    stamp_later,
    stat_file,
    storage_error,
    sync_directory,
    unlink_quietly,
    version_of,
    write_all,
    write_pieces,
)

_DAY_NS = 24 * 3600 * 10**9


class TemporaryFiles:
    """Files that are written and have no name in the store yet.

    They lie on the file system of the store, or renames would not be atomic.
    """

    def __init__(self, directory: str, runtime: Runtime) -> None:
        self._directory = directory
        self._runtime = runtime
        self._swept = False

    def prepare(self) -> None:
        """Make the directory if it is missing, and once remove what killed writers left in it."""
        if not os.path.isdir(self._directory):
            make_directories(self._directory)
        if not self._swept:
            self._swept = True
            self._sweep()

    def open(self) -> tuple[int, str]:
        """A new empty file, open for writing; the caller closes it and removes or renames it."""
        path = f"{self._directory}/{self._runtime.ulid()}"
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666), path

    @contextmanager
    def written(self, pieces: Sequence[bytes | memoryview]) -> Iterator[tuple[int, str]]:
        """A file of these bytes, durable, as its descriptor and its path; removed at the end
        unless it was renamed."""
        fd, path = self.open()
        try:
            try:
                if len(pieces) == 1:
                    write_all(fd, pieces[0])
                else:
                    write_pieces(fd, pieces)
                # Before the file has its name: after a power cut a name may be there whose file
                # was never written out, as an empty one. fdatasync() would save nothing: of a new
                # file the length and the blocks are needed to read it back.
                os.fsync(fd)
                yield fd, path
            finally:
                os.close(fd)
        finally:
            unlink_quietly(path)

    def now_ms(self) -> int:
        """The time by the file system's clock, milliseconds since the Unix epoch.

        That clock stamps the files, and on NFS it is the server's: ages must be differences of
        one clock (failure F6). Where nothing can be written, it is the runtime's.
        """
        try:
            fd, path = self.open()
        except OSError:
            return self._runtime.now_ms()
        try:
            return os.fstat(fd).st_mtime_ns // 1_000_000
        finally:
            os.close(fd)
            os.unlink(path)

    def _sweep(self) -> None:
        """Remove files older than a day: no writer needs so long for one."""
        now_ns = self.now_ms() * 1_000_000
        with os.scandir(self._directory) as entries:
            for entry in entries:
                try:
                    if now_ns - entry.stat(follow_symlinks=False).st_mtime_ns > _DAY_NS:
                        os.unlink(entry.path)
                except OSError:
                    continue  # swept by another process meanwhile, or not ours to remove


RESERVED = ".opendata-buffer"
"""Directories with lock files, and below the root files being written; no part of the store."""

_LONGEST_NAME = 255


class LocalPaths:
    """The files of objects, locks and writes below one root.

    The root of the file system is refused, and a Databricks mount, which has neither locks nor
    atomic renames.
    """

    def __init__(self, root: os.PathLike[str] | str) -> None:
        self.root = os.path.abspath(root)
        _refuse_unsafe_roots(self.root)
        self.temporary = f"{self.root}/{RESERVED}/tmp"
        """The directory of files that have no name in the store yet."""
        self.check = f"{self.root}/{RESERVED}/check"
        """Locked once, to see whether the file system has locks."""

    def object(self, key: str) -> str:
        """The file of an object; refused if no file can have this name, or the store's own has."""
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

    def lock(self, key: str) -> str:
        """The lock file of an object: beside it, so that stores with another root find it, too."""
        # Hashed, because a name may be as long as file names get.
        directory, _, name = f"{self.root}/{key}".rpartition("/")
        return f"{directory}/{RESERVED}/{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _refuse_unsafe_roots(root: str) -> None:
    if root.strip("/") == "":
        raise InvalidInput(f"store {root!r} is the root of the file system: use a directory")
    for path in (root, os.path.realpath(root)):
        top = path.split("/")[1]
        if top == "dbfs" or (top == "Volumes" and sys.platform != "darwin"):
            raise InvalidInput(
                f"store {root!r} is a Databricks mount, which has no file locks and no atomic "
                "rename: two writers would overwrite each other. Use the s3:// URL of the "
                "volume's external location instead."
            )


def directory_of(prefix: str) -> str | None:
    """The directory below which all keys with a prefix lie; None when no key starts so."""
    directory, _, _ = prefix.rpartition("/")
    parts = directory.split("/")
    outside = directory and any(part in ("", ".", "..") for part in parts)
    if outside or RESERVED in parts or "\0" in prefix or not _is_text(prefix):
        return None
    return directory


def files_below(
    root: str, directory: str, prefix: str, start_after: str = ""
) -> Iterator[ObjectInfo]:
    """The files below a directory whose key fits, in the order of their keys.

    ``directory`` is relative to the root: :func:`directory_of` the prefix.
    """
    try:
        with os.scandir(f"{root}/{directory}") as entries:
            # By the key alone: pairs compare their first parts twice.
            names = sorted(_names(directory, entries), key=itemgetter(0))
    except OSError as error:
        if error.errno in MISSING:
            return  # pruned meanwhile, or nothing written yet
        raise
    for name, entry in names:
        if name.endswith("/"):
            wanted = name.startswith(prefix) or prefix.startswith(name)
            if wanted and (name > start_after or start_after.startswith(name)):
                yield from files_below(root, name[:-1], prefix, start_after)
        elif name.startswith(prefix) and name > start_after:
            info = _info(entry, name)
            if info is not None:
                yield info


def _names(
    directory: str, entries: Iterable[os.DirEntry[str]]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Keys of a directory's files, and of its directories with a slash at the end.

    The slash puts a directory where the keys below it belong: ``a-b`` comes before ``a/b``.
    """
    above = f"{directory}/" if directory else ""
    for entry in entries:
        name = entry.name
        if name != RESERVED and _is_text(name):
            end = "/" if entry.is_dir(follow_symlinks=False) else ""
            yield f"{above}{name}{end}", entry


def _info(entry: os.DirEntry[str], key: str) -> ObjectInfo | None:
    try:
        status = entry.stat()
    except OSError:
        return None  # deleted since it was listed
    if not stat.S_ISREG(status.st_mode):
        return None
    return ObjectInfo(key, status.st_size, status.st_mtime_ns // 1_000_000)


def _is_text(name: str) -> bool:
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False  # bytes that are not UTF-8: no key of ours
    return True


class LocalStore:
    """A directory whose files are the objects, under their raw names.

    An object is written to a temporary file, fsynced, and renamed over its name, so kill -9 at
    any moment leaves the old or the new bytes. Conditional writes rename under an exclusive lock
    on a file of their key's own, beside the object: stores with another root that hold the same
    file lock the same one. The kernel frees the lock of a process that dies; one that is suspended
    while it holds it stops the others until it continues or dies. Readers take no lock: the
    version is read from the same open file as the bytes, and is made of its modification time,
    inode and size; every conditional write makes the time strictly later, so a version never
    comes back (failure F11).

    The directory is made by the first write. ``.opendata-buffer`` in it and below is the store's
    own.

    Args:
        root: Absolute path of the directory.
        runtime: Waiting for locks, names of temporary files.

    Raises:
        InvalidInput: A Databricks mount, which has neither locks nor atomic renames.
    """

    def __init__(self, root: Path | str, *, runtime: Runtime | None = None) -> None:
        self._paths = LocalPaths(root)
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._temporary = TemporaryFiles(self._paths.temporary, self._runtime)
        self._checked = False

    @property
    def url(self) -> str:
        """``file://`` and the directory."""
        return Path(self._paths.root).as_uri()

    @property
    def is_near(self) -> bool:
        """See :attr:`opendata_buffer.stores.Near.is_near`."""
        return True

    def __repr__(self) -> str:
        return f"LocalStore({self._paths.root!r})"

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | NotModified:
        """See :meth:`opendata_buffer.stores.Get.get`."""
        check_range(byte_range)
        with self._opened(key) as (fd, status):
            version = version_of(status)
            if version == if_changed:
                return NotModified()
            start, end = cut(byte_range, status.st_size)
            check_size(key, end - start, max_bytes)
            data = read_range(fd, start, end)
            if len(data) != end - start:
                raise self._was_cut(key)
        return Blob(data, version, status.st_mtime_ns // 1_000_000)

    def get_into(
        self, key: str, allocate: Callable[[int], memoryview], *, max_bytes: int | None = None
    ) -> None:
        """See :meth:`opendata_buffer.stores.GetInto.get_into`."""
        with self._opened(key) as (fd, status):
            check_size(key, status.st_size, max_bytes)
            if not read_into(fd, allocate(status.st_size)):
                raise self._was_cut(key)

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        """A regular file, open for reading."""
        path = self._paths.object(key)
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
            f"file {self._paths.object(key)!r} was cut to fewer bytes while it was read: it is "
            "written by something else than this library"
        )

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        self.put_pieces(key, (data,))

    def put_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        """See :meth:`opendata_buffer.stores.PutPieces.put_pieces`."""
        path = self._paths.object(key)
        try:
            self._temporary.prepare()
            with self._temporary.written(pieces) as (fd, temporary):
                # A key that is also written by put_if has a lock file; batches have none.
                with FileLock(self._paths.lock(key), self._runtime, create=False) as lock:
                    self._rename(fd, temporary, path, lock)
                _sync_name(path)
        except LockTimeout:
            raise TransientStorageError(_stuck_lock(self._paths.lock(key))) from None
        except OSError as error:
            raise storage_error("write", path, error) from error

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.ConditionalPut.put_if`."""
        path = self._paths.object(key)
        begun, version = False, ""
        try:
            if isinstance(condition, IfVersion) and not os.path.isdir(os.path.dirname(path)):
                return outcomes.Vanished()
            self._temporary.prepare()
            lock_path = self._paths.lock(key)
            if not os.path.isdir(os.path.dirname(lock_path)):
                make_directories(os.path.dirname(lock_path))
            # A writer that has lost its race already writes nothing. Otherwise all is written
            # before the lock is taken: a process that is suspended while it holds it stops all
            # others.
            if (refused := _refusal(path, condition)) is not None:
                return refused
            with self._temporary.written((data,)) as (fd, temporary):
                with FileLock(lock_path, self._runtime) as lock:
                    if (refused := _refusal(path, condition)) is not None:
                        return refused
                    begun = True
                    version = self._rename(fd, temporary, path, lock)
                _sync_name(path)
            return outcomes.Applied(version)
        except LockTimeout:
            raise TransientStorageError(_stuck_lock(self._paths.lock(key))) from None
        except OSError as error:
            mapped = storage_error("write", path, error)
            if version:
                return outcomes.Unknown(
                    f"file {path!r} was replaced, and it failed after that: {mapped}"
                )
            # Of a rename across a network the answer may be lost.
            if begun and (isinstance(mapped, TransientStorageError) or error.errno == errno.EIO):
                return outcomes.Unknown(f"file {path!r} may have been replaced: {mapped}")
            raise mapped from error

    def check_conditional_writes(self, near: str) -> None:
        """Make sure the file system has locks and keeps modification times to the nanosecond.

        See :meth:`opendata_buffer.stores.ConditionalPut.check_conditional_writes`.
        """
        check_key("near", near)
        if self._checked:
            return
        path = self._paths.check
        try:
            self._temporary.prepare()
            try:
                with FileLock(path, self._runtime):
                    pass
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                    raise UnsafeStore(
                        f"the file system of {self._paths.root!r} has no file locks "
                        f"({error.strerror}): two writers would overwrite each other. Use a "
                        "local disk or an s3:// URL."
                    ) from error
                raise
            fd, temporary = self._temporary.open()
            try:
                stamp_later(fd, temporary, os.fstat(fd).st_mtime_ns)
            finally:
                os.close(fd)
                os.unlink(temporary)
        except LockTimeout:
            raise TransientStorageError(_stuck_lock(path)) from None
        except OSError as error:
            raise storage_error("write", self._paths.root, error) from error
        self._checked = True

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`."""
        check_limit(limit)
        now_ms = self._temporary.now_ms()
        directory = directory_of(prefix)
        if directory is None:
            return Listing((), now_ms)
        root = self._paths.root
        try:
            found = files_below(root, directory, prefix, start_after)
            objects = tuple(islice(found, limit))
            return Listing(objects, now_ms, truncated=next(found, None) is not None)
        except OSError as error:
            raise storage_error("list", f"{root}/{directory}", error) from error

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.Delete.delete_many`."""
        failures = []
        for key in keys:
            try:
                self._delete(self._paths.object(key), self._paths.lock(key))
            except (InvalidInput, StorageError) as error:
                failures.append(DeleteFailure(key, str(error)))
            except LockTimeout:
                failures.append(DeleteFailure(key, _stuck_lock(self._paths.lock(key))))
            except OSError as error:
                failures.append(DeleteFailure(key, str(storage_error("delete", key, error))))
        return tuple(failures)

    def _rename(self, fd: int, temporary: str, path: str, lock: FileLock) -> str:
        """Give a written file its name; returns its version. Under the key's lock, if it has one.

        The stamp is not fsynced: after a power cut no process remembers the version, and the
        kernel's own stamp, which may be back, was never a version.
        """
        previous = stat_file(path)
        # The lock file remembers the time too: after a delete the file does not.
        previous_ns = max(previous.st_mtime_ns if previous else 0, lock.load())
        lock.store(stamp_later(fd, temporary, previous_ns))
        version = version_of(os.fstat(fd))
        for attempt in range(100):
            try:
                os.replace(temporary, path)
                break
            except FileNotFoundError:
                # The directory is new, or a delete in another process just pruned it.
                make_directories(os.path.dirname(path))
            except IsADirectoryError:
                if attempt:
                    raise
                os.rmdir(path)  # left empty by a delete; otherwise ENOTEMPTY says so
        else:
            os.replace(temporary, path)
        return version

    def _delete(self, path: str, lock_path: str) -> None:
        with FileLock(lock_path, self._runtime, create=False):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            except (NotADirectoryError, IsADirectoryError):
                return  # no object of this name
        parent = os.path.dirname(path)
        while parent != self._paths.root:
            try:
                os.rmdir(parent)
            except OSError:
                return  # not empty
            parent = os.path.dirname(parent)


def _sync_name(path: str) -> None:
    """Make a new name durable.

    A rename is atomic for readers of the directory, but durable only after an fsync of it, and
    POSIX promises no order between two of them. So a batch's name is durable before a manifest is
    written that names it, and the manifest's before a record is reported as durable.
    """
    sync_directory(os.path.dirname(path))


def _refusal(
    path: str, condition: Absent | IfVersion
) -> outcomes.Vanished | outcomes.Conflict | None:
    """Why a conditional write cannot be, by the file as it is now."""
    found = stat_file(path)
    if isinstance(condition, IfVersion):
        if found is None:
            return outcomes.Vanished()
        return None if version_of(found) == condition.version else outcomes.Conflict()
    return None if found is None else outcomes.Conflict()


def _stuck_lock(path: str) -> str:
    return (
        f"another process holds the lock {path!r}: it may be stopped (find it with lsof or fuser)"
    )
