"""Where the local store keeps what: the files of objects, locks and writes below its root.

Pure but for the links that a root is made of, which are followed once.
"""

from __future__ import annotations

import hashlib
import os
import sys

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import check_key

__all__ = ["RESERVED", "LocalPaths"]

RESERVED = ".opendata-buffer"
"""Directories with lock files, and below the root files being written; no part of the store."""

_LONGEST_NAME = 255


class LocalPaths:
    """The paths of one root.

    Args:
        root: The store's directory.

    Raises:
        InvalidInput: The root of the file system; or a Databricks mount, which has neither locks
            nor atomic renames.
    """

    def __init__(self, root: os.PathLike[str] | str) -> None:
        self.root = os.path.abspath(root)
        _refuse_unsafe_roots(self.root)
        self.temporary = f"{self.root}/{RESERVED}/tmp"
        """The directory of files that have no name in the store yet."""
        self.check = f"{self.root}/{RESERVED}/check"
        """Locked once, to see whether the file system has locks."""

    def object(self, key: str) -> str:
        """The file of an object.

        Raises:
            InvalidInput: No file can have this name, or it is one of the store's own.
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
