from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendata_buffer.stores.local import RESERVED, directory_of, files_below


def keys_below(root: Path, prefix: str, start_after: str = "") -> list[str]:
    directory = directory_of(prefix)
    assert directory is not None
    return [info.key for info in files_below(str(root), directory, prefix, start_after)]


def fill(root: Path, *keys: str) -> list[str]:
    for key in keys:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.encode())
    return sorted(keys)


def test_files_come_in_the_order_of_their_keys_also_across_directories(tmp_path: Path) -> None:
    keys = fill(tmp_path, "a/b", "a-b", "a0", "a/c/d", "a/c-d", "b")
    assert keys == ["a-b", "a/b", "a/c-d", "a/c/d", "a0", "b"]
    assert keys_below(tmp_path, "") == keys


@pytest.mark.parametrize("start_after", ["", "a", "a-b", "a/", "a/c", "a/c/d", "a/d", "a0", "z"])
@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/c", "a/c/", "b", "a/x/"])
def test_prefix_and_start_choose_among_the_keys(
    tmp_path: Path, prefix: str, start_after: str
) -> None:
    keys = fill(tmp_path, "a/b", "a-b", "a0", "a/c/d", "a/c-d", "b")
    wanted = [key for key in keys if key.startswith(prefix) and key > start_after]
    assert keys_below(tmp_path, prefix, start_after) == wanted


def test_size_and_time_are_the_files(tmp_path: Path) -> None:
    fill(tmp_path, "in/a")
    os.utime(tmp_path / "in/a", ns=(0, 1_234_567_890))
    (info,) = files_below(str(tmp_path), "in", "in/")
    assert (info.size, info.last_modified_ms) == (4, 1234)


def test_names_that_are_not_utf8_and_things_that_are_not_files_are_not_listed(
    tmp_path: Path,
) -> None:
    fill(tmp_path, "in/a")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "in" / "fifo")
    os.close(os.open(os.fsencode(tmp_path) + b"/in/\xff", os.O_CREAT))
    assert keys_below(tmp_path, "in/") == ["in/a"]


def test_the_stores_own_files_are_not_listed(tmp_path: Path) -> None:
    fill(tmp_path, f"{RESERVED}/tmp/x", f"in/{RESERVED}/lock", "in/a")
    assert keys_below(tmp_path, "") == ["in/a"]


def test_a_directory_that_is_missing_or_a_file_holds_nothing(tmp_path: Path) -> None:
    fill(tmp_path, "in/a")
    assert keys_below(tmp_path, "out/") == []
    assert keys_below(tmp_path, "in/a/") == []
    assert keys_below(tmp_path, "/") == []


def test_a_directory_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        keys_below(tmp_path, "in/")


def test_the_directory_of_a_prefix_is_what_lies_before_its_last_slash() -> None:
    assert [directory_of(each) for each in ("", "in", "in/", "in/a/b")] == ["", "", "in", "in/a"]


@pytest.mark.parametrize(
    "prefix", ["/in/", "a//b", "../a", "a/../b", "./a", f"{RESERVED}/", f"in/{RESERVED}/x"]
)
def test_no_key_starts_outside_of_the_store(prefix: str) -> None:
    assert directory_of(prefix) is None


@pytest.mark.parametrize("prefix", ["in/a\0", "in/\udcff"])
def test_no_key_starts_with_what_is_no_text(prefix: str) -> None:
    assert directory_of(prefix) is None
