from __future__ import annotations

import os
from pathlib import Path

import pytest

from opendata_buffer.stores.local import TemporaryFiles
from opendata_buffer.testing.runtime import ManualRuntime


@pytest.fixture
def files(tmp_path: Path, runtime: ManualRuntime) -> TemporaryFiles:
    made = TemporaryFiles(str(tmp_path / "tmp"), runtime)
    made.prepare()
    return made


@pytest.mark.parametrize("pieces", [[b"all"], [b"a", b"ll"], [b""], []])
def test_a_file_holds_its_pieces_and_is_durable_when_it_is_given_out(
    files: TemporaryFiles, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes]
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def sync(fd: int) -> None:
        synced.append(fd)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    with files.written(pieces) as file:
        assert Path(file.path).read_bytes() == b"".join(pieces)
        assert synced == [file.fd]


def test_a_file_that_got_no_name_is_removed(files: TemporaryFiles, tmp_path: Path) -> None:
    with files.written([b"1"]):
        assert len(os.listdir(tmp_path / "tmp")) == 1
    assert os.listdir(tmp_path / "tmp") == []
    with pytest.raises(RuntimeError), files.written([b"1"]):
        raise RuntimeError
    assert os.listdir(tmp_path / "tmp") == []


def test_a_file_that_got_its_name_stays(files: TemporaryFiles, tmp_path: Path) -> None:
    with files.written([b"1"]) as file:
        os.replace(file.path, tmp_path / "name")
        file.renamed = True
        (tmp_path / "tmp" / os.path.basename(file.path)).write_bytes(b"of somebody else")
    assert (tmp_path / "name").read_bytes() == b"1"
    assert len(os.listdir(tmp_path / "tmp")) == 1


def test_what_killed_writers_left_is_swept_after_a_day_and_once(
    files: TemporaryFiles, tmp_path: Path, runtime: ManualRuntime
) -> None:
    old, new = tmp_path / "tmp" / "old", tmp_path / "tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    two_days_ago = os.stat(new).st_mtime - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    files.prepare()
    assert sorted(os.listdir(tmp_path / "tmp")) == ["new", "old"]
    TemporaryFiles(str(tmp_path / "tmp"), runtime).prepare()
    assert os.listdir(tmp_path / "tmp") == ["new"]


def test_a_directory_that_somebody_removed_is_made_again(
    files: TemporaryFiles, tmp_path: Path
) -> None:
    os.rmdir(tmp_path / "tmp")
    files.prepare()
    with files.written([b"1"]) as file:
        assert Path(file.path).read_bytes() == b"1"


def test_f6_the_time_is_that_of_the_file_system(
    files: TemporaryFiles, tmp_path: Path, runtime: ManualRuntime
) -> None:
    runtime.set_wall_clock(0)  # this process believes it is 1970
    path = tmp_path / "other"
    path.write_bytes(b"")
    assert abs(files.now_ms() - path.stat().st_mtime_ns // 1_000_000) < 60_000
    assert os.listdir(tmp_path / "tmp") == []


def test_without_a_directory_the_time_is_the_runtimes(
    tmp_path: Path, runtime: ManualRuntime
) -> None:
    assert TemporaryFiles(str(tmp_path / "nothing"), runtime).now_ms() == runtime.now_ms()
