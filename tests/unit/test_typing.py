"""Every type checker that is installed accepts a right program, and refuses each wrong line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "typing"
CORE = str(ROOT / "core")
CHECKERS = {
    "mypy": ["mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", "{cache}"],
    "basedpyright": ["basedpyright", "--level", "error", "-p", "{config}"],
    "ty": ["ty", "check", "--extra-search-path", CORE, "--python", sys.prefix,
           "--output-format", "concise"],
    "pyrefly": ["pyrefly", "check", "--search-path", CORE, "--python-interpreter-path",
                sys.executable, "--output-format", "min-text"],
}  # fmt: skip


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_accepts_the_right_program_and_refuses_each_wrong_line(
    checker: str, tmp_path: Path
) -> None:
    if which(checker) is None:
        pytest.skip(f"{checker} is not installed: install the extra 'typing'")
    assert lines_refused(checker, PROGRAMS / "public_api.py", tmp_path) == []
    wrong = PROGRAMS / "wrong.py"
    expected = [
        number
        for number, line in enumerate(wrong.read_text("utf-8").splitlines(), 1)
        if "# wrong" in line and not (checker == "ty" and "but ty" in line)
    ]
    assert lines_refused(checker, wrong, tmp_path) == expected


def lines_refused(checker: str, program: Path, folder: Path) -> list[int]:
    config = folder / "pyrightconfig.json"
    config.write_text(
        json.dumps(
            {"extraPaths": [CORE], "typeCheckingMode": "standard", "include": [str(program)]}
        )
    )
    command = [each.format(cache=folder, config=config) for each in CHECKERS[checker]]
    if checker == "basedpyright":
        command += ["--pythonpath", sys.executable]
    else:
        command.append(str(program))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    shown = [line for line in done.stdout.splitlines() if re.search("error|ERROR", line)]
    numbers = {
        int(number) for line in shown for number in re.findall(rf"{program.name}:(\d+)", line)
    }
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return sorted(numbers)
