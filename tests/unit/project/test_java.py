"""Finding Java: by its own account, in the order of preference, or with apt-get."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.project import java
from tools.project.console import Failed, Log


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without Java."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{empty}:/usr/bin:/bin")
    monkeypatch.setattr(java.shutil, "which", lambda _: None)
    monkeypatch.setattr(java, "PLACES", (f"{tmp_path}/jvm/*/bin/java",))
    return tmp_path


def fake(home: Path, version: str) -> str:
    """Write a command that says that it is this Java."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(
        "#!/bin/sh\n"
        f"echo '    java.home = {home}' >&2\n"
        f"echo '    java.specification.version = {version}' >&2\n"
    )
    command.chmod(0o755)
    return str(command)


@pytest.mark.parametrize(
    ("version", "suits"), [("1.8", False), ("11", False), ("17", True), ("21", True), ("25", True)]
)
def test_a_java_suits_from_version_17_on(tmp_path: Path, version: str, suits: bool) -> None:
    found = java.home_of(fake(tmp_path / "some", version))
    assert found == (str(tmp_path / "some") if suits else None)


def test_a_command_that_is_not_java_does_not_suit(tmp_path: Path) -> None:
    assert java.home_of("/bin/true") is None
    assert java.home_of(str(tmp_path / "missing")) is None


def test_java_home_comes_first_and_an_old_one_is_ignored(
    nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert java.find() is None
    fake(nothing / "jvm" / "a", "21")
    assert java.find() == str(nothing / "jvm" / "a")
    monkeypatch.setenv("JAVA_HOME", str(nothing / "own"))
    fake(nothing / "own", "17")
    assert java.find() == str(nothing / "own")
    (nothing / "own" / "bin" / "java").unlink()
    (nothing / "own" / "bin").rmdir()
    fake(nothing / "own", "11")
    assert java.find() == str(nothing / "jvm" / "a")


def test_the_default_java_of_debian_is_installed_if_it_has_no_java_17(
    nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def install(package: str, log: Log) -> bool:
        asked.append(package)
        if package == "openjdk-17-jre-headless":
            return False
        fake(nothing / "jvm" / "default", "21")
        return True

    monkeypatch.setattr(java.debian, "install", install)
    assert java.need(Log(nothing / "log")) == str(nothing / "jvm" / "default")
    assert asked == ["openjdk-17-jre-headless", "default-jre-headless"]


def test_without_java_the_error_says_how_to_get_it(
    nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java.debian, "install", lambda *_: False)
    with pytest.raises(Failed, match="apt-get install openjdk-17-jre-headless"):
        java.need(Log(nothing / "log"))
