"""Where a directory lies: of this machine's file systems, by what the kernel has mounted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendata_buffer.stores import local_files as mounts
from opendata_buffer.stores.local_files import is_on_this_machine, kinds_of

MOUNTS = r"""
22 1 254:1 / / rw,relatime shared:1 master:2 - ext4 /dev/vda1 rw
23 22 0:21 / /with\040space rw - nfs4 server:/export rw,vers=4.2
24 22 0:22 / /data rw,nosuid - fuse.sshfs me@server:/data rw
25 22 0:23 / /dev/shm rw - tmpfs tmpfs rw
26 22 0:24 / /wsl rw - 9p

nonsense
27 22 x:y / /odd rw - ext4 /dev/x rw
28 22 0:25 / /cut rw -
"""


def test_the_kinds_of_mounted_file_systems_are_read_whatever_fields_a_line_has() -> None:
    assert kinds_of(MOUNTS) == {
        (254, 1): "ext4",
        (0, 21): "nfs4",
        (0, 22): "fuse.sshfs",
        (0, 23): "tmpfs",
        (0, 24): "9p",
    }


@pytest.mark.parametrize(
    ("kind", "here"),
    [("ext4", True), ("overlay", True), ("nfs4", False), ("fuse.sshfs", False), ("new", False)],
)
def test_a_directory_lies_here_if_its_file_system_is_surely_a_disk_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, here: bool
) -> None:
    device = tmp_path.stat().st_dev
    table = tmp_path / "mountinfo"
    table.write_text(f"1 1 {os.major(device)}:{os.minor(device)} / / rw - {kind} x rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    mounts._kind_of.cache_clear()
    try:
        assert is_on_this_machine(str(tmp_path)) is here
    finally:
        mounts._kind_of.cache_clear()


def test_where_nobody_can_tell_it_is_not_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_on_this_machine(str(tmp_path / "not made yet"))
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "no proc")
    mounts._kind_of.cache_clear()
    try:
        assert not is_on_this_machine(str(tmp_path))
    finally:
        mounts._kind_of.cache_clear()
