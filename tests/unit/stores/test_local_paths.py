from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores.local import RESERVED, LocalPaths


def test_an_object_is_a_file_of_its_own_name() -> None:
    assert LocalPaths("/data").object("in/a b%20#.batch") == "/data/in/a b%20#.batch"


@pytest.mark.parametrize("key", [RESERVED, f"{RESERVED}/tmp/x", f"in/{RESERVED}/check"])
def test_no_object_lies_among_the_stores_own_files(key: str) -> None:
    with pytest.raises(InvalidInput, match="the store keeps its own files"):
        LocalPaths("/data").object(key)


@pytest.mark.parametrize("key", ["", "/a", "a/../b", "a//b", "a\0b"])
def test_no_object_lies_outside_of_the_root(key: str) -> None:
    with pytest.raises(InvalidInput, match="key"):
        LocalPaths("/data").object(key)


def test_a_part_longer_than_a_file_name_is_refused() -> None:
    paths = LocalPaths("/data")
    assert paths.object("é" * 127) == "/data/" + "é" * 127
    with pytest.raises(InvalidInput, match="part of 256 bytes between slashes"):
        paths.object("in/" + "é" * 128)


def test_roots_inside_each_other_have_the_same_lock_for_the_same_file() -> None:
    # A producer with /data and the prefix q/in, a consumer with /data/q and the prefix in: with a
    # lock for each root, both could replace one version, and the first append would be lost.
    outer, inner = LocalPaths("/data"), LocalPaths("/data/q")
    assert outer.lock("q/in/m") == inner.lock("in/m")
    assert outer.lock("q/in/m") != outer.lock("q/in/n")
    assert outer.lock("q/in/m").startswith(f"/data/q/in/{RESERVED}/")


def test_the_lock_of_the_longest_name_is_a_file_name() -> None:
    assert len(os.path.basename(LocalPaths("/data").lock("é" * 127))) <= 255


@pytest.mark.parametrize("root", ["/", "//", "/dbfs/mnt/queue", "/Volumes/main/queue"])
def test_a_root_without_locks_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(InvalidInput, match=r"root of the file system|Databricks mount"):
        LocalPaths(root)


def test_on_a_mac_volumes_are_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert LocalPaths("/Volumes/disk").root == "/Volumes/disk"


def test_a_link_into_a_databricks_mount_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "realpath", lambda _: "/dbfs/mnt/queue")
    with pytest.raises(InvalidInput, match="Databricks mount"):
        LocalPaths(tmp_path / "link")
