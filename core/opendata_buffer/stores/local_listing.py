"""The files below a directory as a store lists its objects: by prefix, in the order of keys."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from operator import itemgetter

from opendata_buffer.stores import ObjectInfo
from opendata_buffer.stores.files import MISSING
from opendata_buffer.stores.local_paths import RESERVED

__all__ = ["directory_of", "files_below"]


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

    Args:
        root: The store's directory; keys are relative to it.
        directory: Where to begin, relative to it: :func:`directory_of` the prefix.
        prefix: What keys start with.
        start_after: Only keys behind this one.

    Raises:
        OSError: A directory cannot be read.
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
