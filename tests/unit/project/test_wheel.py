"""Comparing two builds of the wheel, and the folder in which its tests run."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.project import wheel


def archive(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(zipfile.ZipInfo(name), text)
    return path


def test_two_wheels_with_the_same_bytes_do_not_differ(tmp_path: Path) -> None:
    one = archive(tmp_path / "one.whl", a="1", b="2")
    assert wheel.differences(one, archive(tmp_path / "other.whl", a="1", b="2")) == []


def test_the_files_that_differ_are_named(tmp_path: Path) -> None:
    one = archive(tmp_path / "one.whl", a="1", b="2", c="3")
    other = archive(tmp_path / "other.whl", a="1", b="x", d="4")
    assert wheel.differences(one, other) == ["b", "c", "d"]


def test_two_wheels_with_the_same_files_in_another_order_differ(tmp_path: Path) -> None:
    one = archive(tmp_path / "one.whl", a="1", b="2")
    (found,) = wheel.differences(one, archive(tmp_path / "other.whl", b="2", a="1"))
    assert found.startswith("one.whl (")


@pytest.mark.checkout
def test_the_tests_of_the_wheel_run_without_the_source_of_the_package(tmp_path: Path) -> None:
    copy = wheel.copy_tests(tmp_path)
    assert (copy / "tests" / "unit" / "buffer_source").is_dir()
    assert (copy / "pyproject.toml").is_file()
    for place in ("core/opendata_buffer", "buffer_source", "buffer_sink"):
        assert not (copy / place).exists()
    assert not (copy / "pyspark_opendata_buffer.py").exists()
    assert not (copy / ".venv").exists()
