"""Files that are written and have no name in the store yet, in a directory of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.files import (
    make_directories,
    unlink_quietly,
    write_all,
    write_pieces,
)

__all__ = ["TemporaryFile", "TemporaryFiles"]

_DAY_NS = 24 * 3600 * 10**9


@dataclass(slots=True)
class TemporaryFile:
    """One of them.

    Attributes:
        fd: Open for writing.
        path: Its name for now.
        renamed: Whether it has got its name in the store.
    """

    fd: int
    path: str
    renamed: bool = False


class TemporaryFiles:
    """The temporary files of one store.

    Args:
        directory: Where they lie; on the file system of the store, or renames are not atomic.
        runtime: Their names; the clock where the directory has none.
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
    def written(self, pieces: Sequence[bytes | memoryview]) -> Iterator[TemporaryFile]:
        """A file of these bytes, durable; removed at the end unless it was renamed."""
        fd, path = self.open()
        file = TemporaryFile(fd, path)
        try:
            try:
                if len(pieces) == 1:
                    write_all(fd, pieces[0])
                else:
                    write_pieces(fd, pieces)
                # Guards the bytes, before they have their name: after a power cut a name may be
                # there whose file was never written out, as an empty one. POSIX's fsync() says
                # that what it returned for can be read back, of this file and of no other.
                # fdatasync() would do as well and save nothing: of a new file the length and the
                # blocks are needed to read it back.
                os.fsync(fd)
                yield file
            finally:
                os.close(fd)
        finally:
            if not file.renamed:
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
        """Remove what is older than a day: nobody writes one file for so long."""
        now_ns = self.now_ms() * 1_000_000
        with os.scandir(self._directory) as entries:
            for entry in entries:
                try:
                    if now_ns - entry.stat(follow_symlinks=False).st_mtime_ns > _DAY_NS:
                        os.unlink(entry.path)
                except OSError:
                    continue  # swept by another process meanwhile, or not ours to remove
