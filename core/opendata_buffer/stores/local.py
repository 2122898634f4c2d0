"""Objects as files below a directory, safe between processes on one machine (failure F13)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.keys import check_key
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores import (
    Absent,
    Applied,
    Blob,
    DeleteFailure,
    IfVersion,
    Listing,
    NotModified,
    PutOutcome,
    Unknown,
    Vanished,
    VersionConflict,
)
from opendata_buffer.stores.file_lock import FileLock, LockTimeout
from opendata_buffer.stores.files import (
    MISSING,
    make_directories,
    read_into,
    read_range,
    stamp_later,
    stat_file,
    storage_error,
    sync_directory,
    version_of,
)
from opendata_buffer.stores.local_listing import directory_of, files_below
from opendata_buffer.stores.local_paths import LocalPaths
from opendata_buffer.stores.local_temporary import TemporaryFile, TemporaryFiles
from opendata_buffer.stores.mounts import is_on_this_machine
from opendata_buffer.stores.ranges import check_limit, check_range, check_size, cut

__all__ = ["LocalStore"]


class LocalStore:
    """A directory whose files are the objects, under their raw names.

    An object is written to a temporary file, fsynced, and renamed over its name, so kill -9 at
    any moment leaves the old or the new bytes. Conditional writes rename under an exclusive lock
    on a file of their key's own, beside the object: stores with another root that hold the same
    file lock the same one. The kernel frees the lock of a process that dies; one that is suspended
    in the instant it holds it stops the others until it goes on or dies. Readers take no lock: the
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
        return is_on_this_machine(self._paths.root)

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
            with self._temporary.written(pieces) as temporary:
                # A key that is also written by put_if has a lock file; batches have none.
                with FileLock(self._paths.lock(key), self._runtime, create=False) as lock:
                    self._rename(temporary, path, lock)
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
                return Vanished()
            self._temporary.prepare()
            lock_path = self._paths.lock(key)
            if not os.path.isdir(os.path.dirname(lock_path)):
                make_directories(os.path.dirname(lock_path))
            # Who lost its race already writes nothing. Who has not, writes everything before it
            # takes the lock: a process that is suspended in there stops all the others.
            if (refused := _refusal(path, condition)) is not None:
                return refused
            with self._temporary.written((data,)) as temporary:
                with FileLock(lock_path, self._runtime) as lock:
                    if (refused := _refusal(path, condition)) is not None:
                        return refused
                    begun = True
                    version = self._rename(temporary, path, lock)
                _sync_name(path)
            return Applied(version)
        except LockTimeout:
            raise TransientStorageError(_stuck_lock(self._paths.lock(key))) from None
        except OSError as error:
            mapped = storage_error("write", path, error)
            if version:
                return Unknown(f"file {path!r} was replaced, and it failed after that: {mapped}")
            # Of a rename across a network the answer may be lost.
            if begun and (isinstance(mapped, TransientStorageError) or error.errno == errno.EIO):
                return Unknown(f"file {path!r} may have been replaced: {mapped}")
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

    def _rename(self, temporary: TemporaryFile, path: str, lock: FileLock) -> str:
        """Give a written file its name; returns its version. Under the key's lock, if it has one.

        The stamp is not fsynced: after a power cut nobody remembers the version, and the kernel's
        own stamp, which may be back, was nobody's.
        """
        previous = stat_file(path)
        # The lock file remembers the time too: after a delete the file does not.
        floor_ns = max(previous.st_mtime_ns if previous else 0, lock.load())
        lock.store(stamp_later(temporary.fd, temporary.path, floor_ns))
        version = version_of(os.fstat(temporary.fd))
        for attempt in range(100):
            try:
                os.replace(temporary.path, path)
                break
            except FileNotFoundError:
                # The directory is new, or a delete in another process just pruned it.
                make_directories(os.path.dirname(path))
            except IsADirectoryError:
                if attempt:
                    raise
                os.rmdir(path)  # left empty by a delete; otherwise ENOTEMPTY says so
        else:
            os.replace(temporary.path, path)
        temporary.renamed = True
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
    # Guards the name. rename() is atomic for who looks at the directory, but durable only once
    # that was fsynced, as fsync(2) says of entries, and POSIX promises no order between two of
    # them, nor between a name here and a file there. So that of a batch is durable before a
    # manifest is written that has it, and that of the manifest before anybody is told that a
    # record is durable: with the bytes of both, four fsyncs for a batch, of which none
    # can be left out or made one with another.
    sync_directory(os.path.dirname(path))


def _refusal(path: str, condition: Absent | IfVersion) -> Vanished | VersionConflict | None:
    """Why a conditional write cannot be, by the file as it is now."""
    found = stat_file(path)
    if isinstance(condition, IfVersion):
        if found is None:
            return Vanished()
        return None if version_of(found) == condition.version else VersionConflict()
    return None if found is None else VersionConflict()


def _stuck_lock(path: str) -> str:
    return (
        f"another process holds the lock {path!r}: it may be stopped (find it with lsof or fuser)"
    )
