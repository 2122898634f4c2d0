"""Installing packages of Debian, only where this user may do so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.project import debian
from tools.project.console import Log


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the only commands on the PATH, apart from those of the system."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def add(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_user_who_needs_a_password_installs_nothing(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(commands, "apt-get", f"touch {tmp_path}/called")
    add(commands, "sudo", "exit 1")
    monkeypatch.setattr(debian.os, "geteuid", lambda: 1000)
    assert debian.words_of_root() is None
    assert not debian.install("jre", Log(tmp_path / "log"))
    assert not (tmp_path / "called").exists()


def test_a_user_who_needs_no_password_installs_with_sudo(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(commands, "apt-get", f'echo "apt-get $*" >>{tmp_path}/called')
    add(commands, "sudo", f'echo sudo >>{tmp_path}/called; shift; exec "$@"')
    monkeypatch.setattr(debian.os, "geteuid", lambda: 1000)
    assert debian.install("jre", Log(tmp_path / "log"))
    assert (tmp_path / "called").read_text().splitlines() == [
        "sudo",
        "sudo",
        "apt-get update",
        "sudo",
        "apt-get install -y --no-install-recommends jre",
    ]


def test_root_installs_even_if_the_lists_cannot_be_updated(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(commands, "apt-get", '[ "$1" = install ]')
    monkeypatch.setattr(debian.os, "geteuid", lambda: 0)
    assert debian.install("jre", Log(tmp_path / "log"))


def test_a_failure_shows_what_apt_get_said(
    commands: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add(commands, "apt-get", 'echo "Unable to locate package $5"; exit 100')
    monkeypatch.setattr(debian.os, "geteuid", lambda: 0)
    assert not debian.install("jre", Log(tmp_path / "log"))
    assert "Unable to locate package" in capsys.readouterr().err


def test_a_machine_without_apt_get_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian.shutil, "which", lambda _: None)
    assert not debian.install("jre", Log(tmp_path / "log"))
