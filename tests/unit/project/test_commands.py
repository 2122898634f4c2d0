"""The command line of ``./run``, and the steps of its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools.project import commands
from tools.project.legs import FULL, NIGHT, QUICK

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[3]
HERE = {"PYSPARK_PYTHON": "/env/bin/python", "PATH": "/usr/bin"}


def names(steps: Sequence[commands.Step]) -> list[str]:
    return [step.name for step in steps]


def test_the_quick_tests_are_lint_docs_and_the_quick_legs() -> None:
    first, second = map(names, commands.quick_steps(HERE))
    assert "spark-tests" in first
    assert "tests" in second, "Spark and they would need more than 2 GB together"
    found = first + second
    assert sorted(found) == sorted([*commands.LINT, "docs", *(leg.name for leg in QUICK)])


def test_the_full_tests_are_the_full_legs_the_wheel_and_the_lowest_versions() -> None:
    lowest = {"PYSPARK_PYTHON": "/lowest/bin/python"}
    steps = commands.full_steps(HERE, lowest)
    assert set(names(steps)) == {*(leg.name for leg in FULL), "wheel-tests", "lowest-tests"}
    delta = next(step for step in steps if step.name == "delta-tests")
    assert delta.command[0] == "/lowest/bin/python"
    assert delta.variables["OPENDATA_BUFFER_DELTA"] == "required"


def test_without_the_lowest_versions_the_other_tests_run() -> None:
    found = set(names(commands.full_steps(HERE, None)))
    assert found == {*(leg.name for leg in FULL if not leg.lowest), "wheel-tests"}


class Replaced(Exception):
    """A program has replaced the process."""


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is installed, and an exception takes the place of another program."""

    def replace(python: str, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
        raise Replaced(*arguments)

    environment = commands.Environment(Path("/env"))
    monkeypatch.setattr(commands, "replace", replace)
    monkeypatch.setattr(commands, "need_python", lambda *_: (environment, dict(HERE)))
    monkeypatch.setattr(commands, "need_java", lambda _, variables: dict(variables))
    monkeypatch.setattr(commands, "need_quick", lambda: dict(HERE))


def replaced_by(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(Replaced) as caught:
        commands.main(arguments)
    return tuple(caught.value.args)


@pytest.mark.usefixtures("ready")
def test_arguments_of_test_go_to_pytest() -> None:
    assert replaced_by("test", "tests/unit", "-x") == ("-m", "pytest", "tests/unit", "-x")


@pytest.mark.usefixtures("ready")
def test_arguments_of_a_nightly_test_go_to_pytest_with_more_of_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NIGHT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENDATA_BUFFER_SEEDS", "7")
    assert replaced_by("test", "--nightly", "tests/unit") == ("-m", "pytest", "tests/unit")
    assert os.environ["OPENDATA_BUFFER_KILLS"] == NIGHT["OPENDATA_BUFFER_KILLS"]
    assert os.environ["OPENDATA_BUFFER_SEEDS"] == "7", "a variable that is set stays"
    for name in NIGHT:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    ("scope", "has", "lacks"),
    [
        ((), {"tests", "mypy"}, {"chaos-tests", "specification"}),
        (("--full",), {"full-tests", "chaos-tests", "wheel-tests"}, {"tests", "mypy", "referees"}),
        (("--nightly",), {"tests", "chaos-tests", "specification", "spark-4.0-tests"}, set()),
    ],
)
def test_a_scope_runs_its_steps_and_a_failure_is_the_exit_code(
    scope: tuple[str, ...], has: set[str], lacks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(groups: Sequence[Sequence[commands.Step]], failed: Sequence[str] = ()) -> list[str]:
        for steps in groups:
            ran.extend(names(steps))
        return ["mypy"]

    def variables(self: commands.Others, name: str, *_: object) -> dict[str, str]:
        return dict(HERE)

    for name in NIGHT:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(commands, "run", run)
    monkeypatch.setattr(commands.Others, "variables", variables)
    monkeypatch.setattr(commands.subprocess, "run", lambda *_, **__: None)
    assert commands.main(["test", *scope]) == 1
    assert has <= {*ran}
    assert not lacks & {*ran}
    assert len(ran) == len({*ran})


def test_an_environment_that_cannot_be_made_is_a_failure_and_not_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "first_of", lambda _: None)
    others = commands.Others(HERE)
    assert others.variables("lowest", "spark,test", (), ("3.11", "3.12")) is None
    assert others.failed == ["lowest"]
    assert "needs Python 3.11 or 3.12; none was found" in capsys.readouterr().err


def test_another_environment_sees_neither_the_commands_nor_the_classes_of_venv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(commands.Environment, "need", lambda _: None)
    given = {**HERE, "PATH": "/env/bin:/usr/bin", commands.CLASSES: "/env/classes.jsa", "JAVA": "1"}
    found = commands.Others(given).variables("other", "spark", (), ())
    assert found is not None
    assert found["PATH"] == f"{ROOT}/.venv-other/bin:/usr/bin"
    assert commands.CLASSES not in found
    assert found["JAVA"] == "1"


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``./run`` from another directory."""
    command = ["/bin/sh", str(ROOT / "run"), *arguments]
    return subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)


def test_the_script_starts_the_named_python_in_the_checkout(tmp_path: Path) -> None:
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$(pwd) $*"\n')
    python.chmod(0o755)
    done = run_script("test", "a b", PYTHON=str(python), PATH="/usr/bin:/bin", HOME="/root")
    assert done.stdout == f"{ROOT} -m tools.project test a b\n"


def test_the_script_passes_by_a_python_that_is_too_old(tmp_path: Path) -> None:
    for name, script in (("python3.12", "exit 1"), ("python3", '[ "$1" = -c ] || echo "$0"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = run_script("help", PATH=f"{tmp_path}:/usr/bin:/bin", PYENV_ROOT="/nonexistent")
    assert done.stdout == f"{tmp_path}/python3\n"


def test_without_a_python_the_script_says_what_to_install(tmp_path: Path) -> None:
    for name in ("dirname", "cat"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = run_script("help", PATH=str(tmp_path), PYENV_ROOT="/nonexistent")
    assert done.returncode == 1
    assert "Python 3.11 or later is needed" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 0),
        (["help"], 0),
        (["--help"], 0),
        (["nonsense"], 2),
        (["setup", "everything"], 2),
        (["test", "--full", "tests/unit"], 2),
        (["lint", "core"], 2),
    ],
)
def test_the_usage_goes_where_it_belongs(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(arguments) == code
    out, err = capsys.readouterr()
    assert (err if code else out).startswith("usage: ./run COMMAND")
    assert not (out if code else err)


def test_the_commands_need_only_the_standard_library() -> None:
    """``./run`` starts before anything is installed. Without ``site``, nothing else is found."""
    modules = "tools.project.commands, tools.servers, tools.specification"
    command = [sys.executable, "-S", "-c", f"import {modules}"]
    subprocess.run(command, cwd=ROOT, check=True)
