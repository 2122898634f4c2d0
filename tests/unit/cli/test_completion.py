"""Shell completion."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from opendata_buffer.cli.commands import cli
from opendata_buffer.cli.completion import SHELLS
from tests.unit.cli.shell import fails, ok


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ok("completion", shell).stdout
    assert f"_OPENDATA_BUFFER_COMPLETE={shell}_complete" in script
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert ok("completion").stdout == script


def test_a_shell_that_has_none_is_told_which_have() -> None:
    assert "name one, for example 'opendata-buffer completion bash'" in _without_shell("")
    assert "the shell is tcsh" in _without_shell("/bin/tcsh")


def _without_shell(value: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHELL", value)
        return fails("completion")


@pytest.mark.parametrize(
    ("shell", "start", "script"),
    [
        ("bash", ".bashrc", ".local/share/opendata-buffer/completion.bash"),
        ("zsh", ".zshrc", ".local/share/opendata-buffer/completion.zsh"),
        ("fish", None, ".config/fish/completions/opendata-buffer.fish"),
    ],
)
def test_one_command_installs_it_once(
    home: Path, shell: str, start: str | None, script: str
) -> None:
    if start is not None:
        (home / start).write_text("alias x=y")  # without an end of line
    ok("completion", shell, "--install")
    out = ok("completion", shell, "--install").stdout
    assert f"wrote {home / script}" in out
    assert (home / script).read_text() == ok("completion", shell).stdout
    if start is not None:
        line = f"source {home / script}  # opendata-buffer completion\n"
        assert (home / start).read_text() == f"alias x=y\n{line}"


def test_a_home_that_cannot_be_written_is_told(home: Path) -> None:
    (home / ".local").write_text("in the way")
    line = fails("completion", "bash", "--install")
    assert "Print the script with 'opendata-buffer completion bash'" in line


def completed(shell: str, script: str) -> list[str]:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([path, "-c", script], capture_output=True, timeout=60, check=True)
    return done.stdout.decode().split()


@pytest.fixture
def program(home: Path) -> Path:
    found = home / "opendata-buffer"
    found.write_text(f'#!/bin/sh\nexec {sys.executable} -m opendata_buffer "$@"\n')
    found.chmod(0o755)
    return found


def test_bash_completes_commands_and_options(home: Path, program: Path) -> None:
    ok("completion", "bash", "--install")

    def press_tab(*words: str) -> list[str]:
        typed = " ".join(words)
        return completed(
            "bash",
            f"source {home}/.bashrc; COMP_WORDS=(opendata-buffer {typed}); COMP_CWORD={len(words)};"
            f" _opendata_buffer_completion {program}; echo ${{COMPREPLY[@]}}",
        )

    assert press_tab("sta") == ["status"]
    assert "--max-backlog" in press_tab("status", "--max-")


@pytest.mark.parametrize("words", [["status"], ["list"], ["topic", "expand"]])
def test_where_a_store_is_wanted_the_shell_completes_directories(words: list[str]) -> None:
    press_tab = ShellComplete(cli, {}, "opendata-buffer", "X").get_completions
    assert [(each.value, each.type) for each in press_tab(words, "da")] == [("da", "dir")]
    assert [each.value for each in press_tab(words, "--he")] == ["--help"]


def test_zsh_loads_the_script_without_an_error(home: Path) -> None:
    ok("completion", "zsh", "--install")
    found = completed("zsh", f"source {home}/.zshrc; echo $_comps[opendata-buffer]")
    assert found == ["_opendata_buffer_completion"]


def test_fish_loads_the_script_without_an_error(home: Path) -> None:
    ok("completion", "fish", "--install")
    script = home / ".config" / "fish" / "completions" / "opendata-buffer.fish"
    assert completed("fish", f"source {script}; complete -c opendata-buffer") != []
