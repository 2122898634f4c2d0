"""The checks of lint: a missing tool is named, and a failing one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.checks import ROOT, Check, checks, main, run, tracked

pytestmark = pytest.mark.checkout

PYTHON = Path(sys.executable).name
GOOD = Check(PYTHON, ("-c", "print('fine')"))
BAD = Check(PYTHON, ("-c", "print('line 3: wrong'); raise SystemExit(4)"))
MISSING = Check("no-such-tool", (), "pip install no-such-tool")


def test_a_check_that_passes_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([GOOD], tmp_path, required=True) == []
    assert capsys.readouterr().out == ""


def test_a_check_that_fails_is_named_with_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([GOOD, BAD], tmp_path, required=False) == [PYTHON]
    assert "line 3: wrong" in capsys.readouterr().out


def test_a_missing_tool_is_named_with_the_way_to_get_it_and_fails_only_where_it_is_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([MISSING], tmp_path, required=False) == []
    said = capsys.readouterr().out
    assert "not checked by no-such-tool" in said
    assert "pip install no-such-tool" in said
    assert run([MISSING], tmp_path, required=True) == ["no-such-tool"]


def test_only_tracked_files_are_spell_checked(tmp_path: Path) -> None:
    subprocess.run(["git", "init"], cwd=tmp_path, check=True, capture_output=True)
    for name in ("page.md", "picture.svg", "scratch.md"):
        (tmp_path / name).write_text("teh")
    subprocess.run(["git", "add", "page.md", "picture.svg"], cwd=tmp_path, check=True)
    assert tracked(tmp_path) == ["page.md"]


def test_the_checks_read_files_that_exist() -> None:
    for check in checks(ROOT):
        for argument in check.arguments:
            if not argument.startswith("-"):
                assert (ROOT / argument).exists(), f"{check.name} {argument}"


def test_wrong_arguments_exit_with_2() -> None:
    assert main(["everything"]) == 2
