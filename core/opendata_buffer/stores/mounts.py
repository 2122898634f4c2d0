"""Which directories lie on this machine, and which across a network."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

__all__ = ["is_on_this_machine", "kinds_of"]

_MOUNTS = Path("/proc/self/mountinfo")

_HERE = frozenset(
    {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
)
"""Kinds of file system that read from memory or from a disk. Any other may ask a server."""


def is_on_this_machine(path: str) -> bool:
    """Whether a directory is known to lie on this machine; false where nobody can tell."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return False
    return _kind_of(device) in _HERE


def kinds_of(mounts: str) -> dict[tuple[int, int], str]:
    """The kinds of file systems, by major and minor number, of Linux's ``mountinfo``.

    A line is ``36 35 98:0 /root /mount options - ext4 /dev/sda options``, with none to several
    fields between the options and the hyphen; spaces within names are written as ``\\040``.
    """
    kinds: dict[tuple[int, int], str] = {}
    for line in mounts.splitlines():
        mount, _, system = line.partition(" - ")
        with suppress(ValueError, IndexError):  # a line of another kind tells nothing
            major, minor = mount.split()[2].split(":")
            kinds[int(major), int(minor)] = system.split()[0]
    return kinds


@lru_cache(maxsize=64)
def _kind_of(device: int) -> str | None:
    try:
        mounts = _MOUNTS.read_text(errors="replace")
    except OSError:
        return None  # not Linux, or nothing is mounted at /proc
    return kinds_of(mounts).get((os.major(device), os.minor(device)))
